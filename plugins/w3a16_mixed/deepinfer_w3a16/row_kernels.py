"""The first system's W3 kernels over canonical rows, bound to the sources beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_core.kernels.row_kernels import TILE_M, RowKernel

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import LinearProblem

CSRC = Path(__file__).parent / "csrc"


def gemv(problem: LinearProblem) -> RowKernel:
    """Bind w3a16.gemv: grid.y = batch, every row reads the weights again (from the L2 where they fit)."""
    return RowKernel(problem, CSRC / "rows_gemv.cu", "gemv", rows=1)


def batch_tile_gemv(problem: LinearProblem) -> RowKernel:
    """Bind the experimental w3a16.batch_tile_gemv: eight rows share one weight read."""
    return RowKernel(problem, CSRC / "rows_gemv.cu", "gemv", rows=8)


def tiled_gemm(problem: LinearProblem) -> RowKernel:
    """Bind w3a16.tiled_gemm: a 32 x 64 output tile a block."""
    return RowKernel(problem, CSRC / "rows_tiled_gemm.cu", "tiled_gemm", rows=TILE_M)
