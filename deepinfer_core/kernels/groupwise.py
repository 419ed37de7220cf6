"""Group-wise weight quantization in plain torch, for scheme authors: quantize, dequantize, slice on group edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from deepinfer_core.errors import CheckpointError, ConfigError
from deepinfer_core.kernels.scale_search import FP16_MAX, range_grid, search_grid
from deepinfer_core.plugin_api import WHOLE_ROW, QuantMethod, Tensors, group_width

GROUP_SIZES = (32, 64, 128, WHOLE_ROW)

# Values that are quantized at once. On a CPU a chunk and its temporaries shall stay in the cache; on a card a
# chunk shall fill it.
_CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}


def code_range(bits: int, *, zeros: bool) -> tuple[int, int]:
    """Return the smallest and largest code: unsigned with zeros, two's complement without."""
    return (0, (1 << bits) - 1) if zeros else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def quantize_groups(
    weight: torch.Tensor, *, bits: int, group_size: int, zeros: bool, method: QuantMethod = "search"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize ``[N, K]`` values in groups along K, in chunks of rows so that temporaries stay small.

    Args:
        weight: Any floating dtype, any device, values that FP16 can hold.
        bits: Bits of a code, 2 to 7.
        group_size: Values that share a scale; -1 for the whole row; the last group may be short.
        zeros: Store a zero per group (fractional, in code units), with unsigned codes.
        method: ``"rtn"`` or ``"search"``.

    Returns:
        int8 codes ``[N, K]``, float16 scales ``[N, ceil(K / group_size)]``, float16 zeros of the same shape or None.
        An all-zero group gets codes 0 and the smallest scale, so that no kernel makes its own rounding errors large;
        every scale is finite and none is 0.

    Raises:
        CheckpointError: A value is NaN or beyond FP16.
    """
    n, k = weight.shape
    width = group_width(k, group_size)
    codes = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, -(-k // width), dtype=torch.float16, device=weight.device)
    zero = torch.empty_like(scales) if zeros else None
    lo, hi = code_range(bits, zeros=zeros)
    find_grid = range_grid if method == "rtn" else search_grid
    rows = max(1, _CHUNK_VALUES.get(weight.device.type, 1 << 20) // max(k, 1))
    for row in range(0, n, rows):
        chunk = weight[row : row + rows].float()
        _check_values(chunk, row)
        for part, first in _full_and_short(chunk, width):
            count, size = part.shape[1:]
            groups = part.reshape(-1, size).t().contiguous()
            grid = find_grid(groups, lo, hi, zeros=zeros)
            found = grid.codes(groups, lo, hi).to(torch.int8).t().reshape(-1, count * size)
            codes[row : row + rows, first * width : first * width + count * size] = found
            scales[row : row + rows, first : first + count] = grid.scales.view(-1, count)
            if zero is not None and grid.zeros is not None:
                zero[row : row + rows, first : first + count] = grid.zeros.view(-1, count)
    return codes, scales, zero


def dequantize_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    group_size: int,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``(code - zero) * scale`` for ``[N, K]`` codes, computed in float32 and rounded once.

    Args:
        codes: Integers ``[N, K]`` of any dtype.
        scales: ``[N, groups]``.
        zeros: ``[N, groups]`` or None.
        group_size: Codes that share a scale; -1 for the whole row.
        dtype: Of the result; float32 when None.
        out: Contiguous ``[N, K]`` to write into, in place of a new tensor; its dtype wins over ``dtype``.
    """
    in_place = out is not None and out.dtype == torch.float32
    values = out.copy_(codes) if out is not None and in_place else codes.to(torch.float32)
    if values is codes:
        values = codes.clone()
    width = group_width(codes.shape[1], group_size)
    for part, first in _full_and_short(values, width):
        columns = slice(first, first + part.shape[1])
        if zeros is not None:
            part.sub_(zeros[:, columns].float().unsqueeze(-1))
        part.mul_(scales[:, columns].float().unsqueeze(-1))
    if out is not None:
        return out if in_place else out.copy_(values)
    return values if dtype is None else values.to(dtype)


def _check_values(chunk: torch.Tensor, row: int) -> None:
    """Refuse what FP16 cannot hold; ``row`` is the weight's row that the chunk starts at."""
    storable = (chunk.abs() <= FP16_MAX).all(1)  # false for NaN too
    if not bool(storable.all()):
        bad = row + int((~storable).nonzero()[0])
        raise CheckpointError(f"row {bad} of the weight holds NaN or values beyond {FP16_MAX:.0f}: not quantizable")


def _full_and_short(values: torch.Tensor, width: int) -> Sequence[tuple[torch.Tensor, int]]:
    """Return views ``[N, groups, width]`` of the full groups and of the short last one, with their first group."""
    full = values.shape[1] // width
    parts = []
    if full:
        parts.append((values[:, : full * width].unflatten(1, (full, width)), 0))
    if values.shape[1] > full * width:
        parts.append((values[:, full * width :].unsqueeze(1), full))
    return parts


class GroupwiseScheme(ABC):
    """A `WeightScheme` with tensors ``packed``, ``scales`` and ``zeros``; a scheme adds how codes become bytes.

    Attributes:
        name: The scheme's name, for messages.
        bits: Bits of a code.
        unit: (codes, bytes) of the smallest run of codes that ends on a byte's edge.
    """

    name: str
    bits: int
    unit: tuple[int, int]

    @abstractmethod
    def pack(self, codes: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        """Pack integer codes ``[N, K]`` into uint8 ``[N, bytes]``."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor, k: int, *, zeros: bool) -> torch.Tensor:
        """Return int8 codes ``[N, K]``."""

    def quantize(
        self, weight: torch.Tensor, *, group_size: int, zeros: bool, method: QuantMethod = "search"
    ) -> dict[str, torch.Tensor]:
        """Quantize a floating ``[N, K]`` weight into canonical tensors; see `quantize_groups`."""
        self._check_group_size(group_size)
        if method not in ("rtn", "search"):
            raise ConfigError(f"{self.name} cannot quantize by method {method!r}; known: rtn, search")
        codes, scales, zero = quantize_groups(weight, bits=self.bits, group_size=group_size, zeros=zeros, method=method)
        tensors = {"packed": self.pack(codes, zeros=zeros), "scales": scales}
        if zero is not None:
            tensors["zeros"] = zero
        return tensors

    def dequantize(
        self, tensors: Tensors, *, k: int, group_size: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return ``[N, K]`` values in ``dtype`` (float32 when None), computed in float32 and rounded once."""
        zeros = tensors.get("zeros")
        codes = self.unpack(tensors["packed"], k, zeros=zeros is not None)
        return dequantize_groups(codes, tensors["scales"], zeros, group_size=group_size, dtype=dtype)

    def slice_n(self, tensors: Tensors, n0: int, n1: int) -> dict[str, torch.Tensor]:
        """Return rows ``n0:n1`` of every tensor, as views."""
        return {name: tensor[n0:n1] for name, tensor in tensors.items()}

    def slice_k(self, tensors: Tensors, k0: int, k1: int, *, k: int, group_size: int) -> dict[str, torch.Tensor]:
        """Return columns ``k0:k1``, as views; both must lie on group edges (or at K).

        Raises:
            ValueError: An edge is inside a group, or the range is empty or outside 0..K.
        """
        width = group_width(k, group_size)
        for edge in (k0, k1):
            if edge % width and edge != k:
                raise ValueError(f"column {edge} of {self.name} is inside a group; edges are multiples of {width}")
        if not 0 <= k0 < k1 <= k:
            raise ValueError(f"columns {k0}:{k1} are not a part of 0:{k}")
        codes, size = self.unit
        # Every legal group is whole units wide, so a group's edge is a byte's edge.
        columns = {"packed": slice(k0 // codes * size, -(-k1 // codes) * size)}
        groups = slice(k0 // width, -(-k1 // width))
        return {name: tensor[:, columns.get(name, groups)] for name, tensor in tensors.items()}

    def _check_group_size(self, group_size: int) -> None:
        if group_size not in GROUP_SIZES:
            raise ConfigError(
                f"{self.name} has no groups of {group_size}; choose one of {', '.join(map(str, GROUP_SIZES))} "
                "(-1 is the whole row)"
            )
