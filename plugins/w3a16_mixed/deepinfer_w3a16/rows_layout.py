"""Layout `w3a16.rows.v1`: the canonical tensors as they stand in a checkpoint."""

from __future__ import annotations

from deepinfer_core.kernels.rows import CanonicalRows
from deepinfer_w3a16.scheme import W3A16


def rows_layout() -> CanonicalRows:
    """Return the layout; its bytes are SPEC's: uint8 ``packed``, float16 ``scales`` and ``zeros``, N first."""
    return CanonicalRows(W3A16())
