"""Layout and kernel over torch's int4 CPU matmul, for schemes whose codes fit four bits; BF16 activations.

Resident tensors, N padded to torch's blocks of rows and K to whole groups:

- ``packed`` uint8 ``[N, K / 2]``: nibbles in the order that torch's conversion gives them on this CPU;
- ``scales`` bfloat16 ``[K / group, N, 2]``: scale and offset, ``value = (nibble - 8) * scale + offset``.

torch takes groups of 32, 64, 128 and 256. A whole row is split into such groups, all with the row's scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from attrs import frozen
from torch.nn.functional import pad

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.groupwise import GroupwiseScheme
from deepinfer_core.plugin_api import WHOLE_ROW, LinearProblem, Tensors, group_width

_MIDDLE = 8  # the nibble that stands for the offset alone
_GROUPS = (256, 128, 64, 32)  # what torch takes, widest first


class Int4CpuLayout:
    """A `WeightLayout` of a `GroupwiseScheme` of at most four bits.

    Scale and offset are rounded to BF16, a relative error of at most 2^-8 each; codes are shifted so that the
    offset, and so its rounding, is as small as the group's codes allow.
    """

    def __init__(self, scheme: GroupwiseScheme) -> None:
        assert scheme.bits <= 4
        self.scheme = scheme
        self._top = (1 << scheme.bits) - 1

    def nbytes(self, problem: LinearProblem) -> int:
        """Return the bytes of both tensors."""
        n, k, group = padded_shape(problem)
        return n * k // 2 + k // group * n * 4

    def pack(self, problem: LinearProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Widen the codes to nibbles and let torch order them; scales become BF16."""
        n, k, group = padded_shape(problem)
        zeros = tensors.get("zeros")
        codes = self.scheme.unpack(tensors["packed"], problem.k, zeros=zeros is not None)
        nibbles = codes.int()
        scales = tensors["scales"].float()
        if zeros is None:
            nibbles += _MIDDLE
            offsets = torch.zeros_like(scales)
        else:
            zeros = zeros.float()
            low, high = _code_spans(codes, problem)
            shifts = (_MIDDLE - zeros.round()).clamp_(-low, 15 - high)
            nibbles += _columns(shifts, problem.k, problem.group_size).int()
            # (code - zero) * scale and (code + shift - 8) * rounded + offset are two lines over the codes that
            # differ a little in slope: they shall meet in the middle of the group's codes. A constant group, whose
            # one code may be far from the middle of all codes, is then as good as exact.
            middle = (low + high) / 2
            offsets = (middle - zeros) * scales - (middle + shifts - _MIDDLE) * scales.bfloat16().float()
        nibbles = pad(nibbles, (0, k - problem.k, 0, n - problem.n), value=_MIDDLE)
        both = torch.stack((scales, offsets), dim=2).bfloat16()
        if problem.group_size == WHOLE_ROW:
            both = both.expand(-1, k // group, -1)
        both = pad(both, (0, 0, 0, 0, 0, n - problem.n))
        return {"packed": _convert(nibbles), "scales": both.transpose(0, 1).contiguous()}

    def unpack(self, problem: LinearProblem, packed: Tensors) -> dict[str, torch.Tensor]:
        """Return canonical tensors of nearly the same values: scales and zeros went through BF16."""
        nibbles = _nibbles(packed["packed"], 0, problem.n)[:, : problem.k].to(torch.int8)
        scales, offsets = packed["scales"][: problem.groups, : problem.n].float().permute(2, 1, 0)
        if not problem.zeros:
            return {"packed": self.scheme.pack(nibbles - _MIDDLE, zeros=False), "scales": scales.half().contiguous()}
        # Which of the possible shifts it was is not kept. The largest one that leaves every code in range will do.
        width = group_width(problem.k, problem.group_size)
        padded = pad(nibbles, (0, problem.groups * width - problem.k), value=15)
        shifts = padded.view(problem.n, problem.groups, width).amin(2).clamp_(max=15 - self._top)
        codes = nibbles - _columns(shifts, problem.k, problem.group_size)
        zeros = _MIDDLE - shifts - offsets / scales
        return {
            "packed": self.scheme.pack(codes, zeros=True),
            "scales": scales.half().contiguous(),
            "zeros": zeros.half().contiguous(),
        }

    def concat_n(self, problems: Sequence[LinearProblem], packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join along N; layers that do not end on a block of rows are taken apart and converted anew."""
        if all(problem.n % block_rows() == 0 for problem in problems[:-1]):
            joined = torch.cat([part["packed"] for part in packed])
            scales = torch.cat([part["scales"] for part in packed], dim=1)
            return {"packed": joined, "scales": scales}
        nibbles = [_nibbles(part["packed"], 0, p.n).int() for p, part in zip(problems, packed, strict=True)]
        scales = torch.cat([part["scales"][:, : p.n] for p, part in zip(problems, packed, strict=True)], dim=1)
        extra = -scales.shape[1] % block_rows()
        return {
            "packed": _convert(pad(torch.cat(nibbles), (0, 0, 0, extra), value=_MIDDLE)),
            "scales": pad(scales, (0, 0, 0, extra)).contiguous(),
        }

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Write the values of rows ``n0:n1`` into ``out``."""
        _, k, group = padded_shape(problem)
        scales, offsets = packed["scales"][:, n0:n1].float().permute(2, 1, 0)
        codes = _nibbles(packed["packed"], n0, n1)
        if k == problem.k and out.dtype == torch.float32:
            values = out.copy_(codes)
        else:
            values = codes.float()
        by_group = values.unflatten(1, (k // group, group))
        by_group.sub_(_MIDDLE).mul_(scales.unsqueeze(2)).add_(offsets.unsqueeze(2))
        if values is not out:
            out.copy_(values[:, : problem.k])


class Int4CpuMatmul:
    """torch's int4 matmul: BF16 activations, float32 accumulators."""

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem
        self._n, self._k, self._group = padded_shape(problem)

    def warm_up(self, ms: Sequence[int]) -> None:
        """Nothing to compile."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: Tensors,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Write ``out``; see `LinearKernel`."""
        if x.shape[0] == 0:
            return
        x = pad(x, (0, self._k - self.problem.k)) if self._k != self.problem.k else x.contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weights["packed"], self._group, weights["scales"])
        product = product[:, : self.problem.n]
        if bias is not None:
            product = product + bias
        if residual is not None:
            torch.add(product, residual, out=out)
        else:
            out.copy_(product)


def padded_shape(problem: LinearProblem) -> tuple[int, int, int]:
    """Return (N, K, group) as torch's matmul sees them."""
    n = -(-problem.n // block_rows()) * block_rows()
    group = problem.group_size
    if group == WHOLE_ROW:
        group = next((g for g in _GROUPS if problem.k % g == 0), _GROUPS[-1])
    return n, -(-problem.k // group) * group, group


def block_rows() -> int:
    """Return how many rows torch interleaves on this CPU: 64 with AVX-512, else 32."""
    return _block().rows


@frozen
class _Block:
    """How torch orders a block of rows: for each k, ``rows / 2`` bytes; byte j holds low[j] and high[j].

    Attributes:
        rows: Rows of a block.
        low: Those in low nibbles, in the order of the bytes.
        high: Those in high nibbles.
    """

    rows: int
    low: slice
    high: slice


@cache
def _block() -> _Block:
    """Return the order of this CPU, as torch's own conversion of row numbers shows it."""
    rows, k = 64, 32
    numbers = torch.arange(rows, dtype=torch.int32).unsqueeze(1).expand(rows, k)
    ones, sixteens = (_convert((numbers // base % 16).contiguous()).flatten() for base in (1, 16))
    low_rows = (ones & 0xF).long() + 16 * (sixteens & 0xF)
    high_rows = (ones >> 4).long() + 16 * (sixteens >> 4)
    for block in (64, 32, 16):
        low, high = (side.view(rows // block, k, block // 2)[0] for side in (low_rows, high_rows))
        all_rows = torch.cat((low[0], high[0])).sort().values
        same = bool((low == low[0]).all() and (high == high[0]).all())
        if same and torch.equal(all_rows, torch.arange(block)) and low[0].diff().unique().numel() == 1:
            step = int(low[0, 1] - low[0, 0])
            first, second = int(low[0, 0]), int(high[0, 0])
            return _Block(block, *(slice(at, at + step * (block // 2), step) for at in (first, second)))
    raise KernelError(
        f"torch {torch.__version__} orders int4 weights in a way that is not known here; select the canonical rows "
        "in the config, for example kernels = { '*' = 'w4a16.dequantize_matmul_cpu' }"
    )


def _convert(nibbles: torch.Tensor) -> torch.Tensor:
    """Return torch's packed form of int32 nibbles ``[N, K]``."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.contiguous(), 1)
    assert isinstance(packed, torch.Tensor)
    return packed


def _nibbles(packed: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
    """Return nibbles ``[n1 - n0, K]`` of rows ``n0:n1``, uint8."""
    block, k = _block(), 2 * packed.shape[1]
    first = n0 // block.rows
    chunk = packed.view(-1, k, block.rows // 2)[first : -(-n1 // block.rows)]
    by_row = chunk.transpose(1, 2).contiguous()
    rows = torch.empty(chunk.shape[0], block.rows, k, dtype=torch.uint8)
    # Measured: 0.9 ns a nibble; a gather over all rows of a block took 7.5 (AVX2 EPYC, one thread, 2026-11-30).
    torch.bitwise_and(by_row, 0xF, out=rows[:, block.low])
    torch.bitwise_right_shift(by_row, 4, out=rows[:, block.high])
    return rows.view(-1, k)[n0 - first * block.rows : n1 - first * block.rows]


def _code_spans(codes: torch.Tensor, problem: LinearProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest unsigned code of each group, float32 ``[N, groups]``."""
    width = group_width(problem.k, problem.group_size)
    extra = problem.groups * width - problem.k
    low = pad(codes, (0, extra), value=15).unflatten(1, (-1, width)).amin(2)
    high = pad(codes, (0, extra), value=0).unflatten(1, (-1, width)).amax(2)
    return low.float(), high.float()


def _columns(per_group: torch.Tensor, k: int, group_size: int) -> torch.Tensor:
    """Return ``[N, K]``: each group's value in all of its columns."""
    return per_group.repeat_interleave(group_width(k, group_size), dim=1)[:, :k]
