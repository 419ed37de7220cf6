"""Bodies: JSON as RFC 8259 has it, in UTF-8 and not nested without end; everything else is a 400, never more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from deepinfer_core.server.errors import bad_request

MAX_DEPTH = 64
"""Levels of lists and objects; schemas of structured output are the deepest thing that clients send."""

LARGE = 64 << 10
"""Bytes from which on a body is read beside the event loop, for other streams to go on."""


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON text. Of a key that stands twice in an object, the last value counts.

    Raises:
        ApiError: It is not UTF-8, not JSON, no object, or nested too deeply.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: byte {error.start} is no part of a character") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise bad_request(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_KINDS.get(type(value), 'something else')}")
    _check_depth(value)
    if _SURROGATE.search(text):
        _check_unicode(value)
    return value


_TOO_DEEP = f"the body is nested too deeply: at most {MAX_DEPTH} levels of lists and objects"
_KINDS = {list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _no_constant(name: str) -> None:
    raise bad_request(f"the body is not JSON: {name} is no number there")


def _integer(digits: str) -> int:
    if len(digits) > 400:  # no field takes such a number, and reading it takes time that grows with its square
        raise bad_request(f"the body holds a number of {len(digits)} digits")
    return int(digits)


def _check_unicode(value: Any) -> None:
    """Refuse lone surrogates, which stand for no character: no tokenizer and no answer could hold them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"the body holds {error.object[error.start]!a}, a half of a surrogate pair") from None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            below += [v for v in (one.values() if isinstance(one, dict) else one) if isinstance(v, dict | list)]
        if not below:
            return
        level = below
    raise bad_request(_TOO_DEEP)


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            raw = await self.body()
            self._json = parse_json(raw) if len(raw) < LARGE else await asyncio.to_thread(parse_json, raw)
        return self._json


class JsonRoute(APIRoute):
    """A route whose body is read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler around our request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
