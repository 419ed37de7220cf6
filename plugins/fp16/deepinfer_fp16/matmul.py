"""Kernels on the dense rows: torch's own matmul, and float32 chunks for many rows on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.kernels.accumulation import keep_float32_sums
from deepinfer_core.kernels.fallback import DequantizeMatmul
from deepinfer_core.plugin_api import LinearProblem, Tensors
from deepinfer_fp16.rows_layout import DenseRows


class Matmul:
    """``out = x @ W.T (+ bias) (+ residual)`` in the act dtype; torch accumulates in float32."""

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem
        if problem.device == "cuda":
            keep_float32_sums()
        # W @ x.T takes torch 6.9 ms at 49152 x 576, M = 4, x @ W.T 31.7 (float32, 2 threads of an AVX2 EPYC, torch
        # 2.13, 2026-11-30); above M = 64 both are alike.
        self._weights_first = problem.device == "cpu" and problem.act_dtype == "float32"

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
        weight = weights["weight"]
        if self._weights_first and x.shape[0] > 1:
            out.copy_(torch.mm(weight, x.t()).t())
            if bias is not None:
                out += bias
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
        if residual is not None:
            out += residual


def from_rows(problem: LinearProblem) -> DequantizeMatmul:
    """Return float32 chunks + matmul over the dense rows, for many rows on a CPU."""
    return DequantizeMatmul(problem, DenseRows())
