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
"""Token ids ``[T]`` to logits ``[T, vocab]``: row t predicts token t + 1."""


def public_domain_text() -> str:
    """Return the text that ships with the package, all of it in the public domain.

    The Gettysburg Address (1863), the beginnings of the Declaration of Independence (1776) and of the Constitution of
    the United States (1787), and four amendments (1791).
    """
    return resources.files("deepinfer_core.quantize").joinpath(TEXT_NAME).read_text(encoding="utf-8")


def perplexity(score: Score, tokens: Sequence[int], *, window: int = WINDOW) -> float:
    """Return ``exp`` of the mean negative log likelihood of every token but each window's first.

    Args:
        score: Logits of one window, from an empty context.
        tokens: Ids of the text.
        window: Tokens scored together; windows do not overlap.

    Returns:
        The perplexity; NaN logits give NaN, never a good number.
    """
    if len(tokens) < 2:
        raise ValueError(f"perplexity needs at least 2 tokens, got {len(tokens)}")
    import torch

    total, count = 0.0, 0
    for begin in range(0, len(tokens), window):
        part = list(tokens[begin : begin + window])
        if len(part) < 2:
            continue
        logits = score(part)
        losses = torch.nn.functional.cross_entropy(
            logits[: len(part) - 1].float(), torch.tensor(part[1:], device=logits.device), reduction="sum"
        )
        total += float(losses)
        count += len(part) - 1
    return math.exp(total / count)
