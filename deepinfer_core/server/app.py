"""The app: routes behind the middleware that names, counts, admits and bounds requests."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from deepinfer_core import __version__
from deepinfer_core.config import ServerConfig
from deepinfer_core.server.access import Access, read_key
from deepinfer_core.server.errors import install
from deepinfer_core.server.requests_log import RequestsLog
from deepinfer_core.server.routes import build_router
from deepinfer_core.server.service import Service


def create_app(service: Service, settings: ServerConfig, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """Return the ASGI app.

    Args:
        service: What answers.
        settings: The limits; the API key is read here.
        routers: More routes, behind the same doors: the page's.

    Raises:
        ConfigError: The API key's file cannot be read.
    """
    app = FastAPI(
        title="deepinfer",
        version=__version__,
        summary="An OpenAI-compatible server for quantized models",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    install(app)
    app.include_router(build_router(service))
    for router in routers:
        app.include_router(router)

    # The last one added is the first to see a request.
    app.add_middleware(Access, settings=settings, key=read_key(settings))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestsLog, service=service)
    return app
