import pytest
import torch

from deepinfer_core.engine.outputs import GenerationError
from deepinfer_core.errors import CapacityError
from deepinfer_core.sampling import SamplingParams
from deepinfer_core.testing.stub_model import StubModel

PROMPTS = [[i, i + 1, i + 2] * (5 + i) for i in range(6)]


def greedy(max_tokens, **rest):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **rest)


def failing(function, when):
    """Wrap a function to find no memory at the calls that ``when(call number, *arguments)`` names."""
    calls = iter(range(10**6))

    def wrapped(*args, **kwargs):
        if when(next(calls), *args):
            raise torch.OutOfMemoryError("injected")
        return function(*args, **kwargs)

    return wrapped


def inject(monkeypatch, engine, phase, when):
    owner, name = {
        "prepare": (engine.kv, "extend"),
        "build": (engine.kv, "batch_at"),
        "launch": (engine._model, "forward"),
        "sample": (engine._sampler, "sample"),
        "finish": (engine.kv, "commit"),
    }[phase]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), when))


@pytest.mark.parametrize("every", [5, 7, 11])
@pytest.mark.parametrize("phase", ["prepare", "build", "launch", "sample", "finish"])
def test_memory_that_runs_short_now_and_then_costs_no_answer(make_engine, run, model, monkeypatch, phase, every):
    engine = make_engine(requests=4)
    inject(monkeypatch, engine, phase, lambda call, *_: call % every == every - 1)
    handles = [engine.submit(prompt, greedy(9)) for prompt in PROMPTS]
    run(engine, *handles)
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert list(handle.result(0).token_ids) == model.answer(prompt, 9)
    assert engine.metrics.out_of_memory_total > 0


@pytest.mark.parametrize("phase", ["prepare", "launch", "sample", "finish"])
def test_a_request_without_memory_fails_alone(make_engine, run, model, monkeypatch, phase):
    engine = make_engine()
    handles = [engine.submit(prompt, greedy(9)) for prompt in PROMPTS]
    engine.step()
    engine.step()
    victim = engine._life.queues.find(handles[2].id)

    def hits_victim(_, *args):
        if phase == "launch":  # the stub's tokens are the prompt's own
            return any(ids[:1] == tuple(victim.seq.pages[:1]) for ids in args[1].page_ids) if victim.seq else False
        if phase == "sample":
            return victim.sampler in args[1]
        return args[0] is victim.seq

    inject(monkeypatch, engine, phase, hits_victim)
    run(engine)
    with pytest.raises(CapacityError, match=f"'{handles[2].id}' ran out of memory: injected"):
        handles[2].result(0)
    for i in (0, 1, 3, 4, 5):
        assert list(handles[i].result(0).token_ids) == model.answer(PROMPTS[i], 9)
    assert engine.metrics.finished == {"stop": 0, "length": 5, "abort": 0, "error": 1}


def test_a_batch_without_memory_is_shrunk_and_grows_back(make_engine, run, model, monkeypatch):
    engine = make_engine(chunk=64, batch=64, requests=8)
    seen = []

    def too_big(_, tokens, *__):
        seen.append(len(tokens))
        return len(tokens) > 16 and len(seen) < 30

    inject(monkeypatch, engine, "launch", too_big)
    handles = [engine.submit([i] * 50, greedy(60)) for i in range(3)]
    run(engine, *handles)
    assert [list(h.result(0).token_ids) for h in handles] == [model.answer([i] * 50, 60) for i in range(3)]
    assert seen[0] > 32
    assert max(seen[6:29]) <= 32
    assert engine._headroom.tokens == 64


class NotANumber(StubModel):
    """Gives NaN for contexts that hold the token 13, which their pages store as 14."""

    def forward(self, tokens, batch, kv, logit_rows):
        logits = super().forward(tokens, batch, kv, logit_rows)
        ends = torch.tensor(batch.query_lens).cumsum(0)
        for row, ids in enumerate(batch.page_ids):
            if (kv[0]["tokens"][list(ids)] == 14).any():
                logits[torch.searchsorted(ends, logit_rows, right=True) == row] = float("nan")
        return logits


def test_logits_that_are_no_numbers_fail_their_request_and_leave_no_trace(make_engine, run, model):
    sick = NotANumber(97)
    engine = make_engine(model=sick)
    good, bad = engine.submit([1, 2, 3], greedy(6, ignore_eos=True)), engine.submit([1, 13, 3], greedy(6))
    run(engine)
    with pytest.raises(GenerationError, match="after token 3 are not finite"):
        bad.result(0)
    with pytest.raises(GenerationError):
        list(bad)
    assert list(good.result(0).token_ids) == model.answer([1, 2, 3], 6)
    assert int((engine.kv.tensors[0]["tokens"] == 14).sum()) == 0  # its page was zeroed


def test_a_failing_forward_fails_the_requests_in_it_alone(make_engine, run, model, monkeypatch, caplog):
    engine = make_engine()
    first = engine.submit([1, 2], greedy(3))
    run(engine, first)
    forward = engine._model.forward
    monkeypatch.setattr(engine._model, "forward", lambda *_: 1 / 0)
    broken = engine.submit([1, 2], greedy(3))
    run(engine)
    monkeypatch.setattr(engine._model, "forward", forward)
    with pytest.raises(GenerationError, match="ZeroDivisionError"):
        broken.result(0)
    (again,) = run(engine, engine.submit([1, 2], greedy(3)))
    assert list(again.token_ids) == model.answer([1, 2], 3)
    assert "failed in its forward" in caplog.text


def test_a_callers_sink_that_raises_ends_its_own_request(make_engine, run, model, caplog):
    engine = make_engine()

    def sink(_):
        raise ValueError("no reader")

    bad, good = engine.submit([1], greedy(3), sink=sink), engine.submit([1], greedy(3))
    run(engine, good)
    with pytest.raises(GenerationError, match="no reader"):
        bad.result(0)


@pytest.mark.parametrize("at", ["queued", "mid_chunk", "prefilled", "decoding", "last_step", "twice", "after"])
def test_aborted_requests_lose_no_page_at_any_stage(make_engine, run, model, at):
    """KV-03."""
    engine = make_engine(pages=40, requests=4, chunk=16, page_size=8)
    handles = []
    for i in range(75):
        prompt = [(i + j) % 90 for j in range(1 + (17 * i) % 60)]
        handle = engine.submit(prompt, greedy(1 + i % 7))
        handles.append((i, prompt, handle))
        request = engine._intake._messages[-1]
        for _ in range(400):
            reached = {
                "queued": True,
                "mid_chunk": 0 < request.computed < len(prompt),
                "prefilled": request.generated == 1,
                "decoding": request.generated > 1,
                "last_step": request.generated == request.max_tokens - 1,
                "twice": request.generated == 1,
                "after": handle.done,
            }[at]
            if reached or handle.done:
                break
            engine.step()
        if i % 3:
            engine.abort(handle.id)
            if at == "twice":
                engine.abort(handle.id)
    run(engine)
    for i, prompt, handle in handles:
        result = handle.result(0)
        expected = model.answer(prompt, 1 + i % 7)
        assert list(result.token_ids) == expected[: len(result.token_ids)]
        assert result.finish_reason == "abort" or len(result.token_ids) == len(expected)
    engine.kv.assert_no_leaks()
    (last,) = run(engine, engine.submit([1] * (40 * 8 - 1), greedy(1)))
    assert len(last.token_ids) == 1


def test_an_abort_ends_all_choices_and_the_stream(make_engine, run):
    engine = make_engine()
    handle = engine.submit(list(range(20)), SamplingParams(n=3, max_tokens=50, seed=1))
    for _ in range(5):
        engine.step()
    handle.abort()
    (result,) = run(engine, handle)
    assert [c.finish_reason for c in result.choices] == ["abort"] * 3
    assert [o.finish_reason for o in handle][-1] == "abort"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, AssertionError])
def test_what_ends_a_step_ends_its_requests_and_the_engine_can_go_on(make_engine, run, model, monkeypatch, stop):
    engine = make_engine()
    handles = [engine.submit(prompt, greedy(9)) for prompt in PROMPTS]
    engine.step()
    store = engine._life.store

    def interrupted(work):
        store(work)
        raise stop

    monkeypatch.setattr(engine._life, "store", interrupted)
    with pytest.raises(stop):
        engine.step()
    monkeypatch.undo()
    for handle in handles:
        with pytest.raises(GenerationError, match=f"the engine has stopped: {stop.__name__}"):
            handle.result(0)
    engine.kv.assert_no_leaks()
    (again,) = run(engine, engine.submit(PROMPTS[0], greedy(9)))
    assert list(again.token_ids) == model.answer(PROMPTS[0], 9)
