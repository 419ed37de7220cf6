"""The HTTP server around the app: a socket that is bound before anything is loaded, signals, and a drained end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from deepinfer_core.config import ServerConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.server.http_protocol import TimedProtocol
from deepinfer_core.server.service import Service

MAX_HEAD = 64 << 10
"""Bytes of a request's head."""

LAST_WORDS_SECONDS = 1.0
"""How long, after the grace period, connections may take to send their last events before they are cut."""

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)
)  # SIGBREAK is Windows' Ctrl-Break


def bind(settings: ServerConfig) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address is in use, or is none of this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"[server] host = {settings.host!r}, port = {settings.port}: cannot listen there: {error}; "
            "choose another port, or stop what uses this one"
        ) from error
    del kind, proto
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address to open; one that stands for all addresses is shown as this machine's own."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Front(uvicorn.Server):
    """Serves an app until a signal, or `stop`: then running requests get their grace, and the rest an error event.

    Args:
        app: What to serve.
        service: What it runs.
        settings: Times and limits.

    Attributes:
        stopped_by: The signal that ended it; None for none.
    """

    def __init__(self, app: ASGIApp, service: Service, settings: ServerConfig) -> None:
        protocol = type(
            "Protocol",
            (TimedProtocol,),
            {
                "read_timeout": float(settings.read_timeout_seconds),
                "write_timeout": float(settings.write_timeout_seconds),
            },
        )
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=MAX_HEAD,
            )
        )
        self.stopped_by: int | None = None
        self._service = service
        self._settings = settings
        self._asked = 0
        self._draining: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Ask it to end, from any thread or a signal handler; asked again, it gives no more grace."""
        self._asked += 1

    def abandon(self) -> None:
        """Ask it to end at once."""
        self._asked += 2

    async def on_tick(self, counter: int) -> bool:
        """Look ten times a second whether an end was asked for; a signal handler may do no more than count."""
        if self._asked and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let connections say their last words, then cut them: one whose client reads nothing would stay for ever."""
        for _ in range(int(LAST_WORDS_SECONDS / 0.05)):
            if all(connection.cycle is None or connection.cycle.response_complete for connection in self._connections):
                break
            await asyncio.sleep(0.05)
        for connection in list(self._connections):
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.transport.abort()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Count signals instead of dying of them; outside the main thread there are none to count."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: FrameType | None) -> None:
            self.stopped_by = self.stopped_by or number
            self.stop()

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _connections(self) -> set[TimedProtocol]:
        return self.server_state.connections  # type: ignore[return-value]

    async def _drain(self) -> None:
        drained = asyncio.create_task(self._service.drain(self._settings.grace_seconds))
        while not drained.done() and self._asked < 2:
            await asyncio.wait({drained}, timeout=0.05)
        self._service.end_all()
        drained.cancel()
        self.should_exit = True
