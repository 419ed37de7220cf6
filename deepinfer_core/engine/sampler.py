"""Choosing tokens for a batch in tensor operations: each row's choice depends on that row alone, and one sync a step.

A row's logits pass through, in this order: repetition penalty (once for each distinct id of prompt and answer),
presence and frequency penalties (generated ids alone), bias, the ban of end tokens before min_tokens, what a constraint
does not allow; then temperature, top-k, top-p of what is left, min-p; then one uniform number against the cumulative
probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.engine.sampler_state import SamplerState
from deepinfer_core.sampling import SamplingParams

NUCLEUS_TRY = 1024
"""Most likely tokens looked at before the whole vocabulary is sorted for top-p; on a CPU alone, for the look costs a
sync. With 64 rows of 150,000 logits a full sort takes seconds there."""

REPORT_ELEMENTS = 1 << 22
"""Logits of a prompt that are turned to float64 log probabilities at once: 32 MiB."""


class Sampled(NamedTuple):
    """One row's choice.

    Attributes:
        token: The chosen id; None when the row has a NaN, an infinity, or nothing left to choose from.
        logprob: Its natural logarithm of probability under the model's own logits; None when not asked for.
        top: The asked number of (id, logprob), most likely first, ties by id.
    """

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the next token of each row of a batch.

    Attributes:
        end_ids: The model's end tokens, banned before ``min_tokens``.
    """

    def __init__(self, end_ids: Iterable[int] = ()) -> None:
        self.end_ids = frozenset(end_ids)
        self._batch: _Batch | None = None

    def open(self, params: SamplingParams, prompt_ids: Sequence[int]) -> SamplerState:
        """Start an answer to ``prompt_ids``; `SamplingParams.check_for` has passed."""
        return SamplerState.from_params(params, prompt_ids, self.end_ids)

    def sample(self, logits: Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
        """Choose one token a row. States stay as they are until `SamplerState.accept`.

        Args:
            logits: ``[rows, vocab]``, any float dtype and device; not changed.
            states: One a row.

        Returns:
            One `Sampled` a row, in order.
        """
        assert logits.shape[0] == len(states), (logits.shape, len(states))
        if not states:
            return []
        batch = self._batch
        if batch is None or not batch.serves(states, logits.device):
            batch = self._batch = _Batch(states, logits.device)
        raw = logits = logits.float()
        if batch.edited:
            logits = _edit(logits, batch)
        best, tokens = logits.max(dim=-1)
        for group in batch.groups:
            tokens[group.rows] = group.choose(logits[group.rows], best[group.rows])
        if not batch.reported and tokens.device.type == "cpu":  # reading twice is cheaper here than one more operation
            return [Sampled(t if isfinite(b) else None) for t, b in zip(tokens.tolist(), best.tolist(), strict=True)]
        tokens = tokens.masked_fill(~best.isfinite(), -1)
        if not batch.reported:
            return [Sampled(token if token >= 0 else None) for token in tokens.tolist()]
        rows = batch.reported_rows
        chosen = tokens.clamp(min=0)[rows]
        report = _report(raw[rows], chosen, max(s.params.logprobs or 0 for _, s in batch.reported))
        packed = torch.cat((tokens.double(), report.flatten())).tolist()
        sampled = [Sampled(int(token) if token >= 0 else None) for token in packed[: len(states)]]
        width = report.shape[1]
        for place, (row, state) in enumerate(batch.reported):
            if sampled[row].token is not None:
                start = len(states) + place * width
                values = packed[start : start + width]
                sampled[row] = _with_report(int(packed[row]), values, state.params.logprobs or 0)
        return sampled

    def prompt_logprobs(self, logits: Tensor, next_tokens: Sequence[int], top: int) -> list[Sampled]:
        """Report the tokens that follow given positions of a prompt, and the ``top`` most likely ones there.

        Args:
            logits: ``[positions, vocab]``.
            next_tokens: The token after each position.
            top: Alternatives to report; 0 for none.
        """
        chosen = torch.tensor(list(next_tokens), dtype=torch.int64, device=logits.device)
        at_once = max(1, REPORT_ELEMENTS // logits.shape[1])
        parts = zip(logits.split(at_once), chosen.split(at_once), strict=True)
        rows = torch.cat([_report(part.float(), ids, top) for part, ids in parts]).tolist() if next_tokens else []
        return [_with_report(token, row, top) for token, row in zip(next_tokens, rows, strict=True)]


class _Group:
    """Rows that draw: with an order (top-k, top-p) or without."""

    def __init__(self, members: list[tuple[int, SamplerState]], ordered: bool, device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        params = [state.params for _, state in members]
        self.rows = torch.tensor([row for row, _ in members], dtype=torch.int64, device=device)
        self.states = [state for _, state in members]
        self.ordered = ordered
        self.temperature = column([p.temperature for p in params]).float()
        self.min_p = column([p.min_p for p in params]).float() if any(p.min_p for p in params) else None
        self.top_p = column([p.top_p if p.top_p < 1 else 2.0 for p in params])  # 2: rounding must not drop a tail
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device)[:, None]
        self.largest_k = max(p.top_k for p in params)
        self.all_k = all(p.top_k for p in params)

    def choose(self, logits: Tensor, best: Tensor) -> Tensor:
        """Return int64 [rows]. Weights are relative to the best token's, so no temperature overflows."""
        draws = [state.draw() for state in self.states]
        draw = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None]
        weights = ((logits - best[:, None]) / self.temperature).exp()
        if self.ordered:
            return self._choose_ordered(logits, weights, draw)
        if self.min_p is not None:
            weights = weights.masked_fill(weights < self.min_p, 0)
        total = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(total, draw * total[:, -1:])[:, 0]

    def _choose_ordered(self, logits: Tensor, weights: Tensor, draw: Tensor) -> Tensor:
        vocab = logits.shape[1]
        everything = weights.sum(-1, keepdim=True, dtype=torch.float64)
        width = min(self.largest_k, vocab) if self.all_k else vocab
        if not self.all_k and logits.device.type == "cpu" and vocab > NUCLEUS_TRY:
            width = self._width_of_nuclei(logits, weights, everything)
        ids = _most_likely(logits, width)
        ranked = weights.gather(1, ids)
        total = ranked.cumsum(-1, dtype=torch.float64)
        kept_by_k = torch.where(self.top_k > 0, self.top_k, vocab).clamp(max=width)
        mass = torch.where(self.top_k > 0, total.gather(1, kept_by_k - 1), everything)
        kept = torch.arange(width, device=logits.device) < kept_by_k
        kept &= total - ranked < self.top_p * mass
        if self.min_p is not None:
            kept &= ranked >= self.min_p
        last = kept.sum(-1, keepdim=True).clamp(min=1) - 1  # each rule keeps a head of the ranking, so all do
        rank = _first_above(total, draw * total.gather(1, last)).minimum(last)
        return ids.gather(1, rank)[:, 0]

    def _width_of_nuclei(self, logits: Tensor, weights: Tensor, everything: Tensor) -> int:
        vocab = logits.shape[1]
        width = max(NUCLEUS_TRY, self.largest_k)
        if width >= vocab:
            return vocab
        head = weights.gather(1, _most_likely(logits, width)).sum(-1, keepdim=True, dtype=torch.float64)
        enough = (head > self.top_p * everything * (1 + 1e-9)) | (self.top_k > 0)
        return width if bool(enough.all()) else vocab


class _Batch:
    """What does not change from step to step while the same states come in the same order."""

    def __init__(self, states: Sequence[SamplerState], device: torch.device) -> None:
        rows = list(enumerate(states))
        drawn = [(i, s) for i, s in rows if not s.params.greedy]
        ordered = [(i, s) for i, s in drawn if s.params.top_k or s.params.top_p < 1]
        plain = [(i, s) for i, s in drawn if not (s.params.top_k or s.params.top_p < 1)]
        self.states = list(states)
        self.device = device
        self.groups = [_Group(g, g is ordered, device) for g in (plain, ordered) if g]
        self.edited = [(i, s) for i, s in rows if s.edited]
        self.penalized = [(i, s) for i, s in rows if s.penalized]
        self.reported = [(i, s) for i, s in rows if s.params.logprobs is not None]
        self.reported_rows = torch.tensor([i for i, _ in self.reported], dtype=torch.int64, device=device)
        self.penalized_rows = torch.tensor([i for i, _ in self.penalized], dtype=torch.int64, device=device)
        penalties = [
            (s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty)
            for _, s in self.penalized
        ]
        self.penalties = torch.tensor(penalties, dtype=torch.float32, device=device).reshape(-1, 3)
        self.bias = [_bias(i, s.params.logit_bias, device) for i, s in rows if s.params.logit_bias]
        self.constrained = [(i, s.constraint) for i, s in rows if s.constraint is not None]
        self.bans = [(i, s, torch.tensor(s.banned, device=device)) for i, s in rows if s.banned]

    def serves(self, states: Sequence[SamplerState], device: torch.device) -> bool:
        return (
            device == self.device
            and len(states) == len(self.states)
            and all(a is b for a, b in zip(states, self.states, strict=True))
        )


def _bias(row: int, bias: Mapping[int, float], device: torch.device) -> tuple[int, Tensor, Tensor]:
    amounts = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
    return row, torch.tensor(list(bias), dtype=torch.int64, device=device), amounts


def _edit(logits: Tensor, batch: _Batch) -> Tensor:
    """Return a copy of the logits with penalties, biases and bans applied."""
    logits = logits.clone()
    if batch.penalized:
        tables = [state.tables(logits.shape[1], logits.device) for _, state in batch.penalized]
        counts, seen = torch.stack([c for c, _ in tables]), torch.stack([s for _, s in tables])
        repetition, presence, frequency = batch.penalties[:, :, None].unbind(1)
        part = logits[batch.penalized_rows]
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part = part - frequency * counts - presence * (counts > 0)
        logits[batch.penalized_rows] = part
    for row, ids, amounts in batch.bias:
        logits[row, ids] += amounts
    for row, state, ids in batch.bans:
        if state.position < state.params.min_tokens:
            logits[row, ids] = float("-inf")
    for row, constraint in batch.constrained:
        logits[row].masked_fill_(~constraint.allowed(logits.shape[1]).to(logits.device), float("-inf"))
    return logits


def _most_likely(logits: Tensor, width: int) -> Tensor:
    """Return ids int64 [rows, width], most likely first, ties by id.

    The key joins the order of the float32 bits with the id, so that equal logits (common after FP16) have one order,
    whatever width the rest of the batch asks for.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of both
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    lowest = 0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device)
    return 0xFFFFFFFF - (((order << 32) | lowest).topk(width).values & 0xFFFFFFFF)


def _first_above(total: Tensor, bound: Tensor) -> Tensor:
    """Return the first place of each row where the cumulative weight passes the bound: never one without weight."""
    return torch.searchsorted(total, bound, right=True).clamp(max=total.shape[1] - 1)


def _report(logits: Tensor, chosen: Tensor, top: int) -> Tensor:
    """Return float64 [rows, 1 + 2 * top]: the chosen token's logprob, then ids, then logprobs of the most likely."""
    logprobs = logits.double().log_softmax(-1)
    ids = _most_likely(logits, min(top, logits.shape[1]))
    return torch.cat((logprobs.gather(1, chosen[:, None]), ids.double(), logprobs.gather(1, ids)), dim=1)


def _with_report(token: int, values: Sequence[float], top: int) -> Sampled:
    half = len(values) // 2
    ids, logprobs = values[1 : 1 + half], values[1 + half :]
    return Sampled(token, values[0], tuple((int(i), p) for i, p in zip(ids[:top], logprobs[:top], strict=True)))
