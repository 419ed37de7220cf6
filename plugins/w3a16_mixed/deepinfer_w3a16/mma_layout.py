"""Layout `w3a16.mma16.v1`: weights as operand A of mma.m16n8k16; its bytes are documented by core's `mma16`."""

from __future__ import annotations

from deepinfer_core.kernels.mma_layout import MmaRecords
from deepinfer_w3a16.scheme import W3A16


def mma_layout() -> MmaRecords:
    """Return the layout."""
    return MmaRecords(W3A16(), bits=3)
