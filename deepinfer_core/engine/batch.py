"""Works: the requests of one forward, and the tensors that it needs. Building them launches nothing on a lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

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


class Item(NamedTuple):
    """One request's part of a work.

    Attributes:
        request: Whose tokens.
        sequence: Its pages.
        start: Position of the first token.
        tokens: How many.
        logits: The logits that are needed: of the last ``logits`` tokens.
        decodes: The request decodes; False while it prefills.
        last: A token is sampled from it: with it the request has computed all that it has.
    """

    request: Request
    sequence: KVSequence
    start: int
    tokens: int
    logits: int
    decodes: bool
    last: bool

    @classmethod
    def of(cls, request: Request, count: int) -> Item:
        """Take the next ``count`` tokens of an admitted request."""
        sequence = request.seq
        assert sequence is not None
        start = sequence.length
        last = start + count == len(request.tokens)
        logits = count if request.scores_prompt else int(last)
        return cls(request, sequence, start, count, logits, request.phase == "decode", last)


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
        tokens: Tokens that it computes.
        decode_rows: Requests that decode in it.
        context: Tokens that its attention reads.
        logits: Set by its launch: the items' logits in order.
        seconds: Set by its lane: its own time.
        events: What its lane recorded around it.
    """

    lane: str
    items: tuple[Item, ...]
    inputs: tuple[ForwardInputs, ...]
    kind: Kind
    tokens: int
    decode_rows: int
    context: int
    logits: torch.Tensor | None = None
    seconds: float = 0.0
    started: float = 0.0
    events: Any = field(default=None)

    def feedback(self, preempted: tuple[str, ...]) -> StepFeedback:
        """Return what cost model and policy learn from it."""
        return StepFeedback(
            lane=self.lane,
            ms=1e3 * self.seconds,
            prefill_tokens=self.tokens - self.decode_rows,
            decode_rows=self.decode_rows,
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
    tokens, decode_rows, context = 0, 0, 0
    for item in items:
        tokens += item.tokens
        decode_rows += item.decodes
        context += item.start + item.tokens
    kind: Kind = "prefill" if not decode_rows else "decode" if decode_rows == len(items) else "mixed"
    parts = [items] if row_tile is None else [(tile,) for item in items for tile in _tiles(item, row_tile)]
    inputs = tuple([_inputs(part, kv) for part in parts])
    return Work(lane, tuple(items), inputs, kind, tokens, decode_rows, context)


def _tiles(item: Item, rows: int) -> Iterator[Item]:
    """Cut an item into forwards of ``rows`` tokens; each gives the logits that are needed of its own tokens."""
    unread = item.tokens - item.logits
    for first in range(0, item.tokens, rows):
        count = min(rows, item.tokens - first)
        yield item._replace(start=item.start + first, tokens=count, logits=count - min(count, max(0, unread - first)))


def _inputs(items: Sequence[Item], kv: KVCache) -> ForwardInputs:
    tokens: list[int] = []
    rows: list[int] = []
    for request, _, start, count, logits, _, _ in items:
        if count == 1:
            tokens.append(request.tokens[start])
        else:
            tokens += request.tokens[start : start + count]
        if logits == 1:
            rows.append(len(tokens) - 1)
        else:
            rows += range(len(tokens) - logits, len(tokens))
    return ForwardInputs(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=kv.device),
        batch=kv.batch_at([(item.sequence, item.start, item.tokens) for item in items]),
        logit_rows=torch.tensor(rows, dtype=torch.int64, device=kv.device),
    )
