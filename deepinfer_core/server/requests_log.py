"""One line a request, as text or as JSON: its id, its route, its status and its time; and the counts for `/metrics`."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_core.server.service import Service

log = logging.getLogger("deepinfer.server")

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})

_CLEAN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def request_id(given: str | None) -> str:
    """Return the client's id where it is short and plain, else one of our own."""
    return given if given is not None and _CLEAN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex[:20]}"


class RequestsLog:
    """Middleware: names each request, counts it, and writes its line when its answer is complete."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_id(Headers(scope=scope).get("x-request-id"))
        start, status = time.perf_counter(), 499

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        except BaseException:
            status = 500 if status == 499 else status
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._service.http[route, method, status] += 1
            seconds = time.perf_counter() - start
            fields = {"request_id": name, "method": method, "route": route, "status": status}
            log.info(
                "%s %s %d in %.3f s (%s)",
                method, route, status, seconds, name,
                extra={"fields": {**fields, "seconds": round(seconds, 4)}},
            )  # fmt: skip


class JsonLines(logging.Formatter):
    """Writes each record as one line of JSON, whatever its text holds."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
