"""Scheduling policies: an immutable view in, a plan out; pure Python, no torch, no side effect on what is seen."""

from __future__ import annotations

from typing import Literal, Protocol

from attrs import field, frozen

from deepinfer_core.plugin_api.values import Stability

Phase = Literal["waiting", "prefill", "decode"]


@frozen(kw_only=True)
class Slo:
    """Service-level objectives in milliseconds; None means no objective."""

    ttft_ms: float | None = None
    tpot_p95_ms: float | None = None
    max_itl_ms: float | None = None


@frozen(kw_only=True)
class RequestView:
    """One request as a policy sees it. Times are seconds on the engine's monotonic clock.

    Attributes:
        id: Names the request in a plan.
        phase: ``waiting`` (not admitted), ``prefill`` (prompt not yet computed), ``decode``.
        arrival: When it was submitted.
        deadline: When it should be done; None for no deadline.
        priority: Higher is more urgent; 0 by default.
        prompt_tokens: Tokens to prefill, recomputed ones after a preemption included.
        cached_tokens: Prompt tokens found in the prefix cache; fewer than prompt_tokens: the last gives the logits.
        computed: Tokens whose KV is in the cache.
        generated: Tokens generated so far.
        max_tokens: Most tokens it may generate.
        pages: Pages it holds.
        shared_pages: Of these, how many another request holds too: preempting it frees ``pages - shared_pages``.
        in_flight: Work of an earlier plan for it has not finished; it must be neither planned nor preempted.
        last_planned_at: When its latest work was prepared; None before the first. Makes round-robin need no memory.
        first_token_at: When its first token was accepted; None before.
        last_token_at: When its latest token was accepted; None before the first.
        slo: Its own objectives.
        tags: Free labels of the submitter.
    """

    id: str
    phase: Phase
    arrival: float
    prompt_tokens: int
    max_tokens: int
    deadline: float | None = None
    priority: int = 0
    cached_tokens: int = 0
    computed: int = 0
    generated: int = 0
    pages: int = 0
    shared_pages: int = 0
    in_flight: bool = False
    last_planned_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    slo: Slo = Slo()
    tags: tuple[str, ...] = ()

    @property
    def remaining_prefill(self) -> int:
        """Prompt tokens that still have to be computed."""
        return max(0, self.prompt_tokens - self.start)

    @property
    def start(self) -> int:
        """Position of the next token to compute: what is computed, or found in the prefix cache, lies before it."""
        return max(self.computed, self.cached_tokens)

    def new_pages(self, tokens: int, page_size: int) -> int:
        """Return how many more pages it needs to compute ``tokens`` more; the one rule that plans are checked by.

        Pages of a cached prefix count in full for a waiting request: nothing keeps them alive until it is admitted.
        """
        return max(0, -(-(self.start + tokens) // page_size) - self.pages)


@frozen(kw_only=True)
class LaneView:
    """One lane: a stream with a priority. ``busy_since`` is None while it is idle."""

    name: str
    priority: int
    busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """True when a work may be planned on it now."""
        return self.busy_since is None


@frozen(kw_only=True)
class Limits:
    """What the engine accepts in one plan.

    Attributes:
        max_batched_tokens: Most tokens of one work.
        max_requests: Most requests admitted at once.
        prefill_chunk_tokens: The configured chunk; a policy may plan less, and more only up to max_batched_tokens.
        page_size: Tokens of one page.
        max_model_len: Longest context of one request.
        overlap: False under ``--no-prefill-decode-overlap`` and on a CPU: one lane, one work after another.
    """

    max_batched_tokens: int
    max_requests: int
    prefill_chunk_tokens: int
    page_size: int
    max_model_len: int
    overlap: bool = True


class CostModel(Protocol):
    """What a step will take, fitted online by core from measured steps."""

    def predict_ms(self, prefill_tokens: int, decode_rows: int, context: int) -> float:
        """Return milliseconds for a forward of this many prefill tokens and decode rows.

        Args:
            prefill_tokens: New prompt tokens in the step.
            decode_rows: Requests that decode one token.
            context: Sum of the contexts that the step's attention reads, in tokens.
        """
        ...


@frozen(kw_only=True)
class EngineView:
    """Everything a policy may base a plan on; tuples, in order of arrival."""

    now: float
    waiting: tuple[RequestView, ...]
    prefilling: tuple[RequestView, ...]
    decoding: tuple[RequestView, ...]
    lanes: tuple[LaneView, ...]
    free_pages: int
    total_pages: int
    limits: Limits
    cost: CostModel = field(eq=False)


@frozen(kw_only=True)
class PlannedWork:
    """One forward on one lane.

    Attributes:
        lane: The name of an idle lane.
        items: (request id, tokens to compute) in order: exactly 1 for a decode, at most the remaining prefill else;
            naming a waiting id admits it.
    """

    lane: str
    items: tuple[tuple[str, int], ...]


@frozen(kw_only=True)
class Plan:
    """What the engine should do now.

    Attributes:
        works: Works of one lane run one after another in this order (serial: decode, then prefill), those of
            different lanes at the same time; a request stands in one of them only.
        preempt: Requests to put back into the queue before any work, their pages freed, their tokens recomputed later.
        wake_at: When to ask again although nothing changed; None when only a change matters. A plan without works
            and preemptions while nothing is in flight must wake within a tenth of a second.
    """

    works: tuple[PlannedWork, ...] = ()
    preempt: tuple[str, ...] = ()
    wake_at: float | None = None


@frozen(kw_only=True)
class StepFeedback:
    """What a finished work took.

    Attributes:
        lane: Where it ran.
        ms: Its measured milliseconds.
        prefill_tokens: Prompt tokens it computed.
        decode_rows: Requests that decoded in it.
        context: Context tokens its attention read.
        out_of_memory: It failed for lack of memory.
        preempted: Requests preempted since the last feedback.
    """

    lane: str
    ms: float
    prefill_tokens: int
    decode_rows: int
    context: int
    out_of_memory: bool = False
    preempted: tuple[str, ...] = ()


class SchedulingPolicy(Protocol):
    """A pure planner: the same view and feedback history give the same plan; core validates and executes it.

    `deepinfer_core.plugin_api.PlanBuilder` keeps the rules of a plan (pages, budgets, turns, preemption) for an author.
    """

    def plan(self, view: EngineView) -> Plan:
        """Return what to do now. Called whenever a lane is idle and something can be done."""
        ...

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from a finished work."""
        ...


@frozen(kw_only=True)
class LaneSpec:
    """A lane that a policy wants: CUDA streams with a higher priority are served first."""

    name: str
    priority: int = 0


@frozen(kw_only=True)
class SchedulingPolicySpec:
    """A policy by name.

    Attributes:
        name: What ``[scheduler] policy`` selects.
        description: One line for listings.
        lanes: Its lanes; one for all but overlapping policies.
        options: ``"module:attribute"`` of an attrs class that ``[scheduler.options]`` fills; None for none.
        stability: ``"experimental"`` runs only when the config names it.
        factory: ``"module:attribute"`` called with the options object (or nothing); returns a `SchedulingPolicy`.
    """

    name: str
    description: str
    lanes: tuple[LaneSpec, ...]
    factory: str
    options: str | None = None
    stability: Stability = "stable"
