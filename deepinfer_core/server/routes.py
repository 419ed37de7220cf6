"""The routes: what each takes and answers; the work is done by the modules that they name."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deepinfer_core import __version__
from deepinfer_core.kernels.nvrtc import compilations
from deepinfer_core.server.body import JsonRoute
from deepinfer_core.server.chat import chat_completions
from deepinfer_core.server.completions import completions
from deepinfer_core.server.errors import ErrorResponse, bad_request
from deepinfer_core.server.messages import chat_prompt
from deepinfer_core.server.prometheus import exposition
from deepinfer_core.server.service import ServedModel, Service, encode
from deepinfer_core.server.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is not what this route takes."},
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong."},
    404: {"model": ErrorResponse, "description": "There is no such model."},
    408: {"model": ErrorResponse, "description": "The body came too slowly."},
    413: {"model": ErrorResponse, "description": "The body is too large."},
    422: {"model": ErrorResponse, "description": "Never sent: what would be 422 elsewhere is 400 here."},
    429: {"model": ErrorResponse, "description": "The queue is full."},
    503: {"model": ErrorResponse, "description": "The model is being loaded, or the server is shutting down."},
}


def build_router(service: Service) -> APIRouter:
    """Return all routes but the page's."""
    router = APIRouter(route_class=JsonRoute, responses=ERRORS)

    @router.post("/v1/completions", tags=["generate"])
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await completions(service, body, request)

    @router.post("/v1/chat/completions", tags=["generate"])
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat_completions(service, body, request)

    @router.get("/v1/models", tags=["models"])
    async def list_models() -> dict[str, Any]:
        """Say which models are served."""
        return {"object": "list", "data": [_model(service.model)]}

    @router.get("/v1/models/{model:path}", tags=["models"])
    async def retrieve_model(model: str) -> dict[str, Any]:
        """Describe a model."""
        return _model(service.named(model))

    @router.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Turn a prompt or messages into tokens."""
        model = service.named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give prompt or messages, one of the two", "prompt")
        if body.messages is not None:
            tokens = await asyncio.to_thread(chat_prompt, model, body.messages)
        else:
            tokens = await asyncio.to_thread(encode, model, body.prompt or "", special=body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": model.window}

    @router.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Turn tokens into text, special tokens included."""
        model = service.named(body.model)
        wrong = next((token for token in body.tokens if token >= model.vocab_size), None)
        if wrong is not None:
            raise bad_request(f"token {wrong} is none of the model's {model.vocab_size}", "tokens")
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special=False)
        return {"prompt": text}

    @router.get("/health", tags=["state"])
    async def health() -> dict[str, str]:
        """Say that the process is up. The one route that needs no API key."""
        return {"status": "ok"}

    @router.get("/ready", tags=["state"])
    async def ready() -> Response:
        """Say whether requests are taken: 200 when the model is warm, 503 before that and while draining."""
        good = service.state == "ready" and service.loaded is not None
        headers = {} if good else {"Retry-After": "5"}
        return JSONResponse({"status": service.state}, 200 if good else 503, headers)

    @router.get("/metrics", tags=["state"], response_class=Response)
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        content, kind = exposition(service)
        return Response(content, media_type=kind)

    @router.get("/status", tags=["state"])
    async def status() -> dict[str, Any]:
        """What runs, how, and what has been counted."""
        return status_of(service)

    @router.get("/version", tags=["state"])
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}

    return router


def status_of(service: Service) -> dict[str, Any]:
    """Return the state of server and engine."""
    model = service.loaded
    found: dict[str, Any] = {
        "server": {
            "state": service.state,
            "uptime_seconds": round(time.time() - service.started, 3),
            "live_answers": service.live,
            "live_requests": len(service.generations),
            "client_disconnects": service.disconnects,
            "max_queue": service.settings.max_queue,
            "version": __version__,
        }
    }
    if model is not None:
        found["model"] = {
            "name": model.name,
            "max_model_len": model.window,
            **model.about,
            "kernels": list(model.kernels),
            "compilations_after_ready": compilations() - model.compiled,
        }
        found["engine"] = model.engine.status()
    return found


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "deepinfer",
        "max_model_len": model.window,
    }
