"""Core's kernel for any layout and any M: values of a chunk of rows, then torch's matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.kernels.accumulation import keep_float32_sums
from deepinfer_core.plugin_api import LinearProblem, Tensors, WeightLayout

# Never more than this of the weights exists as values, whatever the layer's size.
CHUNK_BYTES = {"cuda": 32 << 20, "cpu": 4 << 20}

# torch 2.8 brought float16 and bfloat16 products with a float32 result. Before, values are float32 on a card too.
_MIXED_MM = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


class DequantizeMatmul:
    """A `LinearKernel` made from a layout's `dequantize_rows`; the one kernel that needs the layout.

    Products are accumulated in float32 and rounded to the act dtype once, after bias and residual. On a CPU the
    values are float32 whatever the act dtype: torch's own float16 and bfloat16 products are slower there.
    """

    def __init__(self, problem: LinearProblem, layout: WeightLayout) -> None:
        self.problem = problem
        self.layout = layout
        act = getattr(torch, problem.act_dtype)
        if problem.device == "cuda":
            keep_float32_sums()
        self.value_dtype = act if problem.device == "cuda" and _MIXED_MM else torch.float32
        budget = CHUNK_BYTES[problem.device]
        self.rows = max(1, min(problem.n, budget // (problem.k * self.value_dtype.itemsize)))

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
        """Write ``out = x @ W.T (+ bias) (+ residual)``; see `LinearKernel`."""
        if x.shape[0] == 0:
            return
        values = torch.empty(self.rows, self.problem.k, dtype=self.value_dtype, device=x.device)
        columns = x.to(self.value_dtype).t()
        for n0 in range(0, self.problem.n, self.rows):
            n1 = min(n0 + self.rows, self.problem.n)
            chunk = values[: n1 - n0]
            self.layout.dequantize_rows(self.problem, weights, n0, n1, chunk)
            part = _product(chunk, columns).t()
            if bias is not None:
                part = part + bias[n0:n1]
            if residual is not None:
                part = part + residual[:, n0:n1]
            out[:, n0:n1] = part


def _product(weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return ``[n, M]`` in float32: a float16 result could overflow before bias and residual bring it back.

    Weights first: torch takes 6.9 ms for 49152 x 576 at M = 4 this way and 31.7 ms as ``x @ W.T`` (float32, 2 cores
    of an AVX2 EPYC, torch 2.13, 2026-11-30).
    """
    if weight.dtype == torch.float32:
        return torch.mm(weight, columns)
    return torch.mm(weight, columns, out_dtype=torch.float32)
