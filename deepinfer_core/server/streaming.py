"""Server-sent events, and who notices that the client has gone: both routes watch while they wait."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from deepinfer_core.server.errors import ApiError, as_api_error, body_of
from deepinfer_core.server.generation import Generation

log = logging.getLogger("deepinfer.server")

DONE = b"data: [DONE]\n\n"

GONE = ApiError(499, "the client has gone", code="client_closed_request")


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@asynccontextmanager
async def watched(receive: Receive, generation: Generation, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """End a generation when its client goes away; end it as well when the block is left before it has ended."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()
        generation.abort(GONE)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.abort(GONE)


class EventStream(Response):
    """Sends the pieces of an answer as they come; an error ends the stream as an event of its own.

    Args:
        generation: What runs.
        pieces: Events, several joined where several came at once.
        on_gone: Called when the client goes before the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, pieces: AsyncIterator[bytes], on_gone: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._pieces = pieces
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; see ASGI."""
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        async with watched(receive, self._generation, self._on_gone):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with aclosing(self._safe()) as pieces:
                async for piece in pieces:
                    await _send(send, piece)
            await send({"type": "http.response.body", "body": b""})

    async def _safe(self) -> Any:
        try:
            async for piece in self._pieces:
                yield piece
        except Exception as error:
            failure = as_api_error(error)
            if failure is not error and failure.status_code >= 500:
                log.error("a stream failed", exc_info=error)
            yield event(body_of(failure)) + DONE


def _send(send: Send, piece: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": piece, "more_body": True})
