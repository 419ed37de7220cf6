"""Rotary position embeddings: frequencies of every variant, and a table that covers the admitted length."""

from __future__ import annotations

import math

import torch

from deepinfer_core.errors import CapacityError
from deepinfer_core.layers.rope import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the float32 rotation per token of each pair of dimensions, ``[head_dim / 2]``.

    Every step is in float32, because at position 100,000 one bit of a frequency is visible in the logits and
    checkpoints were trained with float32 tables.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    if rope.type == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, frequencies)
    assert rope.type == "default", rope.type
    return frequencies


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones by the factor, blend in between."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_scaled = rope.original_max_positions / rope.low_freq_factor
    kept_share = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept_share) * frequencies / rope.factor + kept_share * frequencies
    scaled = torch.where(wavelengths > shortest_scaled, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def _yarn(rope: RopeSpec, head_dim: int, periods: torch.Tensor) -> torch.Tensor:
    """Blend kept and stretched frequencies by a ramp over the dimensions."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept_share) + 1.0 / periods * kept_share


class Rotary:
    """Cosines and sines of every admitted position, and the rotation of queries and keys by them.

    Attributes:
        length: Positions covered; `at` refuses longer contexts, so nothing is read out of range.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, length: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Build the table in float32 on the host and round it once to the activation dtype.

        Args:
            rope: Variant and parameters.
            head_dim: Even width of one head.
            length: Positions to cover, in tokens.
            device: Where queries and keys live.
            dtype: Their dtype.
        """
        assert head_dim % 2 == 0, head_dim
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.length = length
        self._half = head_dim // 2
        # The first half's sine is stored negated: rotate_half becomes a plain roll by half a head.
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)[:, None]
        self._sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._cos.nbytes + self._sin.nbytes

    def at(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin ``[tokens, 1, head_dim]`` for int64 positions, once a forward.

        Args:
            positions: int64 ``[tokens]``, on the table's device.
            longest: Longest context of the step on the host; every position is below it.

        Raises:
            CapacityError: A context is longer than the table.
        """
        if longest > self.length:
            raise CapacityError(
                f"a context of {longest} tokens is longer than the {self.length} positions that this model was "
                "loaded for; shorten the prompt, or raise [cache] max_model_len up to the model's own limit"
            )
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def rotate_(self, heads: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate ``[tokens, heads, head_dim]`` in place (queries and keys together) and return it."""
        cos, sin = cos_sin
        swapped = torch.roll(heads, self._half, -1)
        return heads.mul_(cos).addcmul_(swapped, sin)
