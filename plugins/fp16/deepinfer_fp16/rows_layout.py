"""Layout `fp16.rows.v1`: the dense weight, row-major, in the activations' dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.plugin_api import LinearProblem, Tensors


class DenseRows:
    """One tensor ``weight`` ``[N, K]`` in the problem's act dtype; a weight that already has it is not copied."""

    def nbytes(self, problem: LinearProblem) -> int:
        """Return the bytes of the weight."""
        return problem.n * problem.k * _act_dtype(problem).itemsize

    def pack(self, problem: LinearProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Round to the act dtype."""
        return {"weight": tensors["weight"].to(_act_dtype(problem)).contiguous()}

    def unpack(self, problem: LinearProblem, packed: Tensors) -> dict[str, torch.Tensor]:
        """Return the weight in the act dtype."""
        return dict(packed)

    def concat_n(self, problems: Sequence[LinearProblem], packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join along N."""
        return {"weight": torch.cat([part["weight"] for part in packed])}

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Copy rows ``n0:n1`` into ``out``."""
        out.copy_(packed["weight"][n0:n1])


def _act_dtype(problem: LinearProblem) -> torch.dtype:
    dtype = getattr(torch, problem.act_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
