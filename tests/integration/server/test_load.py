"""A minute of 64 streams from another process, a part of which is dropped at random: nothing lost, nothing grows."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

SECONDS = 60
SETTLED = 15
STREAMS = 64
GROWTH = 20 << 20

SERVER = """
import sys
from deepinfer_core.config import load_config
from deepinfer_core.server.run import serve

resolved = load_config(None, {"model": sys.argv[1], "device": "cpu", "server.port": 0, "scheduler.max_requests": 64,
                              "server.grace_seconds": 3, "server.served_model_name": "model"})
sys.exit(serve(resolved, on_ready=lambda url: print(url, flush=True)))
"""


@pytest.fixture
def server(tiny_chat_model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """Start a server in a process of its own; yields it, its address and its standard error."""
    errors = tmp_path / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tiny_chat_model)],
            stdout=subprocess.PIPE, stderr=stream, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, errors.read_text()
        yield process, url, errors
        process.kill()
        process.wait()
        process.stdout.close()


async def stream(port: int, rng: random.Random, counts: Counter[str]) -> None:
    """Run one stream to its end, or leave it at a random place: waiting, in its text, politely or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "model": "model",
            "prompt": [rng.randrange(256) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.randint(1, 80),
            "temperature": rng.choice([0, 1]),
            "stream": rng.random() < 0.9,
            "n": rng.choice([1, 1, 1, 2]),
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    leaves = rng.random() < 0.35
    patience = rng.expovariate(3) if leaves else 60
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        async with asyncio.timeout(patience):
            answer = await reader.read()
        status = answer.split(b" ", 2)[1].decode()
        good = status == "200" and (b"[DONE]" in answer or b'"usage"' in answer) and b'"error"' not in answer
        counts["finished" if good else f"wrong: {answer[:300]!r}"] += 1
    except TimeoutError:
        counts["left" if leaves else "hung"] += 1
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()


async def load(port: int, seconds: float, rss: Any) -> tuple[Counter[str], list[tuple[float, int]]]:
    counts: Counter[str] = Counter()
    memory: list[tuple[float, int]] = []
    start = time.monotonic()

    async def worker(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() - start < seconds:
            await stream(port, rng, counts)

    async def watch() -> None:
        while True:
            memory.append((time.monotonic() - start, rss()))
            await asyncio.sleep(1)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*[worker(seed) for seed in range(STREAMS)])
    watcher.cancel()
    return counts, memory


@pytest.mark.slow
def test_a_minute_of_streams_and_disconnects(server: Any, tiny_chat_model: Path) -> None:
    process, url, errors = server
    port = int(url.rpartition(":")[2])
    one = psutil.Process(process.pid)
    counts, memory = asyncio.run(load(port, SECONDS, lambda: one.memory_info().rss))
    assert set(counts) <= {"finished", "left"}, counts
    assert counts["finished"] > 200
    assert counts["left"] > 100
    settled = min(rss for at, rss in memory if at >= SETTLED)
    last = max(rss for at, rss in memory if at >= SECONDS - 3)
    assert last - settled < GROWTH, [(round(at), rss >> 20) for at, rss in memory]
    until = time.monotonic() + 5
    while True:
        status = httpx.get(f"{url}/status").json()
        pool, engine = status["engine"]["pool"], status["engine"]
        if pool["available_pages"] == pool["total_pages"] and not any(engine["queues"].values()):
            break
        assert time.monotonic() < until, status
        time.sleep(0.05)
    assert engine["finished"]["error"] == 0
    assert engine["policy_faults"] == {}
    assert status["server"]["live_answers"] == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert "Traceback" not in errors.read_text()


def test_sigterm_ends_an_open_stream_and_a_deaf_client_within_the_grace(server: Any) -> None:
    process, url, errors = server
    port = int(url.rpartition(":")[2])

    async def run() -> bytes:
        body = json.dumps(
            {
                "model": "model",
                "prompt": "x",
                "n": 32,
                "max_tokens": 250,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 20,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in streams:
            writer.write(head.encode() + b"\r\n\r\n" + body)
        first = await streams[0][0].read(1000)
        assert first.startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        rest = await streams[0][0].read()  # the other one is never read
        for _, writer in streams:
            writer.close()
        return rest

    start = time.monotonic()
    assert b"data: [DONE]" in asyncio.run(run())
    assert process.wait(10) == 0
    assert time.monotonic() - start < 3 + 2.5
    assert "Traceback" not in errors.read_text()


def test_a_second_sigterm_gives_no_more_grace_and_ctrl_c_is_130(server: Any) -> None:
    process, url, errors = server
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert "Traceback" not in errors.read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "CheckpointError" in done.stderr


def test_a_port_in_use_is_said_before_anything_is_loaded(server: Any, tmp_path: Path) -> None:
    from deepinfer_core.config import load_config
    from deepinfer_core.errors import ConfigError
    from deepinfer_core.server.run import serve

    port = server[1].rpartition(":")[2]
    with pytest.raises(ConfigError, match=f"port = {port}: cannot listen there"):
        serve(load_config(None, {"model": str(tmp_path), "server.port": int(port)}))
