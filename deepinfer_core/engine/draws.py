"""From a work's logits to the draws of its requests; what one row's memory needs never costs another its token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from deepinfer_core.engine.batch import Item, Work
from deepinfer_core.engine.metrics import EngineMetrics
from deepinfer_core.engine.outputs import TokenScore
from deepinfer_core.engine.request import Request
from deepinfer_core.engine.sampler import Sampled, Sampler

OnOutOfMemory = Callable[[Request, BaseException], None]


class Pick(NamedTuple):
    """A request that gets a token, and the row of logits it is drawn from."""

    request: Request
    row: int


def picks(work: Work, going_on: Sequence[Item]) -> list[Pick]:
    """Return a pick for each of the items, all of them in the work, whose request has computed all that it has."""
    return [
        Pick(item.request, end - 1)
        for item, end in _ends(work, going_on)
        if item.last and item.sequence.length == len(item.request.tokens)  # else it has just been put off
    ]


def draw(
    sampler: Sampler,
    logits: torch.Tensor,
    wanted: Sequence[Pick],
    metrics: EngineMetrics,
    on_out_of_memory: OnOutOfMemory,
) -> Iterator[tuple[Request, list[Sampled]]]:
    """Yield each pick's request with its draws; halves the batch where memory is short, down to one request alone."""
    if not wanted:
        return
    try:
        drawn = _draw(sampler, logits, wanted)
    except torch.OutOfMemoryError as error:
        if len(wanted) == 1:
            on_out_of_memory(wanted[0].request, error)
            return
        metrics.out_of_memory_total += 1
        middle = len(wanted) // 2
        yield from draw(sampler, logits, wanted[:middle], metrics, on_out_of_memory)
        yield from draw(sampler, logits, wanted[middle:], metrics, on_out_of_memory)
        return
    start = 0
    for pick in wanted:
        end = start + 1 + len(pick.request.siblings)
        yield pick.request, drawn[start:end]
        start = end


def _draw(sampler: Sampler, logits: torch.Tensor, wanted: Sequence[Pick]) -> list[Sampled]:
    states, rows = [], []
    for request, row in wanted:
        states.append(request.sampler)
        rows.append(row)
        for sibling in request.siblings:
            states.append(sibling.sampler)
            rows.append(row)
    if rows != list(range(logits.shape[0])):
        logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
    return sampler.sample(logits, states)


def score_prompts(sampler: Sampler, work: Work, going_on: Sequence[Item], on_out_of_memory: OnOutOfMemory) -> None:
    """Give the prompts that asked for it the log probabilities of the tokens that this work has the logits for."""
    if not any(item.request.scores_prompt for item in going_on):
        return
    for item, end in _ends(work, going_on):
        if item.request.scores_prompt:
            try:
                _score_prompt(sampler, work, item, end - item.logits)
            except torch.OutOfMemoryError as error:
                on_out_of_memory(item.request, error)


def _score_prompt(sampler: Sampler, work: Work, item: Item, row: int) -> None:
    assert work.logits is not None
    request, scores = item.request, item.request.handle.prompt_scores
    if not scores:
        scores.append(None)
    # The logits at position p speak of token p + 1; after a preemption some are known already.
    first = max(item.start, len(scores) - 1)
    last = min(item.start + item.tokens, request.prompt_len - 1)
    logits = work.logits[row + first - item.start : row + last - item.start]
    following = request.tokens[first + 1 : last + 1]
    for sampled in sampler.prompt_logprobs(logits, following, request.params.prompt_logprobs or 0):
        assert sampled.token is not None
        assert sampled.logprob is not None
        scores.append(TokenScore(token=sampled.token, logprob=sampled.logprob, top=sampled.top))
    request.scores_prompt = len(scores) < request.prompt_len


def _ends(work: Work, going_on: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    """Yield the items that go on, with the row behind their last one."""
    kept = {id(item) for item in going_on} if len(going_on) < len(work.items) else None
    end = 0
    for item in work.items:
        end += item.logits
        if kept is None or id(item) in kept:
            yield item, end
