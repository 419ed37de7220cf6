"""What the HTTP server adds to a token: from the engine's acceptance to a client's socket, in two processes.

A stub engine gives each of 16 streams a token every 8 ms: 2,000 tokens/s in all. The server runs in one process, the
client in another, and both read one monotonic clock. The time that the client takes to read is in the figure.

    python scripts/bench_http_overhead.py --output docs/results/http-overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from deepinfer_core.bench.meta import collect
from deepinfer_core.bench.results import summary, write_result
from deepinfer_core.config import ServerConfig
from deepinfer_core.engine.engine import Engine
from deepinfer_core.engine.metrics import percentile
from deepinfer_core.engine.outputs import RequestHandle
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import AttentionBackend, AttentionBatch, Limits
from deepinfer_core.server.app import create_app
from deepinfer_core.server.front import Front, bind, url_of
from deepinfer_core.server.run import SWITCH_SECONDS
from deepinfer_core.server.service import ServedModel, Service
from deepinfer_core.testing.stub_model import StubBackend

STREAMS = 16
TOKENS_PER_SECOND = 2000
SKIPPED = 10
"""Tokens of each stream that are not counted: the streams do not all begin at once."""


class Paced:
    """Gives the same logits again and again, at a fixed pace."""

    def __init__(self, vocab: int, seconds: float) -> None:
        self._logits = torch.rand(1024, vocab)
        self._seconds = seconds
        self._next = time.perf_counter()

    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[Mapping[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``[rows, vocab]``, no sooner than a step after the last ones."""
        now = time.perf_counter()
        self._next = max(now, self._next + self._seconds)
        time.sleep(self._next - now)
        return self._logits[: len(logit_rows)].clone()


class Numbers:
    """A tokenizer whose every token is a short word."""

    eos_ids: frozenset[int] = frozenset()
    template_text = ""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the words of ids."""
        return "".join([f" w{i}" for i in ids])

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one."""
        return f" w{token}".encode()


def serve(tokens: int) -> None:
    """Serve until standard input closes; print the address first, and each request's token times last."""
    sys.setswitchinterval(SWITCH_SECONDS)  # as `deepinfer serve` does
    torch.set_num_threads(1)
    kv = KVCache(cast(AttentionBackend, StubBackend(16)), layers=1, page_size=16, pages=STREAMS * (tokens // 16 + 4))
    limits = Limits(
        max_batched_tokens=256, max_requests=STREAMS, prefill_chunk_tokens=256, page_size=16, max_model_len=tokens + 32
    )
    model = Paced(1000, STREAMS / TOKENS_PER_SECOND)
    engine = Engine(model, kv, limits, vocab_size=1000, tokenizer=Numbers())
    handles: list[RequestHandle] = []
    submit = engine.submit

    def noted(*args: Any, **more: Any) -> RequestHandle:
        handles.append(submit(*args, **more))
        return handles[-1]

    engine.submit = noted  # type: ignore[method-assign]
    settings = ServerConfig(port=0)
    service = Service(settings)
    sock = bind(settings)
    front = Front(create_app(service, settings), service, settings)
    engine.start()
    service.attach(ServedModel(name="stub", engine=engine, tokenizer=cast(Any, Numbers()), vocab_size=1000))
    print(url_of(sock), flush=True)

    async def run() -> None:
        served = asyncio.create_task(front.serve(sockets=[sock]))
        await asyncio.to_thread(sys.stdin.read)
        front.abandon()
        await served

    asyncio.run(run())
    engine.stop()
    print(json.dumps({str(handle.prompt_ids[0]): handle.metrics[0].token_times for handle in handles}))


async def read(port: int, stream: int, tokens: int) -> list[float]:
    """Return when each token's event came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "stub", "prompt": [stream], "max_tokens": tokens, "temperature": 0, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    times: list[float] = []
    while len(times) < tokens:
        line = await reader.readline()
        assert line, "the stream ended too soon"
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return times


def measure(tokens: int) -> dict[str, float]:
    """Return milliseconds from a token's acceptance to its event at the client, over all streams of one run."""
    command = [sys.executable, __file__, "--serve", "--tokens", str(tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])

        async def all_streams() -> list[list[float]]:
            return await asyncio.gather(*[read(port, i, tokens) for i in range(STREAMS)])

        came = asyncio.run(all_streams())
        server.stdin.close()
        accepted = json.loads(server.stdout.readlines()[-1])
    added = [
        1e3 * (there - here)
        for i, times in enumerate(came)
        for here, there in list(zip(accepted[str(i)], times, strict=True))[SKIPPED:]
    ]
    first, last = min(times[0] for times in accepted.values()), max(times[-1] for times in accepted.values())
    assert min(added) > 0, "the two processes read different clocks"
    return {
        **{f"p{p}_ms": percentile(added, p) for p in (50, 95, 99)},
        "max_ms": max(added),
        "tokens_per_second": STREAMS * (tokens - 1) / (last - first),
        "tokens": len(added),
    }


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600, help="Tokens of each stream.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.tokens)
        return
    runs = [measure(args.tokens) for _ in range(args.runs)]
    for run in runs:
        print(", ".join(f"{name} {value:.2f}" for name, value in run.items()))
    if args.output:
        meta = {"bench": "http-overhead", **collect("cpu"), "streams": STREAMS, "tokens_per_stream": args.tokens}
        write_result(args.output, {"meta": meta, "rows": [summary(runs)]})


if __name__ == "__main__":
    main()
