"""The check of a policy's plan against what it was made for, and the safe plan that runs where one fails it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from attrs import frozen

from deepinfer_core.plugin_api import EngineView, Plan, PlanBuilder, PlannedWork, RequestView

IDLE_LIMIT_S = 0.1
"""Longest sleep that a plan without works may ask for while nothing is in flight."""

Rule = Literal[
    "malformed",
    "unknown_lane",
    "busy_lane",
    "unknown_request",
    "planned_twice",
    "in_flight",
    "empty_work",
    "positive_tokens",
    "decode_one_token",
    "prefill_remaining",
    "max_batched_tokens",
    "max_requests",
    "preempt",
    "pages",
    "progress",
]


@frozen
class Violation:
    """The first rule that a plan breaks, and how.

    Attributes:
        rule: A stable name, counted and reported with the policy's.
        message: The values: what was planned, and what is possible.
    """

    rule: Rule
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def validate(plan: object, view: EngineView) -> Violation | None:
    """Return the first rule that ``plan`` breaks for ``view``, or None for a plan that can be executed as it is.

    Args:
        plan: What the policy returned: anything at all, for policies are third parties.
        view: What the policy saw.
    """
    if not isinstance(plan, Plan) or not all(_well_formed(plan)):
        return Violation("malformed", f"{plan!r:.200} is not a Plan of works, ids and token counts")
    requests = {r.id: r for r in (*view.waiting, *view.prefilling, *view.decoding)}
    return (
        _check_preemptions(plan, requests)
        or _check_lanes(plan, view)
        or _check_items(plan, requests, view)
        or _check_totals(plan, requests, view)
        or _check_progress(plan, requests, view)
    )


def decode_first(view: EngineView) -> Plan:
    """Return the built-in plan: all decodes, then one prefill chunk in turn, one work after another on an idle lane.

    It is always valid, never starves a request and always makes progress: out of pages, it preempts the most junior
    (lowest priority, latest) requests for the senior ones. It is empty when no lane is idle or nothing can be planned;
    if then nothing is in flight, the senior request can never fit and core must fail it.
    """
    builder = PlanBuilder(view)
    if builder.idle:
        lane = builder.idle[0]
        builder.add(lane, builder.decode_rows())
        builder.add(lane, builder.prefill_chunk(builder.room()))
    return builder.build()


def _well_formed(plan: Plan) -> Iterator[bool]:
    yield isinstance(plan.works, tuple) and isinstance(plan.preempt, tuple)
    yield plan.wake_at is None or (type(plan.wake_at) in (int, float) and plan.wake_at == plan.wake_at)
    yield all(isinstance(name, str) for name in plan.preempt)
    for work in plan.works:
        yield isinstance(work, PlannedWork) and isinstance(work.lane, str) and isinstance(work.items, tuple)
        for item in work.items:
            yield isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is int


def _check_preemptions(plan: Plan, requests: dict[str, RequestView]) -> Violation | None:
    for name in plan.preempt:
        request = requests.get(name)
        if request is None:
            return Violation("unknown_request", f"{name!r} is to be preempted, but no such request is alive")
        if request.in_flight:
            return Violation("in_flight", f"{name!r} is to be preempted while its work has not finished")
        if request.phase == "waiting":
            return Violation("preempt", f"{name!r} is waiting and has nothing to give back")
    if len(set(plan.preempt)) < len(plan.preempt):
        return Violation("planned_twice", f"a request stands twice in preempt {plan.preempt}")
    return None


def _check_lanes(plan: Plan, view: EngineView) -> Violation | None:
    lanes = {lane.name: lane for lane in view.lanes}
    for work in plan.works:
        lane = lanes.get(work.lane)
        if lane is None:
            return Violation("unknown_lane", f"work for lane {work.lane!r}; there are {', '.join(lanes) or 'none'}")
        if not lane.idle:
            return Violation("busy_lane", f"work for lane {work.lane!r}, busy since {lane.busy_since}")
    return None


def _check_items(plan: Plan, requests: dict[str, RequestView], view: EngineView) -> Violation | None:
    most = view.limits.max_batched_tokens
    seen = set(plan.preempt)
    for work in plan.works:
        if not work.items:
            return Violation("empty_work", f"a work without items for lane {work.lane!r}")
        for name, count in work.items:
            request = requests.get(name)
            if request is None:
                return Violation("unknown_request", f"{name!r} is planned, but no such request is alive")
            if name in seen:
                return Violation("planned_twice", f"{name!r} stands twice in one plan, or is planned and preempted")
            seen.add(name)
            if request.in_flight:
                return Violation("in_flight", f"{name!r} is planned while its earlier work has not finished")
            if count < 1:
                return Violation("positive_tokens", f"{count} tokens of {name!r}")
            if request.phase == "decode":
                if count != 1:
                    return Violation("decode_one_token", f"{count} tokens of {name!r}, which decodes one a step")
            elif count > request.remaining_prefill:
                left = request.remaining_prefill
                return Violation("prefill_remaining", f"{count} tokens of {name!r}, whose prompt has {left} left")
        total = sum(count for _, count in work.items)
        if total > most:
            return Violation("max_batched_tokens", f"{total} tokens in one work for lane {work.lane!r}; limit {most}")
    return None


def _check_totals(plan: Plan, requests: dict[str, RequestView], view: EngineView) -> Violation | None:
    items = [(requests[name], count) for work in plan.works for name, count in work.items]
    admitted = len(view.prefilling) + len(view.decoding) - len(plan.preempt)
    newly = sum(request.phase == "waiting" for request, _ in items)
    if newly and admitted + newly > view.limits.max_requests:
        return Violation(
            "max_requests", f"{newly} admitted beside {admitted}; at most {view.limits.max_requests} at once"
        )
    freed = sum(requests[name].pages - requests[name].shared_pages for name in plan.preempt)
    needed = sum(request.new_pages(count, view.limits.page_size) for request, count in items)
    if needed > view.free_pages + freed:
        return Violation("pages", f"{needed} pages needed; {view.free_pages} free and {freed} freed by preemption")
    return None


def _check_progress(plan: Plan, requests: dict[str, RequestView], view: EngineView) -> Violation | None:
    if plan.works or plan.preempt or not requests:
        return None
    if any(not lane.idle for lane in view.lanes) or any(r.in_flight for r in requests.values()):
        return None
    if plan.wake_at is None or not view.now < plan.wake_at <= view.now + IDLE_LIMIT_S:
        return Violation("progress", f"nothing planned for {len(requests)} requests while nothing is in flight")
    return None
