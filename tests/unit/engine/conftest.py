import pytest

from deepinfer_core.engine.engine import Engine
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import Limits
from deepinfer_core.testing.stub_model import StubBackend, StubModel

VOCAB = 97


@pytest.fixture
def model():
    return StubModel(VOCAB)


@pytest.fixture
def make_engine(model):
    """Make an engine on the stub model; whatever a test did, no page may be lost at its end."""
    made = []

    def make(
        *, pages=64, page_size=16, prefix_cache=True, chunk=32, batch=256, requests=8, length=512, overlap=True, **rest
    ):
        kv = KVCache(StubBackend(page_size), layers=1, page_size=page_size, pages=pages, prefix_cache=prefix_cache)
        limits = Limits(
            max_batched_tokens=batch,
            max_requests=requests,
            prefill_chunk_tokens=chunk,
            page_size=page_size,
            max_model_len=length,
            overlap=overlap,
        )
        engine = Engine(rest.pop("model", model), kv, limits, vocab_size=VOCAB, **rest)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()
        engine.kv.assert_no_leaks()


@pytest.fixture
def run():
    """Step until nothing is left; a bound on the steps turns a hang into a failure."""

    def run(engine, *handles, steps=20_000):
        for _ in range(steps):
            if not engine.step() and not engine.status()["queues"]["waiting"]:
                break
        else:
            raise AssertionError(f"not done after {steps} steps: {engine.status()['queues']}")
        return [handle.result(timeout=0) for handle in handles]

    return run
