"""INT8 keys and values: one symmetric scale per token and head."""

from __future__ import annotations

import torch

LEVELS = 127
_TINY = torch.finfo(torch.float32).tiny


def quantize_heads(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``[tokens, kv_heads, head_dim]`` to INT8.

    The scale is the largest magnitude over 127, in float32: a half-precision scale would lose rows of small values.
    An all-zero row gets scale 0 and codes 0. The error of an element is at most amax / 254.

    Returns:
        Codes int8 ``[tokens, kv_heads, head_dim]`` and scales float32 ``[tokens, kv_heads]``.
    """
    exact = values.to(torch.float32)
    scales = exact.abs().amax(dim=-1, keepdim=True).div_(LEVELS)
    codes = torch.div(exact, scales.clamp_min(_TINY)).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return codes, scales.squeeze(-1)


def dequantize_heads(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``codes [..., head_dim] * scales [...]``, computed in float32 and rounded once to ``dtype``."""
    return torch.mul(codes, scales.unsqueeze(-1)).to(dtype)
