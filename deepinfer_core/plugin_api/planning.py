"""PlanBuilder: fills a plan that core accepts, keeping lanes, budgets, pages, turns and preemption for a policy."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_core.plugin_api.scheduling import EngineView, Plan, PlannedWork, RequestView

PRIORITY_S = 10.0
"""One step of priority counts like ten seconds of waiting: urgent requests pass, and yet nobody waits for ever."""

PATIENCE_S = 10.0
"""A deadline nearer than this counts like the waiting that is missing to it."""

MAX_PRIORITY = 100
"""Priorities beyond this are read as this, which bounds how long anyone can be passed."""

Item = tuple[str, int]


def seniority(request: RequestView) -> tuple[float, str]:
    """Return when the request counts as submitted, priority and deadline included; smaller goes first.

    It never changes while the request lives, so the most senior one is never preempted and always completes.
    """
    return _as_if(request, request.arrival), request.id


def turn(request: RequestView) -> tuple[float, str]:
    """Return when the request counts as last served; smaller goes first: round-robin, bent by priority and deadline."""
    served = request.last_planned_at if request.phase != "waiting" else None
    return _as_if(request, request.arrival if served is None else served), request.id


def _as_if(request: RequestView, since: float) -> float:
    if request.deadline is not None:
        since = min(since, request.deadline - PATIENCE_S)
    return since - PRIORITY_S * max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))


Order = Callable[[RequestView], tuple[float, str]]


class PlanBuilder:
    """A plan in the making. Take decode rows first, then prefill; put each onto an idle lane; then build.

    Pages go to decodes in order of seniority; one that finds no page preempts the most junior admitted request, never a
    senior one, and waits when there is none. A prompt is admitted when all of it fits beside what the others still
    need, in order of `turn`, and none passes one that does not fit. `build` adds what makes progress certain.

    Attributes:
        view: What the plan is made for; never changed.
        idle: Names of the lanes that take works now, the highest priority first.
        free: Pages that the plan has left, preemptions included.
    """

    def __init__(self, view: EngineView) -> None:
        self.view = view
        lanes = sorted((lane for lane in view.lanes if lane.idle), key=lambda lane: -lane.priority)
        self.idle: tuple[str, ...] = tuple(lane.name for lane in lanes)
        self.free = view.free_pages
        self._page = view.limits.page_size
        self._admitted = {r.id: r for r in (*view.prefilling, *view.decoding)}
        self._taken: dict[str, int] = {}
        self._preempted: list[str] = []
        self._works: list[PlannedWork] = []

    def decode_rows(self) -> tuple[Item, ...]:
        """Take one token of every decoding request that can get its page; at most ``max_batched_tokens`` of them."""
        most = self.view.limits.max_batched_tokens
        ready = [r for r in self.view.decoding if not r.in_flight and r.id not in self._taken]
        needed = sum([r.new_pages(1, self._page) for r in ready])
        if len(ready) <= most and needed <= self.free and not self._preempted:  # nearly always: no order to keep
            self.free -= needed
            self._taken |= {r.id: 1 for r in ready}
            return tuple([(r.id, 1) for r in ready])
        if len(ready) > most:
            ready = sorted(ready, key=turn)[:most]
        return tuple(
            self._take(request, 1)
            for request in sorted(ready, key=seniority)
            if self._plannable(request) and self._make_room(request, request.new_pages(1, self._page))
        )

    def prefill_chunk(self, tokens: int, order: Order = turn) -> tuple[Item, ...]:
        """Take up to ``tokens`` prompt tokens, from the request whose turn it is, then the next, admitting as it fits.

        A waiting request that does not fit holds back those that wait behind it, never those that were admitted: the
        pages that they still need are set aside for them.

        Args:
            tokens: Most tokens to take; `room` has what the limits allow.
            order: Whose turn it is; the smallest goes first.
        """
        chunk: list[Item] = []
        admitting = True
        for request in self.next_prefills(order):
            if request.phase == "waiting":
                admitting = admitting and self._may_admit(request)
                if not admitting:
                    continue
            count = min(tokens, request.remaining_prefill, self._fitting(request))
            if count <= 0:
                break  # passing it would let others eat the pages that it waits for
            chunk.append(self._take(request, count))
            tokens -= count
        return tuple(chunk)

    def next_prefills(self, order: Order = turn) -> list[RequestView]:
        """Return the requests with prompt left to compute that can be planned, in order."""
        return sorted((r for r in (*self.view.prefilling, *self.view.waiting) if self._plannable(r)), key=order)

    def room(self, rows: tuple[Item, ...] = (), chunk: int | None = None) -> int:
        """Return the prompt tokens that fit into one work beside ``rows``.

        Args:
            rows: Items that the same work already has.
            chunk: Most prompt tokens; the configured ``prefill_chunk_tokens`` by default.
        """
        limits = self.view.limits
        most = limits.prefill_chunk_tokens if chunk is None else chunk
        return max(0, min(most, limits.max_batched_tokens - sum(count for _, count in rows)))

    def add(self, lane: str, items: tuple[Item, ...]) -> None:
        """Put items onto a lane as one work, after the works that it has; no items, no work."""
        if items:
            self._works.append(PlannedWork(lane=lane, items=items))

    def build(self, wake_at: float | None = None) -> Plan:
        """Return the plan. Where no work was added and nothing is in flight, make room for the senior request."""
        if not self._works and self.idle and not self._in_flight():
            self._give_back()
            self.add(self.idle[0], self._senior_item())
        return Plan(works=tuple(self._works), preempt=tuple(self._preempted), wake_at=wake_at)

    def _give_back(self) -> None:
        """Forget what was taken without being added to a lane."""
        before = (*self.view.prefilling, *self.view.decoding)
        self._admitted = {r.id: r for r in before if not self._gone(r)}
        self.free = self.view.free_pages + sum(r.pages - r.shared_pages for r in before if self._gone(r))
        self._taken = {}

    def _plannable(self, request: RequestView) -> bool:
        return not request.in_flight and request.id not in self._taken and not self._gone(request)

    def _gone(self, request: RequestView) -> bool:
        return request.id in self._preempted

    def _in_flight(self) -> bool:
        return any(not lane.idle for lane in self.view.lanes) or any(r.in_flight for r in self._admitted.values())

    def _senior_item(self) -> tuple[Item, ...]:
        candidates = list(self._admitted.values()) or [r for r in self.view.waiting if self._plannable(r)]
        if not candidates:
            return ()
        senior = min(candidates, key=seniority)
        if not self._make_room(senior, senior.new_pages(1, self._page), at_any_cost=True):
            return ()  # what was preempted shows in the next view; core fails a request that can never fit
        if senior.phase == "decode":
            return (self._take(senior, 1),)
        return (self._take(senior, min(self.room(), senior.remaining_prefill, self._fitting(senior))),)

    def _make_room(self, request: RequestView, pages: int, *, at_any_cost: bool = False) -> bool:
        """Preempt juniors of ``request``, the most junior first, until ``pages`` are free; False if they cannot be."""
        if pages <= self.free:
            return True
        rank = seniority(request)
        juniors = [r for r in self._admitted.values() if self._plannable(r) and r.pages and seniority(r) > rank]
        if not at_any_cost and pages > self.free + sum(r.pages - r.shared_pages for r in juniors):
            return False
        for junior in sorted(juniors, key=seniority, reverse=True):
            self._preempted.append(junior.id)
            del self._admitted[junior.id]
            self.free += junior.pages - junior.shared_pages
            if pages <= self.free:
                return True
        return False

    def _may_admit(self, request: RequestView) -> bool:
        """Whether all of a waiting prompt fits beside what the admitted ones still need for theirs and a page each."""
        if self._preempted or len(self._admitted) >= self.view.limits.max_requests:
            return False
        if not self._admitted:
            return True  # alone it fits, or core would have refused it
        owed = sum(self._owed(r) for r in self._admitted.values())
        return request.new_pages(request.remaining_prefill + 1, self._page) + owed <= self.free

    def _owed(self, request: RequestView) -> int:
        taken = self._taken.get(request.id, 0)
        rest = max(taken, request.remaining_prefill)
        return request.new_pages(rest, self._page) - request.new_pages(taken, self._page) + 1

    def _fitting(self, request: RequestView) -> int:
        """Return how many tokens of the request its pages and the free ones hold."""
        return (request.pages + self.free) * self._page - request.start

    def _take(self, request: RequestView, count: int) -> Item:
        self.free -= request.new_pages(count, self._page)
        self._taken[request.id] = count
        self._admitted[request.id] = request
        return request.id, count
