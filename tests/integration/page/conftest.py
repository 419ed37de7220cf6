"""A stand-in for the server behind the real page, and a headless Chromium in front of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from deepinfer_core.server.page import page_router

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
    "--hide-scrollbars",
)  # fmt: skip


def find_browser() -> tuple[str, str] | None:
    """Return the paths of Chromium and of its driver."""
    driver = shutil.which("chromedriver")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    return (browser, driver) if browser and driver else None


class StandIn:
    """What the page asks of a server, with knobs; requests are kept as they came."""

    def __init__(self) -> None:
        self.pieces = ["Hello", " there", "."]
        self.pause = 0.0
        self.key: str | None = None
        self.refuse: str | None = None
        self.state = "ready"
        self.asked: list[dict[str, Any]] = []
        self.dropped = 0
        self.began = time.monotonic()
        self.status: Callable[[], dict[str, Any]] = self.idle
        self.app = FastAPI()
        self.app.include_router(page_router())
        self.app.get("/status")(self._status)
        self.app.post("/v1/chat/completions")(self._chat)
        self.url = ""

    def idle(self) -> dict[str, Any]:
        return engine_status(time.monotonic() - self.began)

    def _locked(self, request: Request) -> bool:
        return self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _status(self, request: Request) -> JSONResponse:
        if self._locked(request):
            return JSONResponse({"error": {"message": "an API key is needed"}}, 401)
        found: dict[str, Any] = {
            "server": {"state": self.state, "uptime_seconds": time.monotonic() - self.began, "live_requests": 0}
        }
        if self.state == "ready":
            found |= {"model": {"name": "tiny", "max_model_len": 4096}, "engine": self.status()}
        return JSONResponse(found)

    async def _chat(self, request: Request) -> Any:
        if self._locked(request):
            return JSONResponse({"error": {"message": "an API key is needed"}}, 401)
        self.asked.append(await request.json())
        if self.refuse is not None:
            return JSONResponse({"error": {"message": self.refuse, "code": "context_length_exceeded"}}, 400)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        whole = False
        try:
            for piece in self.pieces:
                yield _event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                await asyncio.sleep(self.pause)
            whole = True
        finally:
            self.dropped += not whole
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        yield _event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(self.pieces)}})
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def engine_status(seconds: float, **over: Any) -> dict[str, Any]:
    """Return what the engine says of itself after so long a time under an even load."""
    return {
        "policy": "dual_stream",
        "prefill_decode_overlap": True,
        "generated_tokens_total": int(100 * seconds),
        "prompt_tokens_total": int(1000 * seconds),
        "lanes": {"decode": {"busy_seconds": 0.5 * seconds}, "prefill": {"busy_seconds": 0.25 * seconds}},
        "queues": {"waiting": 1, "prefilling": 1, "decoding": 2},
        "pool": {"page_size": 16, "total_pages": 200, "available_pages": 150, "cached_pages": 40},
        "finished": {"stop": 3, "length": 2, "abort": 0, "error": 0},
        "latency": {
            "ttft_seconds": {"count": 5, "p50": 0.120, "p95": 0.31},
            "tpot_seconds": {"count": 5, "p50": 0.0152, "p95": 0.021},
        },
        **over,
    }


@pytest.fixture(scope="module")
def site() -> Iterator[StandIn]:
    """Serve a stand-in; `stand_in` gives it to a test as new."""
    made = StandIn()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(made.app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield made
    server.should_exit = True
    thread.join(timeout=20)
    sock.close()


@pytest.fixture
def stand_in(site: StandIn) -> StandIn:
    """Return the stand-in with every knob at its default."""
    fresh = StandIn()
    for name in ("pieces", "pause", "key", "refuse", "state", "asked", "dropped"):
        setattr(site, name, getattr(fresh, name))
    site.status = site.idle
    return site


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start one headless Chromium for a module's tests."""
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium with its driver is here: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(found[1]))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: Chrome, stand_in: StandIn) -> Chrome:
    """Open the page afresh, wide and in light colours."""
    look(chromium, width=1280, height=800, dark=False)
    chromium.get_log("browser")  # of the test before
    chromium.get(stand_in.url)
    return chromium


def look(driver: Chrome, *, width: int, height: int, dark: bool) -> None:
    """Set window size and the system's colours."""
    scheme = "dark" if dark else "light"
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def screenshot(driver: Chrome, path: Path) -> None:
    """Keep what the window shows."""
    path.write_bytes(driver.get_screenshot_as_png())
