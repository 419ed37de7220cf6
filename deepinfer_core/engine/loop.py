"""The plain decode loop of this release: prefill one request after another, then decode all of them together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

import torch
from attrs import define, field, frozen

from deepinfer_core.engine.metrics import RequestMetrics
from deepinfer_core.errors import CapacityError, ModelError, RequestError
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.kvcache.sequence import KVSequence
from deepinfer_core.plugin_api import AttentionBatch
from deepinfer_core.sampling import SamplingParams

SERVED = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens")
)
"""Fields of SamplingParams that this loop obeys; a request that sets another is refused by name."""


class Forward(Protocol):
    """A model's forward pass; `Decoder.forward` is one."""

    def __call__(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[Mapping[str, torch.Tensor]],
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Return float32 logits ``[rows, vocab]`` for some of the step's tokens."""
        ...


@frozen(kw_only=True)
class LoopLimits:
    """What the loop runs at once.

    Attributes:
        max_model_len: Longest context of one request, in tokens.
        prefill_chunk_tokens: Most prompt tokens of one step.
        max_requests: Most requests decoded together.
        vocab_size: Of the model.
        eos_ids: Tokens that end a generation.
    """

    max_model_len: int
    prefill_chunk_tokens: int
    max_requests: int
    vocab_size: int
    eos_ids: frozenset[int]


@define(eq=False, kw_only=True)
class Generation:
    """One request from its prompt to its end.

    Attributes:
        prompt: Its token ids.
        params: How to sample.
        max_tokens: Most tokens to generate, resolved against the model's length.
        tokens: What was generated so far, an end token included.
        finish_reason: ``"stop"`` or ``"length"``; None while it runs.
        metrics: Its times, in seconds of `time.perf_counter`.
    """

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    tokens: list[int] = field(factory=list)
    finish_reason: str | None = None
    metrics: RequestMetrics = field(factory=lambda: RequestMetrics(submitted=time.perf_counter()))
    seq: KVSequence | None = None
    rng: torch.Generator | None = None


class DecodeLoop:
    """Runs generations to their ends, as many together as the KV pages and `max_requests` allow."""

    def __init__(self, forward: Forward, cache: KVCache, limits: LoopLimits) -> None:
        self._forward = forward
        self._cache = cache
        self.limits = limits

    def accept(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Check a request against the model and the cache, before any work.

        Raises:
            RequestError: The prompt is empty, or a sampling field is not served here.
            CapacityError: Prompt and answer do not fit the model's length or the whole cache.
        """
        limits = self.limits
        refused = sorted(set(params.changed()) - SERVED)
        if refused:
            raise RequestError(
                f"{', '.join(refused)}: this release does not serve {'it' if len(refused) == 1 else 'them'} yet; "
                f"it serves {', '.join(sorted(SERVED))}"
            )
        params.check_for(limits.vocab_size)
        if not prompt:
            raise RequestError("the prompt is empty: a model needs at least one token to continue")
        bad = next((t for t in prompt if not 0 <= t < limits.vocab_size), None)
        if bad is not None:
            raise RequestError(f"the prompt holds token {bad}; the model's vocabulary has {limits.vocab_size}")
        room = limits.max_model_len - len(prompt)
        most = room if params.max_tokens is None else params.max_tokens
        if room < 1 or most > room:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens and {max(most, 1)} may be generated, but max_model_len is "
                f"{limits.max_model_len}; shorten the prompt, lower max_tokens, or raise [cache] max_model_len"
            )
        if params.min_tokens > most:
            raise RequestError(f"min_tokens = {params.min_tokens}: only {most} tokens may be generated")
        pages = self._cache.pages_for(len(prompt) + most)
        if pages > self._cache.total_pages:
            raise CapacityError(
                f"{len(prompt)} prompt and {most} generated tokens need {pages} KV pages, the cache has "
                f"{self._cache.total_pages}; lower max_tokens or raise [cache] memory"
            )
        return Generation(prompt=list(prompt), params=params, max_tokens=most)

    def run(self, generations: Sequence[Generation]) -> Generator[tuple[Generation, int]]:
        """Yield each generation's tokens as they come; every page is returned at the end, at an error, and on close."""
        waiting = deque(generations)
        running: list[Generation] = []
        try:
            while waiting or running:
                while waiting and self._fits(waiting[0], running):
                    request = waiting.popleft()
                    running.append(request)
                    yield request, self._prefill(request)
                    self._retire(running)
                if running:
                    tokens = [g.tokens[-1] for g in running]
                    logits = self._step([(g, 1) for g in running], tokens, list(range(len(running))))
                    accepted = [self._accept(g, row) for g, row in zip(running, logits, strict=True)]
                    yield from zip(list(running), accepted, strict=True)
                    self._retire(running)
        finally:
            for request in running:
                self._release(request)

    def score(self, tokens: Sequence[int]) -> Generator[torch.Tensor]:
        """Yield float32 logits ``[chunk, vocab]`` of every position, chunk after chunk.

        Raises:
            RequestError: There are no tokens, or one is outside the vocabulary.
            CapacityError: They are longer than the model allows.
        """
        request = self.accept(tokens, SamplingParams(max_tokens=1))
        request.seq = self._cache.open(reuse=False)
        try:
            for start in range(0, len(tokens), self.limits.prefill_chunk_tokens):
                chunk = list(tokens[start : start + self.limits.prefill_chunk_tokens])
                yield self._step([(request, len(chunk))], chunk, list(range(len(chunk))))
        finally:
            self._cache.free(request.seq)
            request.seq = None

    def _fits(self, request: Generation, running: Sequence[Generation]) -> bool:
        """Tell whether every running request and this one can reach their ends without taking each other's pages."""
        promised = sum(self._cache.pages_for(len(g.prompt) + g.max_tokens) for g in (*running, request))
        return len(running) < self.limits.max_requests and promised <= self._cache.total_pages

    def _prefill(self, request: Generation) -> int:
        request.metrics.admitted = time.perf_counter()
        request.seq = seq = self._cache.open(request.prompt)
        request.metrics.prompt_tokens, request.metrics.cached_tokens = len(request.prompt), seq.cached
        logits = torch.empty(0)
        while seq.length < len(request.prompt):
            chunk = request.prompt[seq.length : seq.length + self.limits.prefill_chunk_tokens]
            logits = self._step([(request, len(chunk))], chunk, [len(chunk) - 1])
        return self._accept(request, logits[0])

    def _step(self, items: Sequence[tuple[Generation, int]], tokens: list[int], rows: list[int]) -> torch.Tensor:
        cache = self._cache
        spans = [(g.seq, n) for g, n in items if g.seq is not None]
        for seq, n in spans:
            cache.extend(seq, n)
        device = cache.device
        with torch.inference_mode():
            logits = self._forward(
                torch.tensor(tokens, device=device),
                cache.batch(spans),
                cache.tensors,
                torch.tensor(rows, device=device),
            )
        for seq, n in spans:
            cache.commit(seq, n)
        if not bool(torch.isfinite(logits).all()):
            raise ModelError("the model's logits are not finite; try --dtype float32, or check the checkpoint")
        return logits

    def _accept(self, request: Generation, logits: torch.Tensor) -> int:
        params = request.params
        ends = self.limits.eos_ids | set(params.stop_token_ids) if not params.ignore_eos else set(params.stop_token_ids)
        if len(request.tokens) < params.min_tokens and ends:
            logits = logits.index_fill(0, torch.tensor(sorted(ends), device=logits.device), -torch.inf)
        token = _choose(logits, request)
        request.tokens.append(token)
        request.metrics.token_times.append(time.perf_counter())
        if token in ends:
            request.finish_reason = "stop"
        elif len(request.tokens) >= request.max_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None:
            request.metrics.finished = request.metrics.token_times[-1]
        return token

    def _retire(self, running: list[Generation]) -> None:
        for request in [g for g in running if g.finish_reason is not None]:
            running.remove(request)
            assert request.seq is not None
            self._cache.remember(request.seq, request.prompt + request.tokens)
            self._release(request)

    def _release(self, request: Generation) -> None:
        if request.seq is not None:
            self._cache.free(request.seq)
            request.seq = None


def _choose(logits: torch.Tensor, request: Generation) -> int:
    """Return the next token: the most likely one, or one drawn after temperature, top-k, min-p and top-p."""
    params = request.params
    if params.greedy:
        return int(logits.argmax())
    if request.rng is None:
        request.rng = torch.Generator()
        if params.seed is None:
            request.rng.seed()
        else:
            request.rng.manual_seed(params.seed)
    values, order = logits.cpu().sort(descending=True)
    if params.top_k:
        values, order = values[: params.top_k], order[: params.top_k]
    probs = ((values - values[0]) / params.temperature).softmax(0)
    if params.min_p:
        kept = int((probs >= params.min_p * probs[0]).sum())
        probs, order = probs[:kept] / probs[:kept].sum(), order[:kept]
    if params.top_p < 1:
        kept = int((probs.cumsum(0) - probs < params.top_p).sum())
        probs, order = probs[:kept], order[:kept]
    return int(order[torch.multinomial(probs, 1, generator=request.rng)])
