"""The simulator: times that can be checked by hand, and policies that break each rule, which it must catch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.engine.cost import StepCost
from deepinfer_core.engine.validate import decode_first
from deepinfer_core.plugin_api import EngineView, LaneSpec, Limits, Plan, PlanBuilder, PlannedWork, StepFeedback
from deepinfer_core.testing.simulator import PolicyError, Sharing, Simulator
from deepinfer_core.testing.trace import Arrival, SimulationResult, quantile_of, random_trace, streams

LIMITS = Limits(max_batched_tokens=64, max_requests=8, prefill_chunk_tokens=32, page_size=16, max_model_len=1024)
PLAIN = StepCost(base_ms=10, prefill_token_ms=1, decode_row_ms=2, context_token_ms=0)
TWO_LANES = (LaneSpec(name="decode", priority=1), LaneSpec(name="prefill"))


class Planner:
    """A policy from one function of the view."""

    def __init__(self, plan: Callable[[EngineView], Any] = decode_first) -> None:
        self._plan = plan
        self.seen: list[StepFeedback] = []

    def plan(self, view: EngineView) -> Plan:
        plan: Plan = self._plan(view)
        return plan

    def observe(self, feedback: StepFeedback) -> None:
        self.seen.append(feedback)


def _simulate(
    trace: list[Arrival], plan: Callable[[EngineView], Any] = decode_first, pages: int = 64, **more: Any
) -> SimulationResult:
    options: dict[str, Any] = {"limits": LIMITS, "total_pages": pages, "cost": PLAIN}
    return Simulator(Planner(plan), **(options | more)).run(trace)


def _one(prompt: int = 40, tokens: int = 3, **more: Any) -> Arrival:
    usual: dict[str, Any] = {"at": 0.0, "prompt_tokens": prompt, "max_tokens": tokens}
    return Arrival(id="a", **(usual | more))


def _two_lanes(view: EngineView) -> Plan:
    builder = PlanBuilder(view)
    if "decode" in builder.idle:
        builder.add("decode", builder.decode_rows())
    if "prefill" in builder.idle:
        builder.add("prefill", builder.prefill_chunk(builder.room()))
    return builder.build()


def test_one_request_takes_what_the_cost_says() -> None:
    served = _simulate([_one()]).served["a"]
    # chunks of 32 and 8: 42 + 18 ms; then two decode steps of 12 ms
    assert served.token_times == pytest.approx([0.060, 0.072, 0.084])
    assert served.ttft_ms == pytest.approx(60)
    assert served.tpot_ms == pytest.approx(12)
    assert served.max_itl_ms == pytest.approx(12)
    assert served.complete


def test_time_counts_from_the_arrival_and_idle_time_passes() -> None:
    result = _simulate([_one(at=2.0, tokens=1)])
    assert result.served["a"].ttft_ms == pytest.approx(60)
    assert result.duration == pytest.approx(2.060)


def test_a_cached_prefix_is_not_computed() -> None:
    assert _simulate([_one(cached_tokens=32, tokens=1)]).served["a"].ttft_ms == pytest.approx(18)


def test_works_of_one_lane_run_one_after_another() -> None:
    result = _simulate([_one(prompt=32, tokens=4), Arrival(id="b", at=0.05, prompt_tokens=32, max_tokens=1)])
    # a: chunk until 42, decode until 54; then decode (12) and b's chunk (42) in one cycle
    assert result.served["a"].token_times == pytest.approx([0.042, 0.054, 0.066, 0.120])
    assert result.served["b"].token_times == pytest.approx([0.108])
    decode, chunk = result.works[2:4]
    assert [decode.prepared_at, chunk.prepared_at] == pytest.approx([0.054, 0.054])
    assert chunk.launched_at == decode.finished_at == pytest.approx(0.066)


def test_feedback_has_what_each_work_took() -> None:
    policy = Planner()
    Simulator(policy, limits=LIMITS, total_pages=64, cost=PLAIN).run([_one(tokens=2)])
    assert [(f.prefill_tokens, f.decode_rows, f.context) for f in policy.seen] == [(32, 0, 32), (8, 0, 40), (0, 1, 41)]
    assert [f.ms for f in policy.seen] == pytest.approx([42, 18, 12])


def test_pages_that_run_out_cost_a_preemption_and_a_recomputation() -> None:
    trace = [evolve(_one(prompt=30, tokens=30), id=f"r{i}") for i in range(2)]
    result = _simulate(trace, pages=6)
    assert result.preemptions > 0
    assert result.served["r0"].preemptions == 0, "the senior is never preempted"
    assert all(s.complete for s in result.served.values())


def test_an_aborted_request_ends_and_gives_its_pages_back() -> None:
    trace = [_one(prompt=100, tokens=100, abort_at=0.1), Arrival(id="b", at=0.2, prompt_tokens=100, max_tokens=100)]
    result = _simulate(trace, pages=13)
    assert result.served["a"].aborted
    assert not result.served["a"].complete
    assert result.served["b"].complete


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="can never fit 2 pages"):
        _simulate([_one(prompt=40)], pages=2)


def test_two_lanes_overlap_and_the_favoured_one_is_hardly_slowed() -> None:
    trace = [_one(prompt=16, tokens=30), Arrival(id="b", at=0.1, prompt_tokens=320, max_tokens=1)]
    alone = _simulate(trace[:1]).served["a"].max_itl_ms
    serial = _simulate(trace).served["a"].max_itl_ms
    dual = _simulate(trace, _two_lanes, lanes=TWO_LANES, cost=StepCost.small_card()).served["a"].max_itl_ms
    assert serial > 3 * alone
    assert dual < 1.6 * StepCost.small_card().predict_ms(0, 1, 30)


def test_sharing_gains_nothing_at_full_interference_and_all_at_none() -> None:
    assert sum(Sharing(interference=1.0).rates([1.0, 0.1], [1, 0])) == pytest.approx(1.0)
    assert sum(Sharing(interference=0.0, favour=0.5).rates([0.9, 0.1], [1, 0])) == pytest.approx(2.0)
    assert sum(Sharing(interference=0.0).rates([1.0, 1.0], [0, 0])) == pytest.approx(1.0)
    assert Sharing().rates([0.5], [0]) == [1.0]
    favoured, other = Sharing(favour=0.7).rates([1.0, 1.0], [1, 0])
    assert (favoured, other) == pytest.approx((0.7, 0.3))
    low, high = Sharing(favour=0.7).rates([1.0, 1.0], [0, 1])
    assert (low, high) == pytest.approx((0.3, 0.7))


def test_the_same_trace_gives_the_same_times() -> None:
    assert _simulate(random_trace(5)) == _simulate(random_trace(5))
    assert random_trace(5) != random_trace(6)


def test_quantiles_are_by_nearest_rank() -> None:
    assert quantile_of([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile_of(list(map(float, range(1, 101))), 0.95) == 95.0
    assert quantile_of([1.0], 0.0) == 1.0
    assert quantile_of([], 0.5) == 0.0


def _works(*works: tuple[tuple[str, int], ...], lane: str = "main") -> tuple[PlannedWork, ...]:
    return tuple(PlannedWork(lane=lane, items=items) for items in works)


def _prefill_only(view: EngineView) -> Plan:
    builder = PlanBuilder(view)
    builder.add(builder.idle[0], builder.prefill_chunk(builder.room()) or builder.decode_rows())
    return builder.build()


def _decode_only(view: EngineView) -> Plan:
    builder = PlanBuilder(view)
    builder.add(builder.idle[0], builder.decode_rows() or builder.prefill_chunk(builder.room()))
    return builder.build()


def _lifo(view: EngineView) -> Plan:
    """Serve the latest arrival alone."""
    latest = max((*view.waiting, *view.prefilling, *view.decoding), key=lambda r: (r.arrival, r.id))
    count = 1 if latest.phase == "decode" else min(32, latest.remaining_prefill)
    return Plan(works=_works(((latest.id, count),)))


def _preempt_all(view: EngineView) -> Plan:
    """Throw away what was computed, in every cycle."""
    admitted = (*view.prefilling, *view.decoding)
    if admitted:
        return Plan(preempt=tuple(r.id for r in admitted))
    return Plan(works=_works(((view.waiting[0].id, 1),)))


def _greedy_pages(view: EngineView) -> Plan:
    """Admit whatever waits, pages or not."""
    waiting = [(r.id, min(32, r.remaining_prefill)) for r in view.waiting[:2]]
    return Plan(works=_works(tuple(waiting))) if waiting else decode_first(view)


def _raising(view: EngineView) -> Plan:
    raise KeyError("no such thing")


def _sleeping(view: EngineView) -> Plan:
    return Plan(wake_at=view.now + 0.05)


class _Fickle:
    """Changes its mind on the same view."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, view: EngineView) -> Plan:
        self._calls += 1
        plan = decode_first(view)
        return plan if self._calls % 2 else Plan(works=plan.works[:1], wake_at=view.now + 0.01)


BAD: list[tuple[str, Callable[[EngineView], Any]]] = [
    ("progress", lambda view: Plan()),
    ("malformed", lambda view: None),
    ("raised", _raising),
    ("impure", _Fickle()),
    ("starved", _prefill_only),
    ("starved", _decode_only),
    ("starved", _lifo),
    ("endless", _preempt_all),
    ("endless", _sleeping),
    ("pages", _greedy_pages),
    ("unknown_request", lambda view: Plan(works=_works((("ghost", 1),)))),
    ("unknown_lane", lambda view: Plan(works=_works((("s0", 1),), lane="fast"))),
    ("planned_twice", lambda view: Plan(works=_works((("s0", 1), ("s0", 1))))),
]


TRACES = {
    "starved": [
        *streams(2, max_tokens=200),
        *(Arrival(id=f"p{i}", at=0.05, prompt_tokens=900, max_tokens=4) for i in range(6)),
    ],
    "pages": streams(8, prompt_tokens=60, max_tokens=8),
    "endless": streams(1),
}


@pytest.mark.parametrize(("rule", "plan"), BAD)
def test_a_bad_policy_is_caught_by_name(rule: str, plan: Callable[[EngineView], Any]) -> None:
    trace = TRACES.get(rule, streams(2, max_tokens=8))
    with pytest.raises(PolicyError) as caught:
        _simulate(trace, plan, pages=6 if rule == "pages" else 512, patience=60)
    assert caught.value.rule == rule


@pytest.mark.parametrize("rule", TRACES)
def test_the_built_in_plan_serves_what_the_bad_ones_fail_on(rule: str) -> None:
    result = _simulate(TRACES[rule], pages=6 if rule == "pages" else 512, patience=60)
    assert all(served.complete for served in result.served.values())


@pytest.mark.parametrize(("rule", "plan"), [bad for bad in BAD if bad[0] not in ("starved", "endless", "impure")])
def test_as_in_the_engine_the_built_in_plan_takes_over_and_everyone_is_served(
    rule: str, plan: Callable[[EngineView], Any]
) -> None:
    result = _simulate(streams(6, prompt_tokens=60, max_tokens=6), plan, pages=12, replace_faults=True)
    assert {fault for _, fault in result.faults} >= {rule}
    assert all(served.complete for served in result.served.values())


class _Fuzz:
    """Plans at random, from what exists and what does not; the same for the same view."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, view: EngineView) -> Plan:
        live = [*view.waiting, *view.prefilling, *view.decoding]
        rng = random.Random(repr((self._seed, view.now, [(r.id, r.computed, r.in_flight) for r in live])))

        def items() -> tuple[tuple[str, int], ...]:
            some = rng.sample(live, rng.randint(0, min(3, len(live))))
            return tuple((r.id, 1 if rng.random() < 0.6 else rng.randint(0, 40)) for r in some)

        lanes = [rng.choice(["decode", "decode", "prefill", "nowhere"]) for _ in range(rng.randint(0, 3))]
        works = tuple(PlannedWork(lane=lane, items=items()) for lane in lanes)
        preempt = tuple(r.id for r in live if rng.random() < 0.02)
        return Plan(works=works, preempt=preempt, wake_at=rng.choice([None, view.now, view.now + 0.02]))


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_no_plan_however_wild_breaks_the_rules_of_the_engine(seed: int) -> None:
    trace = random_trace(seed, requests=6, longest=60, span_s=0.5)
    pages = -(-max(a.prompt_tokens + a.max_tokens for a in trace) // 16) + seed % 5
    result = _simulate(trace, _Fuzz(seed), pages=pages, lanes=TWO_LANES, replace_faults=True, patience=10_000)
    assert all(served.complete or served.aborted for served in result.served.values())


def test_the_built_in_plan_passes_on_two_lanes_and_small_pools() -> None:
    for seed in range(4):
        trace = random_trace(seed, requests=16, longest=300)
        pages = -(-max(a.prompt_tokens + a.max_tokens for a in trace) // 16)
        _simulate(trace, lanes=TWO_LANES, pages=pages, patience=2000)
