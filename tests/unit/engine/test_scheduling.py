import pytest

from deepinfer_core.plugin_api import LaneSpec, Plan, PlannedWork
from deepinfer_core.sampling import SamplingParams


def greedy(max_tokens, **rest):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **rest)


class Scripted:
    """A policy that does what a function says."""

    def __init__(self, plan):
        self._plan = plan
        self.seen = []

    def plan(self, view):
        return self._plan(view)

    def observe(self, feedback):
        self.seen.append(feedback)


def test_a_cycle_with_both_kinds_counts_as_overlap_but_never_as_stream_overlap_on_a_cpu(make_engine, run, model):
    engine = make_engine(chunk=16)
    long, short = [1] * 64, [2, 3]
    first = engine.submit(short, greedy(12))
    engine.step()
    second = engine.submit(long, greedy(3))
    run(engine, first, second)
    status = engine.status()
    assert status["policy"] == "decode_first"
    assert status["prefill_decode_overlap"] is True
    assert status["prefill_steps_total"] == 1 + 4
    assert status["prefill_decode_overlap_steps"] == 4
    assert status["prefill_decode_stream_overlap_steps"] == 0
    assert status["streams"] == 0
    assert status["latency"]["prefill_chunk_seconds"]["count"] == 5
    assert status["latency"]["decode_step_seconds"]["count"] == status["works"] - 5
    assert status["latency"]["mixed_step_seconds"] == {"count": 0}


def test_the_overlap_flag_is_reported(make_engine):
    assert make_engine(overlap=False).status()["prefill_decode_overlap"] is False


def test_a_mixed_forward_is_one_work_and_one_overlap_step(make_engine, run, model):
    def plan(view):
        items = [(r.id, 1) for r in view.decoding]
        items += [(r.id, min(8, r.remaining_prefill)) for r in (*view.prefilling, *view.waiting)]
        return Plan(works=(PlannedWork(lane="main", items=tuple(items)),))

    policy = Scripted(plan)
    engine = make_engine(policy=policy, policy_name="together")
    first = engine.submit([5] * 3, greedy(6))
    engine.step()
    second = engine.submit([6] * 16, greedy(2))
    run(engine, first, second)
    assert list(first.result(0).token_ids) == model.answer([5] * 3, 6)
    assert list(second.result(0).token_ids) == model.answer([6] * 16, 2)
    assert engine.metrics.mixed_step_seconds.count == engine.metrics.prefill_decode_overlap_steps == 2
    assert engine.metrics.prefill_steps_total == 3
    assert not engine.status()["policy_faults"]
    assert [(f.prefill_tokens, f.decode_rows) for f in policy.seen[:4]] == [(3, 0), (8, 1), (8, 1), (0, 2)]


def test_works_of_all_lanes_run_decode_first_on_one_device_lane(make_engine, run):
    order = []

    def plan(view):
        works = []
        if view.prefilling or view.waiting:
            request = (*view.prefilling, *view.waiting)[0]
            works.append(PlannedWork(lane="prefill", items=((request.id, min(4, request.remaining_prefill)),)))
        if view.decoding:
            works.append(PlannedWork(lane="decode", items=tuple((r.id, 1) for r in view.decoding)))
        return Plan(works=tuple(works))

    policy = Scripted(plan)
    lanes = (LaneSpec(name="prefill"), LaneSpec(name="decode", priority=1))
    engine = make_engine(policy=policy, policy_name="two", lanes=lanes)
    launch = engine._lanes.launch
    engine._lanes.launch = lambda work, forward: (order.append(work.kind), launch(work, forward))
    first = engine.submit([5], greedy(9))
    engine.step()
    second = engine.submit([6] * 12, greedy(1))
    run(engine, first, second)
    assert order[:7] == ["prefill", "decode", "prefill", "decode", "prefill", "decode", "prefill"]
    assert engine.metrics.prefill_decode_overlap_steps == 3
    assert engine.metrics.prefill_decode_stream_overlap_steps == 0


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ("ZeroDivisionError", lambda _: 1 / 0),
        ("malformed", lambda _: None),
        ("progress", lambda _: Plan()),
        ("unknown_request", lambda _: Plan(works=(PlannedWork(lane="main", items=(("nobody", 1),)),))),
        ("unknown_lane", lambda v: Plan(works=(PlannedWork(lane="x", items=((v.waiting[0].id, 1),)),))),
    ],
)
def test_a_policy_that_fails_is_counted_by_name_and_decode_first_runs(make_engine, run, model, caplog, rule, plan):
    engine = make_engine(policy=Scripted(plan), policy_name="bad")
    (result,) = run(engine, engine.submit([1, 2, 3], greedy(5)))
    assert list(result.token_ids) == model.answer([1, 2, 3], 5)
    faults = engine.status()["policy_faults"]
    assert faults.get(rule, 0) >= 1
    assert sum(faults.values()) == engine.metrics.cycles
    assert "policy 'bad' broke" in caplog.text


def test_a_policy_that_only_postpones_or_preempts_cannot_stop_the_engine(make_engine, run, model, caplog):
    now = iter(range(10**7))

    def postpone(view):
        return Plan(wake_at=view.now + 0.05)

    def preempt(view):
        return Plan(preempt=tuple(r.id for r in (*view.prefilling, *view.decoding)), wake_at=view.now + 0.05)

    for plan in (postpone, preempt):
        engine = make_engine(policy=Scripted(plan), policy_name="lazy", clock=lambda: next(now) / 1000)
        handle = engine.submit([1, 2, 3], greedy(5))
        for _ in range(500):
            engine.step()
        assert list(handle.result(0).token_ids) == model.answer([1, 2, 3], 5)
        assert engine.status()["policy_faults"]["stalled"] >= 1


def test_a_policy_whose_observe_raises_is_counted_and_nothing_else(make_engine, run, model, caplog):
    from deepinfer_core.engine.validate import decode_first

    policy = Scripted(decode_first)
    policy.observe = lambda feedback: feedback.nothing
    engine = make_engine(policy=policy, policy_name="deaf")
    (result,) = run(engine, engine.submit([1, 2, 3], greedy(5)))
    assert list(result.token_ids) == model.answer([1, 2, 3], 5)
    assert engine.status()["policy_faults"] == {"AttributeError": engine.metrics.works}


def test_a_running_stream_waits_for_a_bounded_number_of_chunks(make_engine, run):
    """KV-09 a: one stream decodes while six long prompts arrive."""
    engine = make_engine(pages=600, chunk=64, length=4096, requests=8)
    stream = engine.submit([1], greedy(200))
    engine.step()
    request = engine._life.queues.find(stream.id)
    others = [engine.submit([i] * 1000, greedy(1)) for i in range(6)]
    chunks_so_far = lambda: engine.metrics.prefill_chunk_seconds.count
    gaps, last, chunks = [], request.generated, chunks_so_far()
    while not stream.done:
        engine.step()
        if request.generated != last:
            last = request.generated
            gaps.append(chunks_so_far() - chunks)
            chunks = chunks_so_far()
    run(engine, *others)
    assert max(gaps) == 1
    assert sum(gaps) > 50


def test_a_newcomer_starts_beside_endless_decoders(make_engine, run):
    """KV-09 b: eight endless decoders and a newcomer."""
    engine = make_engine(pages=600, requests=9, length=1024)
    endless = [engine.submit([i], greedy(400, ignore_eos=True)) for i in range(8)]
    for _ in range(20):
        engine.step()
    newcomer = engine.submit([9] * 20, greedy(1))
    for _ in range(3):
        engine.step()
    assert newcomer.done
    run(engine, *endless)


def test_priority_and_deadline_reach_the_policy(make_engine, run):
    from deepinfer_core.engine.validate import decode_first

    views = []
    policy = Scripted(lambda view: (views.append(view), decode_first(view))[1])
    engine = make_engine(policy=policy, policy_name="look", clock=lambda: 100.0)
    handle = engine.submit([1, 2], greedy(2, priority=3, deadline_ms=2500), tags=("a",))
    run(engine, handle)
    (waiting,) = views[0].waiting
    assert (waiting.priority, waiting.deadline, waiting.tags, waiting.arrival) == (3, 102.5, ("a",), 100.0)
    (decoding,) = views[1].decoding
    assert (decoding.phase, decoding.computed, decoding.generated, decoding.pages) == ("decode", 2, 1, 1)
