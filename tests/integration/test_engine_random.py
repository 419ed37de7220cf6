"""Two thousand requests against everything that may go wrong at once; each ends right, or with the right error."""

import random

import pytest
import torch

from deepinfer_core.engine.engine import Engine
from deepinfer_core.engine.validate import decode_first
from deepinfer_core.errors import CapacityError
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import Limits, Plan
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.testing.stub_model import StubBackend, StubModel

VOCAB, SHARED = 61, [[s] * 40 for s in range(5)]


class Restless:
    """Decode-first, but for a request that is preempted out of turn now and then."""

    def __init__(self, rng):
        self._rng = rng

    def plan(self, view):
        running = (*view.prefilling, *view.decoding)
        if running and self._rng.random() < 0.05:
            return Plan(preempt=(self._rng.choice(running).id,))
        return decode_first(view)

    def observe(self, feedback):
        pass


@pytest.mark.parametrize(("requests", "prefix_cache"), [(2000, True), (400, False)])
def test_requests_end_right_through_aborts_memory_faults_and_preemption(requests, prefix_cache, monkeypatch):
    rng = random.Random(11 + prefix_cache)
    model = StubModel(VOCAB)
    kv = KVCache(StubBackend(8), layers=1, page_size=8, pages=18, prefix_cache=prefix_cache)
    limits = Limits(
        max_batched_tokens=64, max_requests=10, prefill_chunk_tokens=24, page_size=8, max_model_len=200, overlap=True
    )
    engine = Engine(model, kv, limits, vocab_size=VOCAB, end_ids=[0], policy=Restless(rng), policy_name="restless")
    injected = 0

    def sometimes(owner, name):
        function = getattr(owner, name)

        def wrapped(*args, **kwargs):
            nonlocal injected
            if rng.random() < 0.01:
                injected += 1
                raise torch.OutOfMemoryError("injected")
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in (
        (kv, "extend"),
        (kv, "batch_at"),
        (model, "forward"),
        (engine._sampler, "sample"),
        (kv, "commit"),
    ):
        sometimes(owner, name)

    living, ended, steps = [], [], 0
    while len(ended) < requests:
        for _ in range(rng.choice((0, 0, 1, 2, 6))):
            if len(living) + len(ended) < requests and len(living) < 40:
                prompt = [
                    *rng.choice(SHARED)[: rng.choice((0, 8, 33, 40))],
                    *rng.choices(range(1, 60), k=rng.randint(1, 30)),
                ]
                params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 60))
                living.append((prompt, params, engine.submit(prompt, params)))
        if living and rng.random() < 0.05:
            engine.abort(rng.choice(living)[2].id)
        engine.step()
        steps += 1
        assert steps < 60_000, engine.status()
        ended += [one for one in living if one[2].done]
        living = [one for one in living if not one[2].done]

    reasons = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    for prompt, params, handle in ended:
        expected = model.answer(prompt, params.max_tokens, [0])
        try:
            result = handle.result(0)
        except CapacityError:
            reasons["error"] += 1
            continue
        reasons[result.finish_reason] += 1
        got = list(result.token_ids)
        assert got == (expected[: len(got)] if result.finish_reason == "abort" else expected)
    assert engine.metrics.finished == reasons
    assert reasons["abort"] > requests / 20
    assert reasons["error"] < requests / 100
    assert injected > requests / 20
    assert engine.metrics.preemptions_total > requests / 20
    assert not engine.status()["policy_faults"]
    assert (engine.metrics.cached_tokens_total > 0) is prefix_cache
    monkeypatch.undo()
    engine.stop()
    kv.assert_no_leaks()
    assert kv.available_pages == 18
