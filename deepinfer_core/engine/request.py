"""One choice of a request as the scheduler keeps it, and the queues it moves through. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from attrs import define, field

from deepinfer_core.engine.detokenize import TextStream
from deepinfer_core.engine.metrics import RequestMetrics
from deepinfer_core.engine.outputs import RequestHandle, TokenScore
from deepinfer_core.engine.sampler_state import SamplerState
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.kvcache.sequence import KVSequence
from deepinfer_core.plugin_api import Phase, RequestView, Slo
from deepinfer_core.sampling import SamplingParams


@define(eq=False, kw_only=True)
class Request:
    """One choice: its tokens, its share of the cache, where it stands.

    A request always computes ``tokens[computed:]``. Its phase is ``decode`` once one token is left to compute in each
    step; a preempted one starts over with everything it has, prompt and generated tokens alike.

    Attributes:
        id: Names it in plans: the handle's id, with ``/index`` for the further choices of ``n > 1``.
        handle: Where outputs go.
        index: Which choice it is.
        params: How to sample and when to stop.
        tokens: The prompt, then what was generated.
        prompt_len: Length of the prompt.
        max_tokens: Most tokens to generate, resolved against the limits.
        sampler: Its seed, draws and counts.
        text: Turns its tokens into text and finds stop strings.
        stop_token: The end token that ended it.
        metrics: Its times.
        phase: Where it stands.
        seq: Its pages; None while it waits.
        target: Tokens to compute before it decodes; fixed at admission.
        siblings: The other choices of an ``n > 1`` request; they start when the prompt is computed.
        scores_prompt: Log probabilities of its prompt are still owed: it needs the logits of every position.
        scores: Log probabilities of generated tokens, when asked for.
        in_flight: A launched work of it has not finished.
        aborted: It ends as soon as nothing of it is in flight.
        healthy: The logits of all that its pages hold were seen and were finite.
        out_of_memory: How often in a row it was put off for lack of memory.
    """

    id: str
    handle: RequestHandle
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    sampler: SamplerState
    text: TextStream
    metrics: RequestMetrics
    index: int = 0
    deadline: float | None = None
    slo: Slo = field(factory=Slo)
    tags: tuple[str, ...] = ()
    salt: Hashable = None
    phase: Phase = "waiting"
    seq: KVSequence | None = None
    target: int = field(init=False)
    scores_prompt: bool = field(init=False)
    stop_token: int | None = None
    siblings: list[Request] = field(factory=list)
    scores: list[TokenScore] = field(factory=list)
    in_flight: bool = False
    aborted: bool = False
    healthy: bool = False
    out_of_memory: int = 0
    last_planned_at: float | None = None
    _waiting_view: RequestView | None = None

    def __attrs_post_init__(self) -> None:
        self.target = len(self.tokens)
        self.scores_prompt = self.params.prompt_logprobs is not None and self.index == 0

    @property
    def computed(self) -> int:
        """Tokens whose KV is stored."""
        return self.seq.length if self.seq else 0

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def wait(self) -> None:
        """Stand in the queue, with all tokens to compute again."""
        self.phase, self.seq, self.healthy, self.in_flight = "waiting", None, False, False
        self.target = len(self.tokens)
        self._waiting_view = None

    def view(self, kv: KVCache) -> RequestView:
        """Return it as a policy sees it. A waiting request changes nothing but its place, so its view is kept."""
        if self._waiting_view is not None and self.phase == "waiting":
            return self._waiting_view
        times, seq = self.metrics.token_times, self.seq
        view = RequestView(
            id=self.id,
            phase=self.phase,
            arrival=self.metrics.submitted,
            prompt_tokens=self.target,
            max_tokens=self.max_tokens,
            deadline=self.deadline,
            priority=self.params.priority,
            cached_tokens=seq.cached if seq else 0,
            computed=seq.length if seq else 0,
            generated=len(self.tokens) - self.prompt_len,
            pages=len(seq.pages) if seq else 0,
            shared_pages=kv.shared_pages(seq) if seq else 0,
            in_flight=self.in_flight,
            last_planned_at=self.last_planned_at,
            first_token_at=times[0] if times else None,
            last_token_at=times[-1] if times else None,
            slo=self.slo,
            tags=self.tags,
        )
        self._waiting_view = view if self.phase == "waiting" else None
        return view


class Queues:
    """All living requests by phase; a request moves in O(1), but for one that goes back to the head of the line."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self.waiting) + self.admitted

    def __iter__(self) -> Iterator[Request]:
        for queue in (self.waiting, self.prefilling, self.decoding):
            yield from list(queue.values())

    @property
    def admitted(self) -> int:
        """Requests that hold pages."""
        return len(self.prefilling) + len(self.decoding)

    def find(self, request_id: str) -> Request | None:
        """Return the living request of this id."""
        return self.decoding.get(request_id) or self.prefilling.get(request_id) or self.waiting.get(request_id)

    def put(self, request: Request, phase: Phase) -> None:
        """Move a request, new or known, to a phase."""
        self.drop(request)
        request.phase = phase
        if phase == "waiting":
            first = next(iter(self.waiting.values()), None)
            self.waiting[request.id] = request
            if first is not None and request.metrics.submitted < first.metrics.submitted:
                self.waiting = {
                    r.id: r for r in sorted(self.waiting.values(), key=lambda r: (r.metrics.submitted, r.index))
                }
        elif phase == "prefill":
            self.prefilling[request.id] = request
        else:
            self.decoding[request.id] = request

    def drop(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        for queue in (self.waiting, self.prefilling, self.decoding):
            queue.pop(request.id, None)
