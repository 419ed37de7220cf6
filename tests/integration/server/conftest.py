"""Servers to talk to: the tiny chat model behind the real app, on a real socket, in a thread of this process."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer_core.config import ServerConfig
from deepinfer_core.llm import LLM
from deepinfer_core.server.app import create_app
from deepinfer_core.server.front import Front, bind, url_of
from deepinfer_core.server.service import ServedModel, Service


class Served:
    """A running server and everything that a test looks at."""

    def __init__(self, llm: LLM, settings: ServerConfig, name: str = "tiny", headers: Any = None) -> None:
        self.llm = llm
        self.engine = llm.running.engine
        self.kv = llm.running.cache
        self.settings = settings
        self._sockets: list[socket.socket] = []
        self.service = Service(settings)
        sock = bind(settings)
        self.url = url_of(sock)
        self.port = sock.getsockname()[1]
        self.front = Front(create_app(self.service, settings), self.service, settings)
        self._thread = threading.Thread(target=self.front.run, kwargs={"sockets": [sock]}, daemon=True)
        self.engine.start()
        self.service.attach(ServedModel.of(llm.running, name))
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=30, headers=headers)
        self.wait(lambda: self.client.get("/ready").status_code == 200)

    def wait(self, good: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait until something holds; a hang is a failure."""
        until = time.monotonic() + seconds
        while not good():
            assert time.monotonic() < until, f"not within {seconds} s: {self.status()}"
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        return self.client.get("/status").json()

    def idle(self) -> bool:
        """True when nothing runs and every page is back."""
        pool = self.engine.status()["pool"]
        queues = self.engine.status()["queues"]
        return not any(queues.values()) and pool["available_pages"] == pool["total_pages"] and not self.service.live

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"model": "tiny", "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", {"model": "tiny", "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Post what must be refused; returns the error."""
        answer = self.post(path, body)
        assert answer.status_code == status, (answer.status_code, answer.text[:300])
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 700
        return error

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream; it must end in [DONE]."""
        with self.client.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def raw(self, timeout: float = 10) -> socket.socket:
        """Return a connected socket; it is closed with the server at the latest."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        self._sockets.append(sock)
        return sock

    @staticmethod
    def http(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        """Return a request as it goes over the wire."""
        head = {"Host": "127.0.0.1", **(headers or {})}
        if body:
            head = {"Content-Type": "application/json", "Content-Length": str(len(body)), **head}
        lines = [f"{method} {path} HTTP/1.1", *[f"{name}: {value}" for name, value in head.items()], "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

    @staticmethod
    def read_all(sock: socket.socket) -> bytes:
        """Return what comes until the other side closes or resets."""
        parts = []
        try:
            while part := sock.recv(65536):
                parts.append(part)
        except (ConnectionError, TimeoutError):
            pass
        return b"".join(parts)

    def close(self) -> None:
        self.client.close()
        for sock in self._sockets:
            sock.close()
        self.front.abandon()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.engine.stop()
        self.kv.assert_no_leaks()


class Slowed:
    """A model whose every forward takes a while, so that a test can act while one runs."""

    def __init__(self, model: Any, seconds: float) -> None:
        self.seconds = seconds
        self._model = model

    def forward(self, *args: Any) -> Any:
        time.sleep(self.seconds)
        return self._model.forward(*args)


@pytest.fixture
def make_served(tiny_chat_model: Path) -> Iterator[Callable[..., Served]]:
    """Make servers of a test's own; at the end all must be idle, with every page back."""
    made: list[Served] = []

    def make(
        slow: float = 0.0, requests: int = 16, pages: int | None = None, headers: Any = None, **settings: Any
    ) -> Served:
        cache = {"max_model_len": 240} if pages is None else {"memory": pages * 16 * 512}
        llm = LLM(tiny_chat_model, device="cpu", cache=cache, scheduler={"max_requests": requests})
        if slow:
            llm.running.engine._model = Slowed(llm.running.engine._model, slow)
        made.append(Served(llm, ServerConfig(port=0, **settings), headers=headers))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="module")
def served(tiny_chat_model: Path) -> Iterator[Served]:
    """A server with a window of 128 tokens, and limits that are quick to reach."""
    llm = LLM(tiny_chat_model, device="cpu", max_model_len=128, scheduler={"max_requests": 16})
    server = Served(llm, ServerConfig(port=0, max_body=1 << 20, read_timeout_seconds=2, write_timeout_seconds=2))
    yield server
    server.wait(server.idle)
    server.close()
