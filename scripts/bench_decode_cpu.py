"""CPU decode at batch 1: a deepinfer checkpoint against transformers over the same GGUF, in one run.

    python scripts/bench_decode_cpu.py models/smollm2-135m-w4 [GGUF] [--tokens 64] [--rounds 5] [--output FILE.json]

Each round decodes the same prompt with each of the three in turn (transformers float32, transformers BF16, ours), so
that a busy or throttled machine touches all alike. A time is that of one token after the first; the figures are medians
over rounds. transformers runs as a bare loop over its forward, which is faster than its `generate`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer_core.bench.sample_model import sample_gguf
from deepinfer_core.llm import LLM
from deepinfer_core.sampling import SamplingParams

PROMPT = "The sea is a place of wonder. Long before there were maps, people looked at the horizon and"


def main() -> None:
    """Measure, print the ratio, and write the JSON when asked."""
    parser = argparse.ArgumentParser(description="CPU decode at batch 1 against transformers in the same run.")
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gguf = arguments.gguf or sample_gguf()

    llm = LLM(arguments.model, device="cpu", max_model_len=1024)
    ids = llm.tokenizer.encode(PROMPT)
    contestants: dict[str, Callable[[int], float]] = {
        "transformers float32": _transformers(gguf, torch.float32, ids),
        "transformers bfloat16": _transformers(gguf, torch.bfloat16, ids),
        "deepinfer": _ours(llm, ids),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for decode in contestants.values():
        decode(8)  # warm caches and lazy set-up
    for _ in range(arguments.rounds):
        for name, decode in contestants.items():
            times[name].append(decode(arguments.tokens))

    medians = {name: statistics.median(values) for name, values in times.items()}
    best_peer = min((name for name in medians if name != "deepinfer"), key=medians.__getitem__)
    ratio = medians[best_peer] / medians["deepinfer"]
    for name, values in times.items():
        spread = f"{min(values) * 1e3:.2f} to {max(values) * 1e3:.2f}"
        print(f"{name:22} {medians[name] * 1e3:7.2f} ms a token (median of {len(values)}; {spread})")
    print(f"deepinfer is {ratio:.2f} x as fast as {best_peer}, batch 1, {torch.get_num_threads()} threads")
    if arguments.output is not None:
        result = {
            "benchmark": "decode_cpu",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
            "versions": {name: metadata.version(name) for name in ("deepinfer-core", "torch", "transformers")},
            "model": arguments.model.name,
            "dtype": llm.running.place.dtype_name,
            "kernels": sorted({s.table.kernel_for(1).kernel.spec.name for s in llm.running.selections.values()}),
            "batch": 1,
            "prompt_tokens": len(ids),
            "tokens": arguments.tokens,
            "seconds_per_token": times,
            "median_seconds_per_token": medians,
            "ratio_to_faster_peer": ratio,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _ours(llm: LLM, ids: list[int]) -> Callable[[int], float]:
    def decode(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
        tpot = llm.generate(ids, params)[0].metrics.tpot
        assert tpot is not None
        return tpot

    return decode


def _transformers(gguf: Path, dtype: torch.dtype, ids: list[int]) -> Callable[[int], float]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype).eval()

    @torch.inference_mode()
    def decode(tokens: int) -> float:
        step = model(torch.tensor([ids]), use_cache=True)
        token = step.logits[:, -1:].argmax(-1)
        begun = time.perf_counter()
        for _ in range(tokens):
            step = model(token, past_key_values=step.past_key_values, use_cache=True)
            token = step.logits[:, -1:].argmax(-1)
        return (time.perf_counter() - begun) / tokens

    return decode


if __name__ == "__main__":
    main()
