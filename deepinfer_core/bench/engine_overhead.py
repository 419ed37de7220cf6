"""What a step of the engine costs beside the model's forward: ``python -m deepinfer_core.bench.engine_overhead``."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from deepinfer_core.engine.engine import Engine
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import AttentionBackend, AttentionBatch, Limits
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.testing.stub_model import StubBackend

PAGE_SIZE = 16
PROMPT = 32


class FixedLogits:
    """Returns the same logits again and again, and adds up the time that took."""

    def __init__(self, vocab: int) -> None:
        self.seconds = 0.0
        self._logits = torch.rand(1024, vocab)

    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[Mapping[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``[rows, vocab]``."""
        start = time.perf_counter()
        logits = self._logits[: len(logit_rows)].clone()
        self.seconds += time.perf_counter() - start
        return logits


def measure(batch: int, steps: int, vocab: int = 1000, prefix_cache: bool = True) -> dict[str, float]:
    """Return microseconds of a decode step of ``batch`` greedy requests, apart from the forward."""
    model = FixedLogits(vocab)
    length = PROMPT + steps + 64
    pages = batch * -(-length // PAGE_SIZE)
    backend = cast(AttentionBackend, StubBackend(PAGE_SIZE))  # nothing here calls its attention
    kv = KVCache(backend, layers=1, page_size=PAGE_SIZE, pages=pages, prefix_cache=prefix_cache)
    limits = Limits(
        max_batched_tokens=4096,
        max_requests=batch,
        prefill_chunk_tokens=4096,
        page_size=PAGE_SIZE,
        max_model_len=length,
    )
    engine = Engine(model, kv, limits, vocab_size=vocab)
    params = SamplingParams(temperature=0, max_tokens=steps + 40)
    for i in range(batch):
        engine.submit([(i + j) % vocab for j in range(PROMPT)], params)
    for _ in range(20):
        engine.step()
    assert engine.status()["queues"]["decoding"] == batch
    costs = []
    for _ in range(steps):
        before, start = model.seconds, time.perf_counter()
        engine.step()
        costs.append(1e6 * (time.perf_counter() - start - (model.seconds - before)))
    engine.stop()
    kv.assert_no_leaks()
    ordered = sorted(costs)
    return {
        "batch": batch,
        "median_us": statistics.median(costs),
        "p10_us": ordered[steps // 10],
        "p90_us": ordered[9 * steps // 10],
        "limit_us": 200 + 20 * batch,
    }


def main() -> None:
    """Measure batches 1, 8 and 64, several runs each, and print or write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [measure(batch, args.steps) | {"run": run} for run in range(args.runs) for batch in (1, 8, 64)]
    for row in rows:
        line = "batch {batch:3}: median {median_us:7.1f} us, p10 {p10_us:7.1f}, p90 {p90_us:7.1f}; limit {limit_us}"
        print(line.format(**row))
    if args.output:
        args.output.write_text(
            json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows})
        )


if __name__ == "__main__":
    main()
