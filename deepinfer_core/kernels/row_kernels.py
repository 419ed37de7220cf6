"""CUDA kernels over a scheme's canonical rows: the first system's GEMV, batch-tile GEMV and tiled GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_core.kernels.cuda import CudaKernel, require_dense_columns
from deepinfer_core.plugin_api import group_width

if TYPE_CHECKING:
    import torch

    from deepinfer_core.plugin_api import LinearProblem, Tensors

GEMV_WARPS = 8
"""Output features of one GEMV block; ``WARPS`` in ``row_gemv.cuh``."""

TILE_M, TILE_N = 32, 64
"""Output tile of the tiled GEMM; the constants of the same name in ``row_tiled_gemm.cuh``."""

ROW_PROBLEM = np.dtype(
    [
        *((name, np.uint64) for name in ("x", "codes", "scales", "zeros", "bias", "residual", "out")),
        ("x_stride", np.int64),
        *((name, np.int32) for name in ("m", "n", "k", "group", "groups", "code_bytes")),
    ],
    align=True,
)
"""``struct RowProblem`` of ``row_problem.cuh``, byte for byte."""


class RowKernel:
    """Binds one problem to a kernel that takes a ``RowProblem`` by value.

    Args:
        problem: The linear layer; FP16 activations.
        source: The ``.cu`` file of the plugin.
        entry: ``"gemv"`` or ``"tiled_gemm"``.
        rows: Rows of x that one block serves (grid.y = M / rows).
    """

    def __init__(self, problem: LinearProblem, source: Path, entry: str, rows: int) -> None:
        self._rows = rows
        self._columns = TILE_N if entry == "tiled_gemm" else GEMV_WARPS
        self._name = source.parent.parent.name + "/" + source.name
        self._kernel = CudaKernel.from_file(source, entry, {} if entry == "tiled_gemm" else {"ROWS": rows})
        self._fixed = np.zeros((), ROW_PROBLEM)
        self._fixed["n"], self._fixed["k"] = problem.n, problem.k
        self._fixed["group"], self._fixed["groups"] = group_width(problem.k, problem.group_size), problem.groups

    def warm_up(self, ms: Sequence[int]) -> None:
        """Compile; one kernel serves every M."""
        if ms:
            self._kernel.load()

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
        require_dense_columns(self._name, x)
        packed, zeros = weights["packed"], weights.get("zeros")
        args = self._fixed.copy()
        args["x"], args["codes"], args["scales"] = x.data_ptr(), packed.data_ptr(), weights["scales"].data_ptr()
        args["zeros"] = 0 if zeros is None else zeros.data_ptr()
        args["bias"] = 0 if bias is None else bias.data_ptr()
        args["residual"] = 0 if residual is None else residual.data_ptr()
        args["out"] = out.data_ptr()
        args["x_stride"], args["m"], args["code_bytes"] = x.stride(0), x.shape[0], packed.shape[1]
        grid = (-(-out.shape[1] // self._columns), -(-x.shape[0] // self._rows))
        self._kernel.launch(grid, (256,), (args,))
