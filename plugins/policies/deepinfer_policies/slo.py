"""slo: one lane; the largest prefill chunk with which no objective is missed, and big chunks while nobody decodes."""

from __future__ import annotations

import math
from typing import Literal

from attrs import field, frozen

from deepinfer_core.plugin_api import EngineView, Plan, PlanBuilder, RequestView, StepFeedback
from deepinfer_core.plugin_api.planning import seniority, turn
from deepinfer_policies import options as check
from deepinfer_policies.chunks import largest_chunk


@frozen(kw_only=True)
class SloOptions:
    """Options of `SloPolicy`; a request's own objectives go before these. None is no objective.

    Attributes:
        ttft_ms: Submission to first token.
        tpot_p95_ms: Mean time of a request's further tokens, held for each request.
        max_itl_ms: Longest gap between two tokens of a request.
        style: ``"mixed"``: chunk and decode rows in one forward; ``"sliced"``: one after the other.
        margin: Part of each objective that is planned with; the rest is for what the cost model does not know.
    """

    ttft_ms: float | None = field(default=None, validator=check.milliseconds)
    tpot_p95_ms: float | None = field(default=50.0, validator=check.milliseconds)
    max_itl_ms: float | None = field(default=100.0, validator=check.milliseconds)
    style: Literal["mixed", "sliced"] = field(default="mixed", validator=check.one_of("mixed", "sliced"))
    margin: float = field(default=0.9, validator=check.share)


class SloPolicy:
    """Each decoding request has time to spend before its next token; the chunk is what fits the least of these times.

    A gap may be as long as max_itl_ms. What a request was faster than tpot_p95_ms so far is saved, and may be spent. A
    prompt that would miss ttft_ms at this pace is worth a tpot_p95_ms missed for a while, but never a max_itl_ms.
    """

    def __init__(self, options: SloOptions | None = None) -> None:
        self._options = options or SloOptions()

    def plan(self, view: EngineView) -> Plan:
        """Return the decode rows and the chunk that the objectives allow."""
        builder = PlanBuilder(view)
        for lane in builder.idle[:1]:
            rows = builder.decode_rows()
            names = {name for name, _ in rows}
            decoding = [r for r in view.decoding if r.id in names]
            most = view.limits.max_batched_tokens
            room = builder.room(rows, most) if self._options.style == "mixed" else 0
            prefills = builder.next_prefills(self._due)
            tokens = self._tokens(view, prefills, decoding, room or most, mixed=room > 0) if prefills else 0
            chunk = builder.prefill_chunk(tokens, self._due)
            if room:
                builder.add(lane, rows + chunk)
            else:  # also where rows alone fill a forward
                builder.add(lane, rows)
                builder.add(lane, chunk)
        return builder.build()

    def observe(self, feedback: StepFeedback) -> None:
        """Learn nothing: the engine fits the cost model that chunks are chosen by."""

    def _tokens(
        self, view: EngineView, prefills: list[RequestView], decoding: list[RequestView], room: int, *, mixed: bool
    ) -> int:
        """Return the tokens of the chunk, of which a forward has ``room``."""
        head = prefills[0]
        if not decoding:
            # Half of the first token's time, so that who comes in the meantime still has the other half.
            return largest_chunk(view, head, room, self._ttft_ms(head) / 2)
        beside = decoding if mixed else []
        before_ms = 0.0 if beside else view.cost.predict_ms(0, len(decoding), sum(r.start + 1 for r in decoding))
        longest = min(self._until_gap_ms(view, r) for r in decoding) - before_ms
        steady = min(longest, min(self._saved_ms(view, r) for r in decoding) - before_ms)
        tokens = largest_chunk(view, head, room, steady, beside)
        read = sum(r.start + 1 for r in beside) + head.start + tokens
        step_ms = before_ms + view.cost.predict_ms(tokens, len(beside), read)
        if steady < longest and self._late(view, prefills, tokens, step_ms):
            return largest_chunk(view, head, room, longest, beside)
        return tokens

    def _until_gap_ms(self, view: EngineView, request: RequestView) -> float:
        """Return how long the next token may take for the longest gap's sake."""
        limit = request.slo.max_itl_ms or self._options.max_itl_ms
        if limit is None or request.last_token_at is None:
            return math.inf
        return limit * self._options.margin - (view.now - request.last_token_at) * 1000

    def _saved_ms(self, view: EngineView, request: RequestView) -> float:
        """Return how long the next token may take for the mean to stay within its objective."""
        limit = request.slo.tpot_p95_ms or self._options.tpot_p95_ms
        if limit is None or request.first_token_at is None:
            return math.inf
        return limit * self._options.margin * request.generated - (view.now - request.first_token_at) * 1000

    def _late(self, view: EngineView, prefills: list[RequestView], tokens: int, step_ms: float) -> bool:
        """Whether some prompt misses its first token's time at ``tokens`` a step; each waits for those before it."""
        ahead = 0
        for request in prefills:
            ahead += request.remaining_prefill
            left_ms = self._ttft_ms(request) - (view.now - request.arrival) * 1000
            if request.generated == 0 and math.ceil(ahead / tokens) * step_ms > left_ms:
                return True
        return False

    def _ttft_ms(self, request: RequestView) -> float:
        limit = request.slo.ttft_ms or self._options.ttft_ms
        return math.inf if limit is None else limit * self._options.margin

    def _due(self, request: RequestView) -> tuple[float, str]:
        """Order prompts by when their first token is due; without such an objective, round-robin."""
        ttft_ms = self._ttft_ms(request)
        if math.isinf(ttft_ms):
            return turn(request)
        since, name = seniority(request)
        return since + ttft_ms / 1000, name
