"""Perplexity over a fixed public-domain text; how logits are made is the caller's business."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TEXT_NAME = "public_domain.txt"
WINDOW = 512

Score = Callable[[Sequence[int]], "torch.Tensor"]
"""Token ids ``[T]`` to the log probability of each but the first ``[T - 1]``, from an empty context."""


def public_domain_text() -> str:
    """Return the text that ships with the package, all of it in the public domain.

    Ordinary prose: the introduction of Darwin's Origin of Species (1859), the opening of Austen's Pride and Prejudice
    (1813) and of Thoreau's Walden (1854). Documents that models have learnt by heart (the Gettysburg Address, the
    Declaration of Independence) measure how much of a recitation survives, which is another and harsher thing: see
    ``scripts/perplexity_by_passage.py`` and ``docs/quantization.md`` for both.
    """
    return resources.files("deepinfer_core.quantize").joinpath(TEXT_NAME).read_text(encoding="utf-8")


def perplexity(score: Score, tokens: Sequence[int], *, window: int = WINDOW) -> tuple[float, int]:
    """Return ``exp`` of the mean negative log likelihood of every token but each window's first, and their number.

    Args:
        score: Log probabilities of one window.
        tokens: Ids of the text.
        window: Tokens scored together; windows do not overlap.

    Returns:
        Perplexity (NaN logits give NaN, never a good number) and scored tokens.
    """
    total, count = 0.0, 0
    for begin in range(0, len(tokens), window):
        part = tokens[begin : begin + window]
        if len(part) < 2:
            continue
        losses = score(part)
        assert losses.shape == (len(part) - 1,), f"{len(part)} tokens were scored as {tuple(losses.shape)}"
        total -= float(losses.double().sum())
        count += len(part) - 1
    assert count, f"perplexity needs at least 2 tokens, got {len(tokens)}"
    return math.exp(min(total / count, 700.0)), count
