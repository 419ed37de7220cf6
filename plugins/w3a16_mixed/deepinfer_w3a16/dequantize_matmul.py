"""Kernels that turn chunks of a layout's rows into values and multiply with torch."""

from __future__ import annotations

from deepinfer_core.kernels.fallback import DequantizeMatmul
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_w3a16.rows_layout import rows_layout


def from_rows(problem: LinearProblem) -> DequantizeMatmul:
    """Return the kernel over ``w3a16.rows.v1``."""
    return DequantizeMatmul(problem, rows_layout())
