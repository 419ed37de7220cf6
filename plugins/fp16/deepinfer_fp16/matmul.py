"""Kernel `fp16.matmul`: torch's own matmul on a dense weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.plugin_api import LinearProblem, Tensors


class Matmul:
    """``out = x @ W.T (+ bias) (+ residual)`` in the act dtype; torch accumulates in float32."""

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
        columns = weights["weight"].t()
        if bias is None:
            torch.mm(x, columns, out=out)
        else:
            torch.addmm(bias, x, columns, out=out)
        if residual is not None:
            out += residual
