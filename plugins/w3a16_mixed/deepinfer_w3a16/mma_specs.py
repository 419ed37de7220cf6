"""Descriptors of the tensor-core kernels and their layout; imports neither torch nor CuPy."""

from __future__ import annotations

from deepinfer_core.plugin_api import CapabilityRange, LinearKernelSpec, MRange, WeightLayoutSpec

LAYOUT = "w3a16.mma16.v1"

DECODE_FROM = 129
"""Rows from which a decoded chunk and cuBLAS win. 37888 x 3584 in `mma` and decoded, us: M = 128 138 and 179, M = 256
275 and 205 (H200, 2026-11-30; `docs/kernels.md` says how)."""


def mma_layouts() -> tuple[WeightLayoutSpec, ...]:
    """Return the fragment-order layout."""
    return (
        WeightLayoutSpec(
            name=LAYOUT,
            scheme="w3a16",
            devices=("cuda",),
            act_dtypes=("float16", "bfloat16"),
            factory="deepinfer_w3a16.mma_layout:mma_layout",
        ),
    )


def mma_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return `mma` for few rows, `mma_decode_matmul` for many, and the two forms `mma` picks from, by name.

    `mma_cluster` is `mma_stream` whose slices of k meet in a cluster's shared memory; experimental: it has not run yet.
    """
    forms = (
        ("mma", MRange(1, DECODE_FROM - 1), True, 60, "mma_workspace"),
        ("mma_decode_matmul", MRange(DECODE_FROM), True, 60, "mma_decode_workspace"),
        ("mma_stream", MRange(1, 256), True, 40, "mma_stream_workspace"),
        ("mma_tile", MRange(9, 256), False, 45, "mma_tile_workspace"),
        ("mma_cluster", MRange(1, 32), True, 30, "mma_cluster_workspace"),
    )
    return tuple(
        LinearKernelSpec(
            name=f"w3a16.{name}",
            scheme="w3a16",
            layout=LAYOUT,
            device="cuda",
            m=m,
            capability=CapabilityRange(lo=(9, 0), hi=(9, 0)) if name == "mma_cluster" else CapabilityRange(lo=(8, 0)),
            act_dtypes=("float16", "bfloat16"),
            zeros=zeros,
            epilogues=("none", "residual"),
            priority=priority,
            stability="experimental" if name == "mma_cluster" else "stable",
            workspace=f"deepinfer_w3a16.mma_kernels:{workspace}",
            factory=f"deepinfer_w3a16.mma_kernels:{name}",
        )
        for name, m, zeros, priority, workspace in forms
    )
