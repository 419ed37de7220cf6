"""The check of plans: one case for each rule, and the built-in plan against random views."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.engine.validate import decode_first, validate
from deepinfer_core.plugin_api import EngineView, LaneView, Limits, Plan, PlannedWork, RequestView


class _FlatCost:
    def predict_ms(self, prefill_tokens: int, decode_rows: int, context: int) -> float:
        return 10.0


def _limits(**changes: Any) -> Limits:
    usual: dict[str, Any] = {
        "max_batched_tokens": 64,
        "max_requests": 4,
        "prefill_chunk_tokens": 32,
        "page_size": 16,
        "max_model_len": 512,
    }
    return Limits(**(usual | changes))


def _waiting(name: str, prompt: int = 40, **more: Any) -> RequestView:
    usual: dict[str, Any] = {"phase": "waiting", "arrival": 0.0, "prompt_tokens": prompt, "max_tokens": 8}
    return RequestView(id=name, **(usual | more))


def _prefilling(name: str, prompt: int = 40, computed: int = 16, **more: Any) -> RequestView:
    more = {"pages": -(-computed // 16)} | more
    return evolve(_waiting(name, prompt), phase="prefill", computed=computed, **more)


def _decoding(name: str, context: int = 40, **more: Any) -> RequestView:
    more = {"pages": -(-context // 16)} | more
    return evolve(_waiting(name, context), phase="decode", computed=context, generated=1, **more)


def _view(*requests: RequestView, free: int = 20, busy: bool = False, lanes: int = 1, **limits: Any) -> EngineView:
    names = ("main", "side")[:lanes]
    return EngineView(
        now=1.0,
        waiting=tuple(r for r in requests if r.phase == "waiting"),
        prefilling=tuple(r for r in requests if r.phase == "prefill"),
        decoding=tuple(r for r in requests if r.phase == "decode"),
        lanes=tuple(LaneView(name=name, priority=0, busy_since=0.5 if busy else None) for name in names),
        free_pages=free,
        total_pages=free + sum(r.pages for r in requests),
        limits=_limits(**limits),
        cost=_FlatCost(),
    )


def _plan(*works: tuple[tuple[str, int], ...], lane: str = "main", **more: Any) -> Plan:
    return Plan(works=tuple(PlannedWork(lane=lane, items=items) for items in works), **more)


def _rule(plan: object, view: EngineView) -> str | None:
    violation = validate(plan, view)
    return violation.rule if violation else None


D, P, W = _decoding("d"), _prefilling("p"), _waiting("w")


def test_decode_then_prefill_on_one_lane_is_a_good_plan() -> None:
    assert validate(_plan((("d", 1),), (("p", 24), ("w", 40))), _view(D, P, W)) is None


def test_decode_rows_and_a_chunk_in_one_forward_are_a_good_plan() -> None:
    assert validate(_plan((("d", 1), ("p", 24))), _view(D, P)) is None


@pytest.mark.parametrize(
    ("rule", "plan", "view"),
    [
        ("unknown_lane", _plan((("d", 1),), lane="fast"), _view(D)),
        ("busy_lane", _plan((("d", 1),)), _view(D, busy=True)),
        ("unknown_request", _plan((("x", 1),)), _view(D)),
        ("unknown_request", _plan((("d", 1),), preempt=("x",)), _view(D)),
        ("planned_twice", _plan((("d", 1), ("d", 1))), _view(D)),
        ("planned_twice", _plan((("p", 1),), (("p", 1),)), _view(P)),
        ("planned_twice", _plan((("d", 1),), preempt=("d",)), _view(D)),
        ("planned_twice", _plan((("d", 1),), preempt=("p", "p")), _view(D, P)),
        ("in_flight", _plan((("d", 1),)), _view(evolve(D, in_flight=True))),
        ("in_flight", _plan((("p", 1),), preempt=("d",)), _view(P, evolve(D, in_flight=True))),
        ("empty_work", _plan(()), _view(D)),
        ("positive_tokens", _plan((("p", 0),)), _view(P)),
        ("positive_tokens", _plan((("p", -3),)), _view(P)),
        ("decode_one_token", _plan((("d", 2),)), _view(D)),
        ("prefill_remaining", _plan((("p", 25),)), _view(P)),
        ("prefill_remaining", _plan((("w", 9),)), _view(_waiting("w", 40, cached_tokens=32))),
        ("max_batched_tokens", _plan((("a", 40), ("b", 25))), _view(_waiting("a"), _waiting("b"))),
        ("max_requests", _plan((("d", 1),), (("w", 1),)), _view(D, W, max_requests=1)),
        ("preempt", _plan((("d", 1),), preempt=("w",)), _view(D, W)),
        ("pages", _plan((("w", 40),)), _view(W, free=2)),
        ("pages", _plan((("d", 1),)), _view(_decoding("d", 48), free=0)),
        ("pages", _plan((("a", 32),), (("b", 32),)), _view(_waiting("a"), _waiting("b"), free=3)),
        ("progress", Plan(), _view(W)),
        ("progress", Plan(wake_at=1.0), _view(W)),
        ("progress", Plan(wake_at=2.0), _view(W)),
    ],
)
def test_each_broken_rule_is_named(rule: str, plan: Plan, view: EngineView) -> None:
    assert _rule(plan, view) == rule


@pytest.mark.parametrize(
    "plan",
    [
        None,
        "decode",
        Plan(works=None),  # type: ignore[arg-type]
        Plan(works=("main",)),  # type: ignore[arg-type]
        Plan(works=(PlannedWork(lane=3, items=()),)),  # type: ignore[arg-type]
        _plan((("d", True),)),
        _plan((("d", 1.0),)),  # type: ignore[arg-type]
        _plan((("d",),)),  # type: ignore[arg-type]
        _plan((("d", 1),), preempt=(7,)),
        Plan(wake_at=float("nan")),
        Plan(wake_at="soon"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_a_plan_at_all_is_malformed_and_never_raises(plan: object) -> None:
    assert _rule(plan, _view(D)) == "malformed"


def test_preemption_frees_only_pages_that_nobody_shares() -> None:
    plan = _plan((("w", 40),), preempt=("d",))
    assert validate(plan, _view(W, _decoding("d", 48), free=0)) is None
    assert _rule(plan, _view(W, _decoding("d", 48, shared_pages=1), free=0)) == "pages"


def test_preempting_makes_room_for_admission() -> None:
    assert validate(_plan((("w", 40),), preempt=("d",)), _view(D, W, max_requests=1)) is None


def test_waiting_is_allowed_while_something_is_in_flight_or_for_a_moment() -> None:
    assert validate(Plan(), _view(W, busy=True)) is None
    assert validate(Plan(), _view(W, evolve(D, in_flight=True))) is None
    assert validate(Plan(wake_at=1.05), _view(W)) is None
    assert validate(Plan(), _view()) is None


def test_the_message_has_the_values() -> None:
    violation = validate(_plan((("w", 40),)), _view(W, free=2))
    assert str(violation) == "pages: 3 pages needed; 2 free and 0 freed by preemption"


def test_decode_first_runs_decodes_then_a_chunk_and_admits_in_turn() -> None:
    plan = decode_first(_view(D, P, W))
    assert plan == _plan((("d", 1),), (("p", 24), ("w", 8)))


def test_decode_first_is_empty_while_no_lane_is_idle() -> None:
    assert decode_first(_view(D, W, busy=True)) == Plan()


def test_decode_first_preempts_the_most_junior_when_pages_run_out() -> None:
    old = _decoding("old", 48)
    low = _decoding("low", 48, arrival=0.1, priority=-1)
    late = _decoding("late", 48, arrival=0.3)
    plan = decode_first(_view(old, low, late, free=0))
    assert plan.preempt == ("low",)
    assert plan.works == _plan((("old", 1), ("late", 1))).works


def test_decode_first_lets_a_stuck_senior_prefill_evict_a_junior_one() -> None:
    old, late = _prefilling("old", 100, 48), _prefilling("late", 100, 48, arrival=0.5)
    plan = decode_first(_view(old, late, free=0))
    assert plan.preempt == ("late",)
    assert plan.works == _plan((("old", 32),)).works


def test_decode_first_serves_prefills_round_robin() -> None:
    first = _prefilling("first", 400, 16, last_planned_at=0.9)
    second = _prefilling("second", 400, 16, last_planned_at=0.8)
    assert decode_first(_view(first, second)).works == _plan((("second", 32),)).works


def test_a_request_that_does_not_fit_is_not_passed_by_a_smaller_one() -> None:
    big, small = _waiting("big", 200, arrival=0.0), _waiting("small", 10, arrival=0.5)
    plan = decode_first(_view(D, big, small, free=8))
    assert plan.works == _plan((("d", 1),)).works


def test_priority_and_a_near_deadline_bend_the_turn() -> None:
    plain, urgent = _waiting("plain"), _waiting("urgent", arrival=0.9, priority=1)
    due = _waiting("due", arrival=0.9, deadline=1.5)
    assert decode_first(_view(plain, urgent)).works[0].items[0][0] == "urgent"
    assert decode_first(_view(plain, due)).works[0].items[0][0] == "due"


@st.composite
def _views(draw: st.DrawFn) -> EngineView:
    requests = []
    for index in range(draw(st.integers(0, 8))):
        phase = draw(st.sampled_from(["waiting", "prefill", "decode"]))
        prompt = draw(st.integers(1, 120))
        more: dict[str, Any] = {
            "arrival": draw(st.integers(0, 3)) / 4,
            "priority": draw(st.integers(-1, 1)),
            "deadline": draw(st.sampled_from([None, 1.5, 30.0])),
        }
        if phase == "waiting":
            more["cached_tokens"] = 16 * draw(st.integers(0, (prompt - 1) // 16))
            requests.append(_waiting(f"r{index}", prompt))
        else:
            more |= {"in_flight": draw(st.booleans()), "last_planned_at": draw(st.integers(0, 3)) / 4}
            build = _decoding(f"r{index}", prompt)
            if phase == "prefill":
                build = _prefilling(f"r{index}", prompt, draw(st.integers(0, prompt - 1)))
            more["shared_pages"] = draw(st.integers(0, build.pages))
            requests.append(build)
        requests[-1] = evolve(requests[-1], **more)
    missing = max(0, 9 - sum(r.pages for r in requests))  # every request fits alone, or core would have refused it
    return _view(
        *requests,
        free=missing + draw(st.integers(0, 8)),
        lanes=draw(st.integers(1, 2)),
        max_batched_tokens=draw(st.integers(1, 64)),
        prefill_chunk_tokens=draw(st.integers(1, 64)),
        max_requests=draw(st.integers(8, 12)),
    )


@given(_views())
@settings(max_examples=400, deadline=None)
def test_decode_first_is_valid_and_makes_progress_for_every_view(view: EngineView) -> None:
    plan = decode_first(view)
    assert validate(plan, view) is None
    assert plan == decode_first(view)
