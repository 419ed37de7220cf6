"""Tensors with guards around them, so that a write outside of its own is seen."""

from __future__ import annotations

import math

import torch

GUARD = 256
"""Elements on each side; a guarded tensor begins at a multiple of 256 bytes, as an allocation of its own does."""

_MARK = 77


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a contiguous tensor full of ``fill``, and the buffer around it for `check_guards`."""
    size = math.prod(shape)
    buffer = torch.full((size + 2 * GUARD,), _MARK, dtype=dtype, device=device)
    inner = buffer[GUARD : GUARD + size]
    return inner.fill_(fill).view(shape), buffer


def check_guards(buffer: torch.Tensor, what: str) -> None:
    """Fail when something was written in front of or behind a guarded tensor."""
    whole = bool((buffer[:GUARD] == _MARK).all() and (buffer[-GUARD:] == _MARK).all())
    assert whole, f"{what} was written outside of its bounds"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes; unlike ``equal``, NaN is NaN and -0.0 is not 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Flat: a tensor of one column passes for contiguous with any stride, and could not be viewed as bytes.
    return torch.equal(*(t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b)))
