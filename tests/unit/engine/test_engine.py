import pytest

from deepinfer_core.errors import CapacityError, RequestError
from deepinfer_core.sampling import SamplingParams


def greedy(max_tokens, **rest):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **rest)


def test_one_request_gives_the_models_own_answer(make_engine, run, model):
    engine = make_engine()
    prompt = [5, 6, 7]
    (result,) = run(engine, engine.submit(prompt, greedy(20)))
    assert list(result.token_ids) == model.answer(prompt, 20)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 97])
def test_chunks_and_page_edges_never_change_the_answer(make_engine, run, model, length, max_tokens):
    """KV-07."""
    engine = make_engine(chunk=32, page_size=16)
    prompt = [(7 * i) % 90 for i in range(length)]
    (result,) = run(engine, engine.submit(prompt, greedy(max_tokens)))
    assert list(result.token_ids) == model.answer(prompt, max_tokens)
    assert len(result.token_ids) == max_tokens
    assert engine.metrics.prefill_steps_total == -(-length // 32)


@pytest.mark.parametrize("length", [16, 32, 33, 31])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_prompt_sent_again_gives_the_same_with_and_without_prompt_scores(make_engine, run, length, max_tokens):
    """KV-06."""
    engine = make_engine()
    prompt = [(3 * i) % 90 for i in range(length)]
    plain, scored = greedy(max_tokens), greedy(max_tokens, logprobs=2, prompt_logprobs=2)
    cold = make_engine(prefix_cache=False)
    (expected,) = run(cold, cold.submit(prompt, scored))
    reader = engine.submit([*prompt, 1], greedy(40))
    for _ in range(3):
        (result,) = run(engine, engine.submit(prompt, plain))
        assert result.token_ids == expected.token_ids
    for _ in range(3):
        (result,) = run(engine, engine.submit(prompt, scored))
        assert result.token_ids == expected.token_ids
        assert result.choices[0].scores == expected.choices[0].scores
        assert result.prompt_scores == expected.prompt_scores
        assert len(result.prompt_scores) == length
        assert result.prompt_scores[0] is None
    assert engine.metrics.cached_tokens_total >= 2 * 16 * ((length - 1) // 16)
    assert list(reader.result(0).token_ids) == engine._model.answer([*prompt, 1], 40)


def test_prompt_scores_are_the_models_log_softmax(make_engine, run, model):
    engine = make_engine(chunk=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    (result,) = run(engine, engine.submit(prompt, greedy(1, prompt_logprobs=1)))
    for i, score in enumerate(result.prompt_scores[1:], start=1):
        logprobs = model.logits(prompt[:i]).double().log_softmax(-1)
        assert score.token == prompt[i]
        assert score.logprob == pytest.approx(float(logprobs[prompt[i]]))
        assert score.top[0][0] == int(logprobs.argmax())


def test_what_can_never_fit_is_refused_at_once(make_engine, run, model):
    """KV-01."""
    engine = make_engine(pages=8, page_size=16, length=512)
    with pytest.raises(CapacityError, match="need 13 KV pages, the cache has 8"):
        engine.submit(list(range(90)) + list(range(90)) + list(range(20)), greedy(1))
    with pytest.raises(CapacityError, match="the cache has 8"):
        engine.submit([1] * 120, greedy(100))
    short = engine.submit([1] * 10, greedy(5))
    open_end = engine.submit([1] * 120, SamplingParams(temperature=0))
    run(engine, short, open_end)
    assert list(short.result(0).token_ids) == model.answer([1] * 10, 5)
    assert open_end.result(0).finish_reason == "length"
    assert len(open_end.result(0).token_ids) == 8
    with pytest.raises(CapacityError, match="max_model_len is 512"):
        make_engine(pages=64, length=512).submit([1] * 500, greedy(13))


@pytest.mark.parametrize("prompt", [[], [-1], [97], [10**18], [1.5], [True], ["a"]])
def test_prompts_that_are_no_tokens_are_refused(make_engine, prompt):
    with pytest.raises(RequestError, match="prompt"):
        make_engine().submit(prompt, greedy(1))


def test_ids_are_unique_while_they_live(make_engine, run):
    engine = make_engine()
    handle = engine.submit([1], greedy(2), id="x")
    with pytest.raises(RequestError, match="'x' is in use"):
        engine.submit([1], greedy(2), id="x")
    run(engine, handle)
    run(engine, engine.submit([1], greedy(2), id="x"))


def test_an_end_token_ends_an_answer(make_engine, run, model):
    end = model.answer([3, 4], 4)[-1]
    engine = make_engine(end_ids=[end])
    stopped, ignoring, own = run(
        engine,
        engine.submit([3, 4], greedy(8)),
        engine.submit([3, 4], greedy(8, ignore_eos=True)),
        engine.submit([3, 4], greedy(8, ignore_eos=True, stop_token_ids=[end])),
    )
    assert list(stopped.token_ids) == model.answer([3, 4], 8, [end])
    assert (stopped.finish_reason, stopped.choices[0].stop_reason) == ("stop", end)
    assert len(ignoring.token_ids) == 8
    assert own.token_ids == stopped.token_ids


def test_outputs_stream_in_order_and_end(make_engine, run, model):
    engine = make_engine()
    handle = engine.submit([9, 8], greedy(6))
    run(engine, handle)
    outputs = list(handle)
    assert [o.token for o in outputs] == model.answer([9, 8], 6)
    assert [o.finish_reason for o in outputs] == [None] * 5 + ["length"]


def test_choices_share_the_prompts_pages_and_differ(make_engine, run):
    engine = make_engine(prefix_cache=False, pages=32)
    prompt = list(range(40))
    handle = engine.submit(prompt, SamplingParams(temperature=1, seed=3, n=4, max_tokens=12))
    engine.step()
    assert engine.step()
    assert engine.status()["queues"]["decoding"] == 4
    assert engine.status()["pool"]["available_pages"] == 32 - (2 + 4)  # two full pages shared, one each in use
    (result,) = run(engine, handle)
    assert [c.index for c in result.choices] == [0, 1, 2, 3]
    assert all(len(c.token_ids) == 12 for c in result.choices)
    assert len({c.token_ids for c in result.choices}) == 4
    alone = make_engine()
    (again,) = run(alone, alone.submit(prompt, SamplingParams(temperature=1, seed=3, n=4, max_tokens=12)))
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in result.choices]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_without_room_wait_and_still_come(make_engine, run, prefix_cache):
    engine = make_engine(pages=7, requests=3, prefix_cache=prefix_cache)
    prompt = list(range(40))
    params = SamplingParams(temperature=1, seed=3, n=6, max_tokens=30)
    (result,) = run(engine, engine.submit(prompt, params))
    wide = make_engine()
    (expected,) = run(wide, wide.submit(prompt, params))
    assert [c.token_ids for c in result.choices] == [c.token_ids for c in expected.choices]


def test_two_long_prompts_prefill_in_turn(make_engine, run):
    engine = make_engine(chunk=16)
    a, b = engine.submit([1] * 160, greedy(1)), engine.submit([2] * 160, greedy(1))
    served = []
    while engine.step():
        served.append(tuple(r.computed for r in engine._life.queues.prefilling.values()))
    steps = [pair for pair in served if len(pair) == 2]
    assert len(steps) > 10
    assert all(abs(x - y) <= 16 for x, y in steps)
    run(engine, a, b)


def test_a_preempted_request_goes_on_where_it_was(make_engine, run, model):
    engine = make_engine(pages=6, prefix_cache=False)
    prompts = [[i] * 20 for i in range(4)]
    handles = [engine.submit(prompt, greedy(40)) for prompt in prompts]
    results = run(engine, *handles)
    assert engine.metrics.preemptions_total > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == model.answer(prompt, 40)


def test_metrics_of_a_request_follow_from_its_token_times(make_engine, run):
    now = iter(range(10**6))
    engine = make_engine(clock=lambda: float(next(now)))
    (result,) = run(engine, engine.submit([1, 2], greedy(5)))
    times = result.choices[0].metrics
    gaps = [b - a for a, b in zip(times.token_times, times.token_times[1:], strict=False)]
    assert times.itl == gaps
    assert times.ttft == times.token_times[0] - times.submitted
    assert times.tpot == (times.token_times[-1] - times.token_times[0]) / 4
    assert times.jitter == max(gaps) - sorted(gaps)[1]
    assert times.queue_time == times.admitted - times.submitted
    assert engine.metrics.itl_seconds.count == 4
    assert engine.status()["latency"]["ttft_seconds"]["p50"] == times.ttft
