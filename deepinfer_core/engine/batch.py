"""Works: the requests of one forward, and the tensors that it needs. Building them launches nothing on a lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from attrs import define, field, frozen

from deepinfer_core.engine.request import Request
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.kvcache.sequence import KVSequence
from deepinfer_core.plugin_api import AttentionBatch, StepFeedback

Kind = Literal["prefill", "decode", "mixed"]


class Model(Protocol):
    """What runs: `deepinfer_core.model.decoder.Decoder`, or a stub."""

    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[dict[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return float32 logits ``[rows, vocab]`` of the tokens that ``logit_rows`` names."""
        ...


@frozen
class Item:
    """One request's part of a work.

    Attributes:
        request: Whose tokens.
        start: Position of the first.
        count: How many.
        logits: The logits that are needed: of the last ``logits`` tokens.
    """

    request: Request
    start: int
    count: int
    logits: int

    @classmethod
    def of(cls, request: Request, count: int) -> Item:
        """Take the next ``count`` tokens of an admitted request."""
        ends_prompt = request.computed + count == request.target or request.phase == "decode"
        return cls(request, request.computed, count, count if request.scores_prompt else int(ends_prompt))

    @property
    def sequence(self) -> KVSequence:
        """The request's pages."""
        assert self.request.seq is not None
        return self.request.seq

    @property
    def last(self) -> bool:
        """True when a token is sampled from it: all that the request has is then computed."""
        return self.start + self.count == len(self.request.tokens)


@frozen
class ForwardInputs:
    """The arguments of one forward."""

    tokens: torch.Tensor
    batch: AttentionBatch
    logit_rows: torch.Tensor


@define(eq=False)
class Work:
    """One planned forward through its life: prepared, launched, joined, finished.

    Attributes:
        lane: Name of the lane it was planned for.
        items: Its requests.
        inputs: One forward, or one for each tile of rows under ``batch_invariant``.
        kind: Whether it prefills, decodes or does both.
        logits: Set by its launch: the items' logits in order.
        seconds: Set by its lane: its own time.
        events: What its lane recorded around it.
    """

    lane: str
    items: tuple[Item, ...]
    inputs: tuple[ForwardInputs, ...]
    kind: Kind
    logits: torch.Tensor | None = None
    seconds: float = 0.0
    started: float = 0.0
    events: Any = field(default=None)

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return sum(item.count for item in self.items)

    @property
    def decode_rows(self) -> int:
        """Requests that decode in it."""
        return sum(item.request.phase == "decode" for item in self.items)

    @property
    def context(self) -> int:
        """Tokens that its attention reads."""
        return sum(item.start + item.count for item in self.items)

    def feedback(self, preempted: tuple[str, ...]) -> StepFeedback:
        """Return what cost model and policy learn from it; ask before its requests change phase."""
        decode = self.decode_rows
        return StepFeedback(
            lane=self.lane,
            ms=1e3 * self.seconds,
            prefill_tokens=self.tokens - decode,
            decode_rows=decode,
            context=self.context,
            preempted=preempted,
        )

    def run(self, model: Model, kv: KVCache) -> torch.Tensor:
        """Run the forward on the current stream; touches no request."""
        parts = [model.forward(part.tokens, part.batch, kv.tensors, part.logit_rows) for part in self.inputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def build_work(lane: str, items: Sequence[Item], kv: KVCache, row_tile: int | None) -> Work:
    """Build a work's inputs; the pages of its tokens must have been taken.

    Args:
        lane: The lane that it was planned for.
        items: Its requests.
        kv: Their pages.
        row_tile: None for one forward over everything. A number for forwards of exactly so many rows of one request,
            the last one of a request excepted: with 1, what a token's logits are never depends on other tokens' rows.
    """
    kinds = {"decode" if item.request.phase == "decode" else "prefill" for item in items}
    kind: Kind = "mixed" if len(kinds) == 2 else ("decode" if "decode" in kinds else "prefill")
    inputs: tuple[ForwardInputs, ...]
    if row_tile is None:
        inputs = (_inputs([(item, 0, item.count) for item in items], kv),)
    else:
        inputs = tuple(
            _inputs([(item, first, min(row_tile, item.count - first))], kv)
            for item in items
            for first in range(0, item.count, row_tile)
        )
    return Work(lane, tuple(items), inputs, kind)


def _inputs(spans: Sequence[tuple[Item, int, int]], kv: KVCache) -> ForwardInputs:
    tokens: list[int] = []
    rows: list[int] = []
    for item, first, count in spans:
        start = item.start + first
        unread = item.count - item.logits  # tokens of the item whose logits nobody needs
        rows.extend(range(len(tokens) + max(0, unread - first), len(tokens) + count))
        tokens.extend(item.request.tokens[start : start + count])
    return ForwardInputs(
        tokens=torch.tensor(tokens, dtype=torch.int64).to(kv.device),
        batch=kv.batch_at([(item.sequence, item.start + first, count) for item, first, count in spans]),
        logit_rows=torch.tensor(rows, dtype=torch.int64).to(kv.device),
    )
