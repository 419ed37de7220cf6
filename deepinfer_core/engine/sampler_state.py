"""What sampling remembers of one answer: its seed, its position, and the counts that penalties need."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_core.sampling import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at ``position``: a hash of both, so it needs no generator.

    Neighbours in the batch, preemption and retries cannot change it; 53 random bits.
    """
    return (_mix(_mix(seed & _MASK) ^ (position * _GOLDEN & _MASK)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """Return the finalizer of SplitMix64 for x: every input bit flips every output bit with probability one half."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class SamplerState:
    """One answer's part of sampling. Made by `Sampler.open`, changed by `accept` alone.

    Attributes:
        params: What was asked.
        position: Tokens accepted so far; the next draw's number.
        banned: Ids that may not come before ``min_tokens``.
        constraint: What says which tokens may come next; None for all.
    """

    __slots__ = (
        "_counts",
        "_generated",
        "_prompt_ids",
        "_seed",
        "_seen",
        "banned",
        "constraint",
        "params",
        "penalized",
        "position",
    )

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], end_ids: frozenset[int], seed: int) -> None:
        self.params = params
        self.position = 0
        self.penalized = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
        self.banned = sorted(ends) if params.min_tokens else []
        self.constraint = params.constraint() if params.constraint is not None else None
        self._seed = seed
        self._prompt_ids = prompt_ids
        self._generated: list[int] = []
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None

    @classmethod
    def from_params(cls, params: SamplingParams, prompt_ids: Sequence[int], end_ids: frozenset[int]) -> SamplerState:
        """Start an answer; without a seed in ``params`` it gets a fresh one, kept for its whole life."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return cls(params, prompt_ids, end_ids, seed)

    @property
    def edited(self) -> bool:
        """True when logits are changed before the choice."""
        return self.penalized or bool(self.params.logit_bias) or bool(self.banned) or self.constraint is not None

    def fork(self, choice: int) -> SamplerState:
        """Return a fresh state for another answer to the same prompt; choice 0 draws what the original draws."""
        seed = self._seed if choice == 0 else _mix(self._seed & _MASK) ^ _mix(choice)
        other = SamplerState(self.params, self._prompt_ids, frozenset(), seed)
        other.banned = self.banned
        return other

    def draw(self) -> float:
        """Return the number that draws the next token."""
        return uniform(self._seed, self.position)

    def accept(self, token: int) -> None:
        """Count ``token`` as generated. A token that was sampled and dropped is drawn again, the same."""
        self.position += 1
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.penalized:
            self._generated.append(token)
            if self._counts is not None and self._seen is not None:
                self._counts[token] += 1
                self._seen[token] = True

    def tables(self, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return how often each id was generated (int32 [vocab]) and which stand in prompt or answer (bool [vocab])."""
        if self._counts is None or self._seen is None or self._counts.device != device:
            generated = torch.tensor(self._generated, dtype=torch.int64, device=device)
            prompt = torch.tensor(list(self._prompt_ids), dtype=torch.int64, device=device)
            self._counts = torch.zeros(vocab, dtype=torch.int32, device=device)
            self._counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
            self._seen = self._counts > 0
            self._seen[prompt] = True
        return self._counts, self._seen

    def release(self) -> None:
        """Give the tables back, on preemption; they are made anew when the request runs again."""
        self._counts = self._seen = None
