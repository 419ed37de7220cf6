"""Errors as OpenAI clients know them, with the right status; never a client's text at length."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from deepinfer_core.errors import CapacityError, DeepinferError, RequestError

log = logging.getLogger("deepinfer.server")

LONGEST = 500
"""Characters of a message: what a client sent may be quoted in it, but not at length."""


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorBody


class ApiError(HTTPException):
    """An error with everything that its answer says.

    Args:
        status: HTTP status.
        message: For people.
        kind: OpenAI's ``type``.
        param: The field that it is about.
        code: For programs.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.kind = kind
        self.param = param
        self.code = code


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param, code=code)


def not_ready(message: str) -> ApiError:
    """Return a 503 that says when to come again."""
    return ApiError(503, message, "server_error", code="service_unavailable", headers={"Retry-After": "5"})


def as_api_error(error: BaseException) -> ApiError:
    """Return how an exception is answered: what a client can mend is a 400, all else a 500 without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        return bad_request(str(error), "max_tokens", "context_length_exceeded")
    if isinstance(error, RequestError):
        return bad_request(str(error))
    if isinstance(error, HTTPException):
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        return ApiError(error.status_code, str(error.detail), kind, headers=dict(error.headers or {}))
    text = str(error) if isinstance(error, DeepinferError) else "the server failed on this request; its log says why"
    return ApiError(500, text, "server_error", code="internal_error")


def body_of(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error, with bounded texts that any encoding can write."""
    return {
        "error": {
            "message": shortened(str(error.detail)),
            "type": error.kind,
            "param": error.param and shortened(error.param, 80),
            "code": error.code,
        }
    }


def shortened(text: str, longest: int = LONGEST) -> str:
    """Cut the middle out of a long text; lone surrogates become question marks."""
    if len(text) > longest:
        text = f"{text[: longest * 2 // 3]} ... {text[-(longest // 4) :]}"
    return text.encode("utf-8", "replace").decode()


def response_of(error: ApiError) -> JSONResponse:
    """Return the answer to a request that failed."""
    return JSONResponse(body_of(error), error.status_code, dict(error.headers or {}))


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Return the 400 that names the first field that is wrong; what stood in it is not repeated."""
    first = errors[0] if errors else {}
    path = [part for part in first.get("loc", ()) if part != "body"]
    param = _dotted(path)
    text = str(first.get("msg", "the request is not what this route takes"))
    more = f" (and {len(errors) - 1} more faults)" if len(errors) > 1 else ""
    return bad_request(f"{param}: {text}{more}" if param else text, param)


def _dotted(path: Iterable[object]) -> str | None:
    """Return the fields of a location; the names of union branches, which only pydantic knows, are left out."""
    shown = [str(part)[:40] for part in path if isinstance(part, int) or str(part).isidentifier()]
    return ".".join(part for part in shown if part not in _BRANCHES) or None


_BRANCHES = frozenset({"str", "int", "list", "dict", "StopText"})


def install(app: FastAPI) -> None:
    """Make an app answer every exception in this form."""

    async def known(_: Request, error: Exception) -> Response:
        return response_of(as_api_error(error))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return response_of(from_validation(error.errors()))

    async def unknown(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.scope.get("path", "")[:200], exc_info=error)
        return response_of(as_api_error(error))

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(DeepinferError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unknown)
