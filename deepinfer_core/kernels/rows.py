"""The canonical tensors as a resident layout: row-major, bit for bit what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.kernels.groupwise import GroupwiseScheme, dequantize_groups
from deepinfer_core.plugin_api import LinearProblem, Tensors


class CanonicalRows:
    """A `WeightLayout` that keeps a `GroupwiseScheme`'s canonical tensors, N first, on any device."""

    def __init__(self, scheme: GroupwiseScheme) -> None:
        self.scheme = scheme

    def nbytes(self, problem: LinearProblem) -> int:
        """Return the bytes of ``packed``, ``scales`` and ``zeros``."""
        codes, size = self.scheme.unit
        per_group = 4 if problem.zeros else 2
        return problem.n * (-(-problem.k // codes) * size + problem.groups * per_group)

    def pack(self, problem: LinearProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors as they are, made contiguous."""
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def unpack(self, problem: LinearProblem, packed: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors as they are."""
        return dict(packed)

    def concat_n(self, problems: Sequence[LinearProblem], packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join along N."""
        return {name: torch.cat([part[name] for part in packed]) for name in packed[0]}

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Write the values of rows ``n0:n1`` into ``out``."""
        rows = self.scheme.slice_n(packed, n0, n1)
        codes = self.scheme.unpack(rows["packed"], problem.k, zeros=problem.zeros)
        dequantize_groups(codes, rows["scales"], rows.get("zeros"), group_size=problem.group_size, out=out)
