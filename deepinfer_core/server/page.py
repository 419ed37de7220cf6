"""The built-in page at ``/``: a chat and live charts, served from files of the package, with nothing from outside."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

ASSETS = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Files of ``server/page``, and what they are; nothing else is served."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The page runs its own scripts and talks to its own server: text of a model can never become either."""


def page_router() -> APIRouter:
    """Return the routes of the page: ``/`` and its files below ``/page/``."""
    router = APIRouter(include_in_schema=False)
    folder = resources.files("deepinfer_core.server") / "page"
    content = {name: (folder / name).read_bytes() for name in ASSETS}

    @router.get("/")
    async def index() -> Response:
        return Response(content["index.html"], media_type=ASSETS["index.html"], headers=HEADERS)

    @router.get("/page/{name}")
    async def asset(name: str) -> Response:
        if name not in ASSETS or name == "index.html":
            return Response("there is no such file", status_code=404, media_type="text/plain", headers=HEADERS)
        return Response(content[name], media_type=ASSETS[name], headers=HEADERS)

    return router
