"""What a config says about rotary embeddings, without torch."""

from __future__ import annotations

import math
from typing import Literal

from attrs import frozen

RopeType = Literal["default", "linear", "llama3", "yarn"]


@frozen(kw_only=True)
class RopeSpec:
    """Rotary embedding of one model; fields that a type does not use keep their defaults.

    Attributes:
        type: Which rule scales the frequencies.
        theta: Base of the frequencies.
        factor: Context extension (linear, llama3, yarn).
        original_max_positions: Trained context before the extension, in tokens (llama3, yarn).
        low_freq_factor: Wavelengths longer than original / low are divided by the factor (llama3).
        high_freq_factor: Wavelengths shorter than original / high stay as they are (llama3).
        beta_fast: Rotations over the original context above which a frequency stays as it is (yarn).
        beta_slow: Rotations below which a frequency is divided by the factor (yarn).
        truncate: Round the yarn range outwards to whole dimensions.
        attention_factor: What cos and sin are multiplied by.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return what yarn multiplies cos and sin by when the config does not say so itself."""
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
