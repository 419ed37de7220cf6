import threading
import time

import pytest

from deepinfer_core.engine.outputs import GenerationError
from deepinfer_core.sampling import SamplingParams


def greedy(max_tokens, **rest):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **rest)


def test_many_threads_submit_stream_and_abort(make_engine, model):
    engine = make_engine(requests=6, pages=48)
    engine.start()
    failures = []

    def client(number):
        try:
            for i in range(8):
                prompt = [(number * 8 + i) % 90] * (1 + 5 * i)
                handle = engine.submit(prompt, greedy(10))
                if i % 4 == 3:
                    handle.abort()
                got = [o.token for o in handle if o.token is not None]
                expected = model.answer(prompt, 10)
                assert got == expected[: len(got)]
                assert handle.result(1).finish_reason == "abort" or got == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert engine.status()["queues"] == {"waiting": 0, "prefilling": 0, "decoding": 0}


def test_stop_ends_what_still_runs(make_engine):
    engine = make_engine(pages=600, length=8000)
    engine.start()
    handle = engine.submit([1], greedy(7000))
    next(iter(handle))
    engine.stop()
    assert handle.result(0).finish_reason == "abort"
    engine.kv.assert_no_leaks()


def test_an_engine_that_breaks_tells_everybody(make_engine, monkeypatch, caplog):
    engine = make_engine()
    monkeypatch.setattr(engine._life, "make_room", lambda *_: 1 / 0)
    engine.start()
    handle = engine.submit([1], greedy(5))
    with pytest.raises(GenerationError, match="the engine has stopped: ZeroDivisionError"):
        handle.result(20)
    deadline = time.monotonic() + 20
    while engine._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(GenerationError, match="stopped"):
        engine.submit([1], greedy(5))


def test_a_result_that_does_not_come_times_out(make_engine):
    engine = make_engine()
    handle = engine.submit([1], greedy(5))
    with pytest.raises(TimeoutError, match="has not ended within"):
        handle.result(0.01)
