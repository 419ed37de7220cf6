"""One answer whatever the engine does: every policy, chunk, page size, prefix cache and concurrency on a tiny model."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from deepinfer_core.assemble import catalog_for, choose_policy
from deepinfer_core.bench.sample_model import sample_gguf
from deepinfer_core.config import Config, SchedulerConfig
from deepinfer_core.engine.engine import Engine
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.llm import LLM
from deepinfer_core.plugin_api import Limits
from deepinfer_core.sampling import SamplingParams

Points = list[tuple[int, bool, int]]
POLICIES = ["serial", "dual_stream", "mixed", "time_sliced", "slo"]
OPTIONS: dict[str, dict[str, Any]] = {"slo": {"tpot_p95_ms": 50, "max_itl_ms": 100}}
CHUNKS = [1, 7, 32, 512]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SHARED = list(range(40, 73))
PROMPTS = [[5], [9, 8, 7], [*SHARED, 3], list(range(100, 117)), [*SHARED, 3, 200], [1] * 16, [2, 4], [6]]


@pytest.fixture(scope="module")
def loaded(tiny_chat_model: Path) -> Callable[[int], LLM]:
    return cache(lambda page: LLM(tiny_chat_model, device="cpu", dtype="float32", page_size=page, max_model_len=128))


@pytest.fixture(scope="module")
def alone(loaded: Callable[[int], LLM]) -> list[tuple[int, ...]]:
    """Return each prompt's answer when it is the only one, token by token."""
    return [answers(loaded(16), row_tile=1, prompts=[prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def real() -> Callable[[int], LLM]:
    """Return the real 135M model, W4 on the BF16 fast path, by page size."""
    return cache(lambda page: LLM(sample_gguf(), device="cpu", page_size=page, max_model_len=128))


@pytest.fixture(scope="module")
def texts(real: Callable[[int], LLM]) -> list[list[int]]:
    encode = real(16).tokenizer.encode
    shared = "The ship left the harbour at dawn, and by noon the coast had gone below the horizon. The captain"
    return [encode(text) for text in (shared + " said", "Water boils at", shared + " slept")]


def answers(
    llm: LLM,
    *,
    row_tile: int | None,
    policy: str = "auto",
    chunk: int = 512,
    prefix_cache: bool = False,
    together: int = 1,
    prompts: list[list[int]] = PROMPTS,
) -> list[tuple[int, ...]]:
    running = llm.running
    page = running.cache.page_size
    kv = KVCache(
        running.decoder.attention, layers=running.spec.layers, page_size=page, pages=64, prefix_cache=prefix_cache
    )
    config = Config(scheduler=SchedulerConfig(policy=policy, options=OPTIONS.get(policy, {})))
    chosen = choose_policy(config, catalog_for(config), str)
    limits = Limits(
        max_batched_tokens=512, max_requests=together, prefill_chunk_tokens=chunk, page_size=page, max_model_len=128
    )
    engine = Engine(
        running.decoder,
        kv,
        limits,
        vocab_size=running.spec.vocab_size,
        policy=chosen.planner,
        policy_name=chosen.name,
        lanes=chosen.lanes,
        row_tile=row_tile,
    )
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
    engine.drive(lambda: all(handle.done for handle in handles))
    assert not engine.status()["policy_faults"]
    assert engine.metrics.prefill_decode_stream_overlap_steps == 0
    kv.assert_no_leaks()
    return [handle.result(0).token_ids for handle in handles]


FULL = list(product(CHUNKS, [True, False], range(1, 9)))
SOME = [FULL[8 * i + i] for i in range(8)]  # each chunk with and without prefix cache, each concurrency once
POINTS = pytest.mark.parametrize(
    "points", [pytest.param(SOME, id="some"), pytest.param(FULL, id="all", marks=pytest.mark.slow)]
)


def grid(points: Points) -> Iterator[dict[str, Any]]:
    for chunk, prefix_cache, together in points:
        yield {"chunk": chunk, "prefix_cache": prefix_cache, "together": together}


@POINTS
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_invariant_answers_are_those_of_each_request_alone(
    loaded: Callable[[int], LLM], alone: list[tuple[int, ...]], policy: str, page: int, points: Points
) -> None:
    for point in grid(points):
        assert answers(loaded(page), row_tile=1, policy=policy, **point) == alone, point


@POINTS
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_fast_answers_differ_only_where_two_tokens_are_as_likely(
    loaded: Callable[[int], LLM], alone: list[tuple[int, ...]], policy: str, page: int, points: Points
) -> None:
    different = total = 0
    for point in grid(points):
        for prompt, expected, got in zip(
            PROMPTS, alone, answers(loaded(page), row_tile=None, policy=policy, **point), strict=True
        ):
            total += 1
            if got != expected:
                different += 1
                same = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
                best = loaded(16).logits([*prompt, *expected[:same]])[-1].topk(2).values
                assert best[0] - best[1] < 0.05, (point, prompt)
    assert different <= total / 100


# Every two values of (policy, page), chunk, prefix cache and concurrency meet at least once over the ten lines.
PAIRWISE = [
    ("serial", 16, 1, True, 2), ("serial", 32, 512, False, 3), ("dual_stream", 16, 7, False, 3),
    ("dual_stream", 32, 32, True, 1), ("mixed", 16, 32, True, 3), ("mixed", 32, 1, False, 2),
    ("time_sliced", 16, 512, True, 2), ("time_sliced", 32, 7, True, 1), ("slo", 16, 32, False, 2),
    ("slo", 32, 7, True, 3),
]  # fmt: skip


@pytest.mark.slow
def test_the_real_model_answers_the_same_whatever_the_engine_does(
    real: Callable[[int], LLM], texts: list[list[int]]
) -> None:
    alone = [answers(real(16), row_tile=1, prompts=[text])[0] for text in texts]
    different = total = 0
    for policy, page, chunk, prefix_cache, together in PAIRWISE:
        point: dict[str, Any] = {"policy": policy, "chunk": chunk, "prefix_cache": prefix_cache, "together": together}
        assert answers(real(page), row_tile=1, prompts=texts, **point) == alone, (page, point)
        fast = answers(real(page), row_tile=None, prompts=texts, **point)
        for text, expected, got in zip(texts, alone, fast, strict=True):
            total += 1
            if got != expected:
                different += 1
                same = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
                best = real(16).logits([*text, *expected[:same]])[-1].topk(2).values
                assert best[0] - best[1] < 0.05, (page, point, text)
    print(f"{different} of {total} fast answers differ")
    assert different <= total / 100


def test_a_seeded_draw_does_not_depend_on_neighbours(loaded: Callable[[int], LLM]) -> None:
    """SD-10 over a real model: alone, among others, and again."""
    seeded = evolve(GREEDY, temperature=1.0, seed=42, max_tokens=20)
    free = evolve(GREEDY, temperature=1.0, max_tokens=20)
    llm = loaded(16)
    (first,) = llm.generate([PROMPTS[1]], seeded)
    among = llm.generate([PROMPTS[1]] * 9, [seeded, *[free] * 7, seeded])
    assert among[0].token_ids == among[-1].token_ids == first.token_ids
    assert llm.generate([PROMPTS[1]], evolve(seeded, seed=43))[0].token_ids != first.token_ids


def test_int8_keys_and_values_go_through_the_engine(tiny_chat_model: Path, loaded: Callable[[int], LLM]) -> None:
    """KV-11, the engine's side: shapes come from the backend, pages are shared and copied with their scales."""
    llm = LLM(tiny_chat_model, device="cpu", dtype="float32", max_model_len=128, attention={"kv_dtype": "int8"})
    assert {t.dtype for t in llm.running.cache.tensors[0].values()} >= {torch.int8}
    dense = loaded(16).generate(PROMPTS, GREEDY)
    small = llm.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == [o.token_ids for o in small]
    first = [a.token_ids[0] == b.token_ids[0] for a, b in zip(dense, small, strict=True)]
    assert sum(first) >= len(PROMPTS) - 1
    several = llm.generate([PROMPTS[2]], evolve(GREEDY, n=3))[0]
    assert {c.token_ids for c in several.choices} == {small[2].token_ids}
    llm.running.cache.assert_no_leaks()
