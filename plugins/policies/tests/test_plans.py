"""The plan each policy makes of one view: which works, on which lanes, in which order."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from deepinfer_policies.dual_stream import DualStream, DualStreamOptions
from deepinfer_policies.mixed import Mixed, MixedOptions
from deepinfer_policies.plugin import POLICIES
from deepinfer_policies.serial import Serial, SerialOptions
from deepinfer_policies.slo import SloOptions, SloPolicy
from deepinfer_policies.time_sliced import TimeSliced, TimeSlicedOptions

from deepinfer_core.plugin_api import EngineView, LaneView, Limits, Plan, RequestView, SchedulingPolicy
from deepinfer_core.testing.simulator import StepCost

LIMITS = Limits(max_batched_tokens=256, max_requests=8, prefill_chunk_tokens=64, page_size=16, max_model_len=4096)


def _waiting(name: str, prompt: int = 200, **more: Any) -> RequestView:
    usual: dict[str, Any] = {"phase": "waiting", "arrival": 0.0, "prompt_tokens": prompt, "max_tokens": 64}
    return RequestView(id=name, **(usual | more))


def _prefilling(name: str, computed: int = 32, **more: Any) -> RequestView:
    return _waiting(name, phase="prefill", computed=computed, pages=-(-computed // 16), **more)


def _decoding(name: str, context: int = 40, **more: Any) -> RequestView:
    usual: dict[str, Any] = {"generated": 4, "first_token_at": 9.9, "last_token_at": 10.0}
    return _waiting(name, context, phase="decode", computed=context, pages=-(-context // 16), **(usual | more))


def _view(
    *requests: RequestView, free: int = 200, lanes: tuple[LaneView, ...] | None = None, **limits: Any
) -> EngineView:
    return EngineView(
        now=10.0,
        waiting=tuple(r for r in requests if r.phase == "waiting"),
        prefilling=tuple(r for r in requests if r.phase == "prefill"),
        decoding=tuple(r for r in requests if r.phase == "decode"),
        lanes=lanes or (LaneView(name="main", priority=0),),
        free_pages=free,
        total_pages=1000,
        limits=evolve(LIMITS, **limits),
        cost=StepCost.small_card(),
    )


def _two(decode_busy: bool = False, prefill_busy: bool = False) -> tuple[LaneView, ...]:
    return (
        LaneView(name="decode", priority=1, busy_since=9.0 if decode_busy else None),
        LaneView(name="prefill", priority=0, busy_since=9.0 if prefill_busy else None),
    )


def _shape(plan: Plan) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    return [(work.lane, work.items) for work in plan.works]


D, E, P, W = _decoding("d"), _decoding("e", 50), _prefilling("p"), _waiting("w", 30, arrival=1.0)


def test_serial_decodes_all_then_computes_a_chunk() -> None:
    assert _shape(Serial().plan(_view(D, E, P))) == [("main", (("d", 1), ("e", 1))), ("main", (("p", 64),))]


def test_mixed_puts_both_into_one_forward() -> None:
    assert _shape(Mixed().plan(_view(D, E, P))) == [("main", (("d", 1), ("e", 1), ("p", 64)))]


def test_mixed_gives_the_chunk_a_forward_of_its_own_when_rows_fill_one() -> None:
    plan = Mixed().plan(_view(D, E, P, max_batched_tokens=2))
    assert _shape(plan) == [("main", (("d", 1), ("e", 1))), ("main", (("p", 2),))]


def test_two_lanes_take_disjoint_requests() -> None:
    plan = DualStream().plan(_view(D, E, P, lanes=_two()))
    assert _shape(plan) == [("decode", (("d", 1), ("e", 1))), ("prefill", (("p", 64),))]


def test_decodes_go_on_while_a_chunk_is_in_flight_and_the_other_way_round() -> None:
    flying = evolve(P, in_flight=True)
    assert _shape(DualStream().plan(_view(D, flying, lanes=_two(prefill_busy=True)))) == [("decode", (("d", 1),))]
    flying = evolve(D, in_flight=True)
    assert _shape(DualStream().plan(_view(flying, P, lanes=_two(decode_busy=True)))) == [("prefill", (("p", 64),))]


def test_with_one_lane_dual_stream_is_serial() -> None:
    assert DualStream().plan(_view(D, P, W)) == Serial().plan(_view(D, P, W))


def test_a_slice_is_as_long_as_its_milliseconds() -> None:
    (_, decode), (_, chunk) = _shape(TimeSliced(TimeSlicedOptions(slice_ms=20.0)).plan(_view(D, P)))
    assert decode == (("d", 1),)
    assert chunk == (("p", 37),)  # 9 + 0.5 * (37 - 16) = 19.5, and 0.5 more would pass 20 with the context


def test_a_slice_without_decodes_is_a_whole_chunk() -> None:
    assert _shape(TimeSliced(TimeSlicedOptions(slice_ms=20.0)).plan(_view(P))) == [("main", (("p", 64),))]


def test_slo_takes_the_chunk_that_fits_the_gap() -> None:
    options = SloOptions(max_itl_ms=40, tpot_p95_ms=None, margin=1.0)
    (_, items), *rest = _shape(SloPolicy(options).plan(_view(D, P)))
    assert items == (("d", 1), ("p", 76))  # 9 + 0.5 * (76 + 1 - 16) = 39.5
    assert not rest


def test_slo_counts_the_time_that_a_gap_has_run_already() -> None:
    options = SloOptions(max_itl_ms=40, tpot_p95_ms=None, margin=1.0)
    late = evolve(D, last_token_at=9.985)
    (_, items), *_ = _shape(SloPolicy(options).plan(_view(late, P)))
    assert items == (("d", 1), ("p", 46))  # 25 ms are left


def test_slo_spends_what_a_fast_request_saved_and_no_more() -> None:
    options = SloOptions(max_itl_ms=None, tpot_p95_ms=30, margin=1.0)
    # 4 tokens: the mean of 4 gaps may be 30 ms, so 120 ms after the first; 100 are gone
    (_, items), *_ = _shape(SloPolicy(options).plan(_view(D, P)))
    assert items == (("d", 1), ("p", 36))  # 9 + 0.5 * 21 = 19.5 of 20


def test_slo_keeps_prefill_going_where_objectives_cannot_be_held() -> None:
    options = SloOptions(max_itl_ms=5, tpot_p95_ms=5)
    (_, items), *_ = _shape(SloPolicy(options).plan(_view(D, P)))
    assert items == (("d", 1), ("p", 16))


def test_slo_fills_the_device_while_nobody_decodes() -> None:
    assert _shape(SloPolicy().plan(_view(P))) == [("main", (("p", 168),))]
    halved = SloPolicy(SloOptions(ttft_ms=100, margin=1.0)).plan(_view(P))
    assert _shape(halved) == [("main", (("p", 97),))]  # half of 100 ms, and the context's share


def test_slo_serves_first_who_is_due_first() -> None:
    early, late = _waiting("early", arrival=1.0), _waiting("late", arrival=2.0)
    due = evolve(late, id="due", slo=evolve(late.slo, ttft_ms=100.0))
    options = SloOptions(ttft_ms=5000)
    assert _shape(SloPolicy(options).plan(_view(early, late)))[0][1][0][0] == "early"
    assert _shape(SloPolicy(options).plan(_view(early, late, due)))[0][1][0][0] == "due"


ALL: list[SchedulingPolicy] = [Serial(), DualStream(), Mixed(), TimeSliced(), SloPolicy()]


def _prefilled(plan: Plan) -> list[str]:
    return [name for work in plan.works for name, _ in work.items if name.startswith("p")]


@pytest.mark.parametrize("policy", ALL[:4], ids=lambda p: type(p).__name__)
def test_long_prompts_take_turns(policy: SchedulingPolicy) -> None:
    first = _prefilling("p1", prompt_tokens=900, last_planned_at=9.9)
    second = _prefilling("p2", prompt_tokens=900, last_planned_at=9.8)
    assert _prefilled(policy.plan(_view(first, second))) == ["p2"]
    assert _prefilled(policy.plan(_view(first, evolve(second, last_planned_at=9.95)))) == ["p1"]


@pytest.mark.parametrize("policy", ALL, ids=lambda p: type(p).__name__)
def test_priority_and_a_near_deadline_go_first(policy: SchedulingPolicy) -> None:
    plain = _waiting("p1", arrival=5.0)
    urgent, due = _waiting("p2", arrival=6.0, priority=1), _waiting("p3", arrival=6.0, deadline=11.0)
    assert _prefilled(policy.plan(_view(plain, urgent)))[0] == "p2"
    assert _prefilled(policy.plan(_view(plain, due)))[0] == "p3"


@pytest.mark.parametrize("policy", ALL, ids=lambda p: type(p).__name__)
def test_without_pages_the_most_junior_gives_way(policy: SchedulingPolicy) -> None:
    old, young = _decoding("old", 48, arrival=1.0), _decoding("young", 48, arrival=2.0)
    plan = policy.plan(_view(old, young, free=0))
    assert plan.preempt == ("young",)
    assert _shape(plan) == [("main", (("old", 1),))]


@pytest.mark.parametrize("policy", ALL, ids=lambda p: type(p).__name__)
def test_a_cached_prefix_is_left_out(policy: SchedulingPolicy) -> None:
    cached = _waiting("w", 200, cached_tokens=160)
    assert _shape(policy.plan(_view(cached))) == [("main", (("w", 40),))]


@pytest.mark.parametrize("policy", ALL, ids=lambda p: type(p).__name__)
def test_nothing_is_planned_for_a_busy_lane(policy: SchedulingPolicy) -> None:
    busy = (LaneView(name="main", priority=0, busy_since=9.0),)
    assert policy.plan(_view(evolve(D, in_flight=True), W, lanes=busy)) == Plan()


@pytest.mark.parametrize("make", [SerialOptions, MixedOptions, DualStreamOptions])
def test_a_policys_own_chunk_goes_before_the_configured_one(make: Any) -> None:
    policy = {SerialOptions: Serial, MixedOptions: Mixed, DualStreamOptions: DualStream}[make](make(chunk_tokens=20))
    assert _shape(policy.plan(_view(P))) == [("main", (("p", 20),))]


def test_the_policies_are_the_five_of_the_descriptors() -> None:
    assert sorted(spec.name for spec in POLICIES) == ["dual_stream", "mixed", "serial", "slo", "time_sliced"]
    assert {spec.factory.partition(":")[2] for spec in POLICIES} == {type(p).__name__ for p in ALL}
