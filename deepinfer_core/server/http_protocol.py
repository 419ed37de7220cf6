"""uvicorn's HTTP/1.1 protocol with clocks: who sends a head byte by byte, or leaves an answer unread, is let go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol


class TimedProtocol(H11Protocol):
    """One connection.

    Attributes:
        read_timeout: Seconds for the head of a request to come.
        write_timeout: Seconds for a client to read what was sent before more is.
    """

    read_timeout = 20.0
    write_timeout = 30.0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a head."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun must end in time."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        super().connection_lost(exc)
        self._head_timer = _stop(self._head_timer)
        self._write_timer = _stop(self._write_timer)

    def pause_writing(self) -> None:
        """Start the clock for a client that does not read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop it."""
        super().resume_writing()
        self._write_timer = _stop(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of all errors; where an answer is under way already, close."""
        body = {"error": {"message": msg, "type": "invalid_request_error", "param": None, "code": "invalid_http"}}
        raw = json.dumps(body).encode()
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
            (b"connection", b"close"),
        ]
        parts: tuple[Any, ...] = (
            h11.Response(status_code=400, headers=headers, reason=STATUS_PHRASES[400]),
            h11.Data(data=raw),
            h11.EndOfMessage(),
        )
        try:
            for part in parts:
                self.transport.write(self.conn.send(part) or b"")
        except h11.LocalProtocolError:
            self.transport.abort()
        self.transport.close()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._head_timer = _stop(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.read_timeout, self._too_slow)

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, and return what stands for none."""
    if timer is not None:
        timer.cancel()
    return None
