"""A discrete-event simulation of the engine's cycle: any policy on a trace of arrivals, with every rule checked.

Time comes from a cost model, so a minute of serving takes a moment, and the same trace gives the same times. What the
simulation keeps is what the engine keeps: requests, pages, lanes; there are no tokens and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import define, evolve, field

from deepinfer_core.engine.cost import OnlineCost, StepCost
from deepinfer_core.engine.validate import decode_first, validate
from deepinfer_core.errors import PluginError
from deepinfer_core.plugin_api import (
    EngineView,
    LaneSpec,
    LaneView,
    Limits,
    Phase,
    Plan,
    RequestView,
    SchedulingPolicy,
    StepFeedback,
)
from deepinfer_core.testing.sharing import Sharing
from deepinfer_core.testing.trace import Arrival, Served, SimulationResult, WorkRecord

__all__ = ["PolicyError", "Sharing", "Simulator", "StepCost"]

SOON = 1e-9
"""Seconds that are taken for no time at all."""


class PolicyError(PluginError):
    """A policy broke a rule of plans, raised, changed its mind, starved a request, or did not come to an end.

    Attributes:
        rule: Its name: a `Violation.rule`, ``"raised"``, ``"impure"``, ``"starved"`` or ``"endless"``.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


@define
class _Request:
    arrival: Arrival
    phase: Phase = "waiting"
    prompt_tokens: int = 0
    cached: int = 0
    computed: int = 0
    pages: int = 0
    in_flight: bool = False
    last_planned_at: float | None = None
    admitted_at: float | None = None
    token_times: list[float] = field(factory=list)
    preemptions: int = 0
    aborted: bool = False
    passed: int = 0  # works of others since it was served, while it could have been

    def view(self) -> RequestView:
        a, times = self.arrival, self.token_times
        return RequestView(
            id=a.id,
            phase=self.phase,
            arrival=a.at,
            deadline=a.deadline,
            priority=a.priority,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            computed=self.computed,
            generated=len(times),
            max_tokens=a.max_tokens,
            pages=self.pages,
            in_flight=self.in_flight,
            last_planned_at=self.last_planned_at,
            first_token_at=times[0] if times else None,
            last_token_at=times[-1] if times else None,
            slo=a.slo,
        )


@define
class _Work:
    index: int
    alone_ms: float
    memory_part: float
    left_ms: float = 0.0


@define
class _Lane:
    spec: LaneSpec
    queue: list[_Work] = field(factory=list)
    busy_since: float | None = None


class Simulator:
    """Runs one policy on one trace.

    Args:
        policy: What to run.
        lanes: Its lanes; one when the device has no overlap.
        limits: What the engine would accept.
        total_pages: Pages of the pool.
        cost: What steps really take.
        prior: What the policy's cost model, fitted online to the simulated steps, begins with; ``cost`` by default.
        sharing: How lanes share the device.
        replace_faults: Run the built-in plan where the policy's breaks a rule, as the engine does, instead of raising.
        patience: Works that may pass a request which could be served, before it counts as starved.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        limits: Limits,
        total_pages: int,
        lanes: Sequence[LaneSpec] = (LaneSpec(name="main"),),
        cost: StepCost | None = None,
        prior: StepCost | None = None,
        sharing: Sharing | None = None,
        replace_faults: bool = False,
        patience: int = 200,
    ) -> None:
        self._policy, self._limits, self._total = policy, limits, total_pages
        self._cost = cost or StepCost.small_card()
        self._fit = OnlineCost(prior or self._cost)
        self._sharing = sharing or Sharing()
        self._replace_faults, self._patience = replace_faults, patience
        used = lanes if limits.overlap else lanes[:1]
        self._lanes = {spec.name: _Lane(spec) for spec in used}
        self._now = 0.0
        self._live: dict[str, _Request] = {}
        self._served: dict[str, Served] = {}
        self._works: list[WorkRecord] = []
        self._preempted: list[str] = []
        self._faults: list[tuple[float, str]] = []

    def run(self, arrivals: Iterable[Arrival]) -> SimulationResult:
        """Serve all arrivals to the end.

        Raises:
            PolicyError: The policy broke a rule (see ``replace_faults``), starved a request or did not end.
            ValueError: A request can never fit the pool.
        """
        coming = sorted(arrivals, key=lambda a: a.at)
        for arrival in coming:
            if -(-(arrival.prompt_tokens + arrival.max_tokens) // self._limits.page_size) > self._total:
                raise ValueError(f"{arrival} can never fit {self._total} pages of {self._limits.page_size} tokens")
        most = 1000 + 20 * sum(a.prompt_tokens + a.max_tokens for a in coming)
        for _ in range(most):
            while coming and coming[0].at <= self._now + SOON:
                arrival = coming.pop(0)
                self._live[arrival.id] = _Request(
                    arrival, prompt_tokens=arrival.prompt_tokens, cached=arrival.cached_tokens
                )
            self._drop_aborted()
            if not coming and not self._live:
                return self._result()
            wake = self._plan()
            self._advance([a.at for a in coming[:1]], wake)
        raise PolicyError("endless", f"{most} events and still {len(self._live)} requests: {sorted(self._live)[:8]}")

    def _view(self) -> EngineView:
        views = [r.view() for r in self._live.values()]
        free = self._total - sum(v.pages for v in views)
        assert 0 <= free <= self._total, "pages leaked or used twice"
        return EngineView(
            now=self._now,
            waiting=tuple(v for v in views if v.phase == "waiting"),
            prefilling=tuple(v for v in views if v.phase == "prefill"),
            decoding=tuple(v for v in views if v.phase == "decode"),
            lanes=tuple(
                LaneView(name=name, priority=lane.spec.priority, busy_since=lane.busy_since)
                for name, lane in self._lanes.items()
            ),
            free_pages=free,
            total_pages=self._total,
            limits=self._limits,
            cost=self._fit,
        )

    def _plan(self) -> float | None:
        """Ask for a plan where a lane is idle, check it, prepare its works; return when to ask again."""
        if not self._live or all(lane.queue for lane in self._lanes.values()):
            return None
        view = self._view()
        plan = self._checked_plan(view)
        for name in plan.preempt:
            request = self._live[name]
            request.prompt_tokens = request.arrival.prompt_tokens + len(request.token_times)
            request.phase, request.computed, request.cached, request.pages = "waiting", 0, 0, 0
            request.preemptions += 1
            self._preempted.append(name)
        for work in plan.works:
            self._prepare(work.lane, work.items)
        return plan.wake_at

    def _checked_plan(self, view: EngineView) -> Plan:
        try:
            plan = self._ask(view)
        except PolicyError as fault:
            if not self._replace_faults:
                raise
            self._faults.append((self._now, fault.rule))
            plan = decode_first(view)
            violation = validate(plan, view)
            assert violation is None, violation
        return plan

    def _ask(self, view: EngineView) -> Plan:
        try:
            plan, again = self._policy.plan(view), self._policy.plan(view)
        except Exception as error:
            raise PolicyError("raised", f"plan raised {error!r} at {self._now:.3f} s") from error
        violation = validate(plan, view)
        if violation is not None:
            raise PolicyError(violation.rule, f"{violation.message} at {self._now:.3f} s")
        if plan != again:
            raise PolicyError("impure", f"the same view gave {plan} and then {again} at {self._now:.3f} s")
        return plan

    def _prepare(self, lane_name: str, items: tuple[tuple[str, int], ...]) -> None:
        prefill = rows = context = 0
        for name, count in items:
            request = self._live[name]
            view = request.view()
            if request.phase == "decode":
                rows += 1
            else:
                prefill += count
                request.phase = "prefill"
            context += view.start + count
            request.pages += view.new_pages(count, self._limits.page_size)
            request.computed = view.start + count
            request.in_flight, request.last_planned_at, request.passed = True, self._now, 0
            if request.admitted_at is None:
                request.admitted_at = self._now
        record = WorkRecord(
            lane=lane_name,
            items=items,
            prepared_at=self._now,
            prefill_tokens=prefill,
            decode_rows=rows,
            context=context,
        )
        alone = self._cost.predict_ms(prefill, rows, context)
        memory = (self._cost.base_ms + self._cost.context_token_ms * context) / alone
        lane = self._lanes[lane_name]
        lane.queue.append(_Work(len(self._works), alone, memory, alone))
        self._works.append(record)
        if len(lane.queue) == 1:
            lane.busy_since = self._now
            self._launch(lane)

    def _launch(self, lane: _Lane) -> None:
        record = self._works[lane.queue[0].index]
        assert record.launched_at is None, "a work was launched twice"
        self._works[lane.queue[0].index] = evolve(record, launched_at=self._now)

    def _advance(self, arrivals: list[float], wake: float | None) -> None:
        """Let time pass to the next arrival, abort, wake-up or end of a work; finish what ends."""
        busy = [lane for lane in self._lanes.values() if lane.queue]
        rates = self._sharing.rates([lane.queue[0].memory_part for lane in busy], [lane.spec.priority for lane in busy])
        ends = [self._now + lane.queue[0].left_ms / rate / 1000 for lane, rate in zip(busy, rates, strict=True)]
        aborts = [r.arrival.abort_at for r in self._live.values() if r.arrival.abort_at is not None and not r.aborted]
        later = [t for t in (*arrivals, *aborts, *([] if wake is None else [wake])) if t > self._now + SOON]
        until = min([*ends, *later], default=math.inf)
        if until == math.inf:
            return  # only a preemption was planned; ask again
        for lane, rate in zip(busy, rates, strict=True):
            lane.queue[0].left_ms -= (until - self._now) * 1000 * rate
        self._now = until
        for lane, end in zip(busy, ends, strict=True):
            if end <= until + SOON:
                self._finish(lane)

    def _finish(self, lane: _Lane) -> None:
        work = lane.queue.pop(0)
        record = self._works[work.index] = evolve(self._works[work.index], finished_at=self._now)
        assert record.launched_at is not None, "a work finished that never ran"
        for name, _ in record.items:
            request = self._live[name]
            request.in_flight = False
            if request.phase == "decode" or request.computed == request.prompt_tokens:
                request.phase = "decode"
                request.token_times.append(self._now)
                if len(request.token_times) == request.arrival.max_tokens:
                    self._end(request)
        feedback = StepFeedback(
            lane=record.lane,
            ms=(self._now - record.launched_at) * 1000,
            prefill_tokens=record.prefill_tokens,
            decode_rows=record.decode_rows,
            context=record.context,
            preempted=tuple(self._preempted),
        )
        self._preempted.clear()
        self._fit.observe(feedback)
        self._policy.observe(feedback)
        self._count_passed()
        lane.busy_since = self._now if lane.queue else None
        if lane.queue:
            self._launch(lane)

    def _count_passed(self) -> None:
        views = [r.view() for r in self._live.values()]
        page = self._limits.page_size
        admitted = [v for v in views if v.phase != "waiting"]
        free = self._total - sum(v.pages for v in views) - len(admitted)  # each may need a page for its next token
        rest = free - sum(v.new_pages(v.remaining_prefill, page) for v in admitted)
        # A policy may keep one that does not fit from being passed by those behind it.
        full = len(admitted) >= self._limits.max_requests
        full |= any(v.phase == "waiting" and v.new_pages(v.remaining_prefill + 1, page) > rest for v in views)
        for request, view in zip(self._live.values(), views, strict=True):
            blocked = full if view.phase == "waiting" else view.new_pages(1, page) > free
            request.passed = 0 if blocked or request.in_flight else request.passed + 1
            if request.passed > self._patience:
                name, phase = request.arrival.id, request.phase
                raise PolicyError("starved", f"{name!r} ({phase}) was passed by {request.passed} works")

    def _drop_aborted(self) -> None:
        for request in list(self._live.values()):
            gone = request.arrival.abort_at is not None and request.arrival.abort_at <= self._now + SOON
            request.aborted |= gone
            if request.aborted and not request.in_flight:
                self._end(request)

    def _end(self, request: _Request) -> None:
        del self._live[request.arrival.id]  # with it, its pages are free
        self._served[request.arrival.id] = Served(
            arrival=request.arrival,
            admitted_at=request.admitted_at,
            token_times=tuple(request.token_times),
            preemptions=request.preemptions,
            aborted=request.aborted and len(request.token_times) < request.arrival.max_tokens,
        )

    def _result(self) -> SimulationResult:
        assert not any(lane.queue for lane in self._lanes.values()), "a work is left without a request"
        for record in self._works:
            assert record.launched_at is not None, f"never launched: {record}"
            assert record.finished_at is not None, f"never finished: {record}"
        for served in self._served.values():
            assert served.complete or served.aborted, f"ended early: {served}"
            assert all(b > a for a, b in pairwise(served.token_times)), f"two tokens at one time: {served}"
        return SimulationResult(
            served=dict(self._served), works=tuple(self._works), duration=self._now, faults=tuple(self._faults)
        )
