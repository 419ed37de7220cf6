"""Layout `fp16.half_cpu.v1` and its kernels: dense weights for BF16 activations on a CPU, held and read as FP16.

torch's FP16 product of one row is faster than its BF16 and float32 products, and FP16 keeps three bits more of each
weight. The exponent that FP16 lacks is carried beside it, so nothing overflows and nothing that matters underflows:

- ``weight`` float16 ``[N, K]``: each row times the power of two that brings its largest value into [2^14, 2^15);
- ``scales`` float32 ``[N]``: what a row's products must be multiplied by, a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.kernels.fallback import DequantizeMatmul
from deepinfer_core.plugin_api import LinearProblem, Tensors

_TOP = 15  # rows are scaled to just below 2 ** _TOP


class HalfCpuLayout:
    """FP16 rows with a power of two each. FP16 weights stay exact; BF16 and float32 ones are rounded to 11 bits."""

    def nbytes(self, problem: LinearProblem) -> int:
        """Return the bytes of both tensors."""
        return problem.n * (2 * problem.k + 4)

    def pack(self, problem: LinearProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Scale each row by its power of two and round to FP16."""
        weight = tensors["weight"]
        half = torch.empty(weight.shape, dtype=torch.float16, device=weight.device)
        largest = torch.maximum(weight.amax(1), -weight.amin(1)).float()
        raised = torch.exp2((_TOP - torch.frexp(largest).exponent).clamp(max=100).float())
        for n0 in range(0, problem.n, 1024):  # no float32 copy of a whole head
            rows = slice(n0, n0 + 1024)
            half[rows] = weight[rows].float() * raised[rows, None]
        return {"weight": half, "scales": raised.reciprocal()}

    def unpack(self, problem: LinearProblem, packed: Tensors) -> dict[str, torch.Tensor]:
        """Return the values in float32; which dtype they came from is not kept."""
        return {"weight": packed["weight"] * packed["scales"][:, None]}

    def concat_n(self, problems: Sequence[LinearProblem], packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join along N."""
        return {name: torch.cat([part[name] for part in packed]) for name in ("weight", "scales")}

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Write the values of rows ``n0:n1`` into ``out``."""
        # Converted first: a product of FP16 and float32 takes torch five times as long.
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        values.copy_(packed["weight"][n0:n1]).mul_(packed["scales"][n0:n1, None])
        if values is not out:
            out.copy_(values)


class HalfCpuMatmul:
    """torch's FP16 product with float32 accumulators, for a few rows.

    A row of x is divided by a power of two above the sum of its magnitudes: a product is then below 2^15 whatever
    the row holds, and FP16 keeps three bits more of it than BF16 will.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem

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
        wide = x.float()
        magnitude = torch.exp2(torch.frexp(wide.abs().sum(1, keepdim=True)).exponent.float())
        product = torch.mm((wide / magnitude).half(), weights["weight"].t())
        values = product * (weights["scales"] * magnitude)
        if bias is not None:
            values += bias
        if residual is not None:
            values += residual
        out.copy_(values)


def from_half(problem: LinearProblem) -> DequantizeMatmul:
    """Return float32 chunks + matmul over the layout, for more rows than torch's FP16 product is good at."""
    return DequantizeMatmul(problem, HalfCpuLayout())
