"""Layout `w3a16.int4cpu.v1` and its kernels: torch's int4 CPU matmul with BF16 activations."""

from __future__ import annotations

from deepinfer_core.kernels.fallback import DequantizeMatmul
from deepinfer_core.kernels.int4_cpu import Int4CpuLayout
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_w3a16.scheme import W3A16


def int4_layout() -> Int4CpuLayout:
    """Return the layout; `deepinfer_core.kernels.int4_cpu` documents its bytes."""
    return Int4CpuLayout(W3A16())


def from_int4(problem: LinearProblem) -> DequantizeMatmul:
    """Return dequantize + matmul over the layout, for more rows than torch's int4 matmul is good at."""
    return DequantizeMatmul(problem, int4_layout())
