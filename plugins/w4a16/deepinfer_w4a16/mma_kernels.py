"""Tensor-core kernels over `w4a16.mma16.v1`, bound to the sources beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_core.kernels.mma_linear import (
    MmaDecodeMatmul,
    MmaLinear,
    best_plan,
    cluster_plan,
    plan_bytes,
    shape_of,
    stream_plan,
    tile_plan,
)

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import LinearProblem

CSRC = Path(__file__).parent / "csrc"
BITS = 4


def mma(problem: LinearProblem) -> MmaLinear:
    """Bind w4a16.mma: stream or tile, whichever measured faster for the row count; zeros always stream."""
    return MmaLinear(problem, BITS, CSRC, best_plan)


def mma_workspace(problem: LinearProblem, m: int) -> int:
    """Return its workspace in bytes."""
    return plan_bytes(best_plan, shape_of(problem, BITS), m)


def mma_stream(problem: LinearProblem) -> MmaLinear:
    """Bind w4a16.mma_stream: activations resident in shared memory, weights streamed; any M, made for M <= 16."""
    return MmaLinear(problem, BITS, CSRC, stream_plan)


def mma_stream_workspace(problem: LinearProblem, m: int) -> int:
    """Return its workspace in bytes."""
    return plan_bytes(stream_plan, shape_of(problem, BITS), m)


def mma_cluster(problem: LinearProblem) -> MmaLinear:
    """Bind w4a16.mma_cluster: mma_stream, slices of k summed through a cluster's shared memory; 9.0."""
    return MmaLinear(problem, BITS, CSRC, cluster_plan)


def mma_cluster_workspace(problem: LinearProblem, m: int) -> int:
    """Return its workspace in bytes."""
    return plan_bytes(cluster_plan, shape_of(problem, BITS), m)


def mma_tile(problem: LinearProblem) -> MmaLinear:
    """Bind w4a16.mma_tile: stream-K tiles, activations in stages; M from about 17, symmetric codes."""
    return MmaLinear(problem, BITS, CSRC, tile_plan)


def mma_tile_workspace(problem: LinearProblem, m: int) -> int:
    """Return its workspace in bytes."""
    return plan_bytes(tile_plan, shape_of(problem, BITS), m)


def mma_decode_matmul(problem: LinearProblem) -> MmaDecodeMatmul:
    """Bind w4a16.mma_decode_matmul: a chunk of features decoded, then cuBLAS; many rows."""
    return MmaDecodeMatmul(problem, BITS, CSRC)


def mma_decode_workspace(problem: LinearProblem, m: int) -> int:
    """Return its workspace in bytes."""
    return MmaDecodeMatmul(problem, BITS, CSRC).workspace_bytes(m)
