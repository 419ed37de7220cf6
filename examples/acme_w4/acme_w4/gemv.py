"""One row times W4 weights: the dot product of each group with its codes first, then the scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.plugin_api import LinearProblem, Tensors


class Gemv:
    """Scales a group's sum in place of its codes: one multiplication a group, not one a weight."""

    def __init__(self, problem: LinearProblem) -> None:
        self.groups = problem.groups
        self.width = problem.k // problem.groups  # the descriptor serves whole groups alone

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
        """Write ``out = x @ W.T (+ bias)`` for one row; no residual comes, since the descriptor offers none."""
        if x.shape[0] == 0:
            return
        packed, scales, zeros = weights["packed"], weights["scales"].float(), weights.get("zeros")
        nibbles = torch.stack((packed & 0xF, packed >> 4), dim=2).flatten(1)  # the even k is the low nibble
        codes = nibbles.float() if zeros is not None else (nibbles ^ 8).float() - 8  # signed without zeros
        by_group = x.reshape(self.groups, self.width)
        sums = torch.einsum("ngw,gw->ng", codes.view(-1, self.groups, self.width), by_group)
        if zeros is not None:
            sums -= zeros.float() * by_group.sum(1)
        torch.sum(sums * scales, dim=1, out=out[0])
        if bias is not None:
            out += bias
