"""Lanes on a card: streams that really overlap, events as times, and pages that are never reused too early (KV-10)."""

import random

import pytest
import torch

from deepinfer_core.engine.engine import Engine
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import LaneSpec, Limits, PlanBuilder
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.testing.stub_model import StubBackend, StubModel

pytestmark = pytest.mark.gpu

VOCAB = 61
LANES = (LaneSpec(name="decode", priority=1), LaneSpec(name="prefill"))
CYCLES = 2_000_000  # about a millisecond


class TwoLanes:
    """Decodes on one lane, a prefill chunk on the other, each when its lane is idle."""

    def plan(self, view):
        builder = PlanBuilder(view)
        if "decode" in builder.idle:
            builder.add("decode", builder.decode_rows())
        if "prefill" in builder.idle:
            builder.add("prefill", builder.prefill_chunk(builder.room()))
        return builder.build()

    def observe(self, feedback):
        pass


class Slow(StubModel):
    """Keeps the card busy before and after one kind of work, so that what comes too early reads what is not there."""

    def __init__(self, slow):
        super().__init__(VOCAB, longest=1024, device="cuda")
        self.slow = slow

    def forward(self, tokens, batch, kv, logit_rows):
        kind = "decode" if max(batch.query_lens) == 1 else "prefill"
        delay = CYCLES if kind == self.slow else 0
        torch.cuda._sleep(delay)
        logits = super().forward(tokens, batch, kv, logit_rows)
        torch.cuda._sleep(delay)
        return logits


def make_engine(model, *, pages=24, overlap=True, lanes=LANES, policy=None, prefix_cache=False):
    kv = KVCache(StubBackend(8), layers=1, page_size=8, pages=pages, device="cuda", prefix_cache=prefix_cache)
    limits = Limits(
        max_batched_tokens=64, max_requests=8, prefill_chunk_tokens=16, page_size=8, max_model_len=160, overlap=overlap
    )
    return Engine(model, kv, limits, vocab_size=VOCAB, policy=policy or TwoLanes(), policy_name="two", lanes=lanes)


def requests(count):
    rng = random.Random(3)
    for _ in range(count):
        long = rng.random() < 0.3
        prompt = rng.choices(range(1, VOCAB), k=rng.randint(60, 100) if long else rng.randint(1, 12))
        yield prompt, rng.randint(1, 3 if long else 9)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("slow", ["decode", "prefill", "neither"])
def test_no_text_changes_when_pages_are_reused_under_two_streams(slow, prefix_cache):
    engine = make_engine(Slow(slow), prefix_cache=prefix_cache)
    reference = StubModel(VOCAB, longest=1024)
    asked = list(requests(2000 if slow == "neither" else 250))
    handles = [engine.submit(p, SamplingParams(temperature=0, max_tokens=n)) for p, n in asked]
    engine.drive(lambda: all(handle.done for handle in handles))
    for (prompt, count), handle in zip(asked, handles, strict=True):
        assert list(handle.result(0).token_ids) == reference.answer(prompt, count)
    status = engine.status()
    assert not status["policy_faults"]
    assert status["streams"] == 2
    assert status["prefill_decode_overlap_steps"] > 0
    if slow != "neither":
        assert status["prefill_decode_stream_overlap_steps"] > 10
    engine.kv.assert_no_leaks()


def test_a_works_time_is_its_own_pair_of_events():
    engine = make_engine(Slow("prefill"))
    engine.submit([1] * 96, SamplingParams(temperature=0, max_tokens=2))
    stream = engine.submit([2, 3], SamplingParams(temperature=0, max_tokens=60))
    engine.drive(lambda: stream.done)
    prefill = min(engine.metrics.prefill_chunk_seconds.recent)
    decode = sorted(engine.metrics.decode_step_seconds.recent)
    assert prefill > 1e-3
    assert decode[len(decode) // 2] < prefill / 2
    assert engine.metrics.prefill_decode_stream_overlap_steps > 0


@pytest.mark.parametrize(("lanes", "overlap"), [(LANES, False), ((LaneSpec(name="main"),), True)])
def test_one_stream_never_counts_as_stream_overlap(lanes, overlap):
    policy = TwoLanes() if len(lanes) == 2 else None
    engine = make_engine(Slow("prefill"), overlap=overlap, lanes=lanes, policy=policy)
    if policy is None:
        engine._planner._policy = None
    handles = [engine.submit(p, SamplingParams(temperature=0, max_tokens=n)) for p, n in requests(60)]
    engine.drive(lambda: all(handle.done for handle in handles))
    status = engine.status()
    assert (status["streams"], status["prefill_decode_overlap"]) == (1, overlap)
    assert status["prefill_decode_overlap_steps"] > 0
    assert status["prefill_decode_stream_overlap_steps"] == 0
    engine.kv.assert_no_leaks()
