"""Who may come in, and with how much: origin, API key, size and pace of the body, before any route sees a request."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import os
import time
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_core.config import ServerConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.server.errors import ApiError, response_of

KEY_VARIABLE = "DEEPINFER_API_KEY"

OPEN_PATHS = frozenset({"/health"})

DISCARD_SECONDS = 2.0
"""How long the rest of a body that is too large is read and thrown away, for its sender to get to see the answer."""


def read_key(settings: ServerConfig) -> str | None:
    """Return the API key of the configured file, or of the environment; None where neither is given.

    Raises:
        ConfigError: The file cannot be read, or there is no key in it.
    """
    if settings.api_key_file is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None
    path = Path(settings.api_key_file)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[server] api_key_file = {str(path)!r} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"[server] api_key_file = {str(path)!r} is empty; write the key into it")
    return key


class Access:
    """Middleware: refuses, or passes a request on with its whole body in memory.

    Args:
        app: What comes behind it.
        settings: The limits.
        key: The API key; None for none.
    """

    def __init__(self, app: ASGIApp, settings: ServerConfig, key: str | None) -> None:
        self._app = app
        self._settings = settings
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(headers)
            self._check_key(scope, headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        except ConnectionError:
            return  # it went away before it had sent everything
        await self._app(scope, _replay(body, receive), send)

    def _check_origin(self, headers: Headers) -> None:
        """Refuse pages of other sites: a browser sends some of their requests without asking first."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.cors_origins:
            return
        if origin.partition("://")[2] != headers.get("host", ""):
            text = "this origin may not use the server; [server] cors_origins lists those that may"
            raise ApiError(403, text, "permission_error", code="origin_not_allowed")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        if not any(hmac.compare_digest(given, self._key) for given in _given_keys(headers)):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer, Basic realm="deepinfer: any name, and the API key as password"'},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; None where there is none."""
        length = headers.get("content-length", "0")
        if "transfer-encoding" not in headers and length == "0":
            return None
        most = self._settings.max_body
        if length.isdigit() and int(length[:20]) > most:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.read_timeout_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            text = f"the body did not arrive within {self._settings.read_timeout_seconds} seconds"
            raise ApiError(408, text, code="timeout", headers={"Connection": "close"}) from None

    def _too_large(self) -> ApiError:
        text = f"the body is larger than {self._settings.max_body} bytes"
        return ApiError(413, text, code="request_too_large", headers={"Connection": "close"})


def _given_keys(headers: Headers) -> Sequence[bytes]:
    """Return the keys that a request brings, as a bearer token or as the password of HTTP Basic."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    value = value.strip()
    if kind.lower() == "bearer":
        return [value.encode("latin-1", "replace"), value.encode()]
    if kind.lower() == "basic":
        try:
            return [base64.b64decode(value, validate=True).partition(b":")[2]]
        except (binascii.Error, ValueError):
            return []
    return []


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and let a sender that has not finished read the answer before the connection closes."""

    async def send_slowly(message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and error.status_code == 413:
            await send({**message, "more_body": True})
            await _discard(receive)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    await response_of(error)(scope, receive, send_slowly)


async def _discard(receive: Receive) -> None:
    until = time.monotonic() + DISCARD_SECONDS
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while time.monotonic() < until:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _replay(body: bytes | None, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body at once, then what comes behind it: the disconnect."""
    waiting = [] if body is None else [body]

    async def again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return again
