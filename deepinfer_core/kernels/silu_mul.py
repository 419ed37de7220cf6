"""``silu(gate) * up`` on a card in one launch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from deepinfer_core.kernels.struct_kernel import StructKernel

_THREADS = 256
_SOURCE = Path(__file__).parent / "csrc" / "silu_mul.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out")),
        *((name, ctypes.c_longlong) for name in ("gate_stride", "up_stride", "out_stride")),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
    )


@functools.cache
def _kernel(dtype: torch.dtype, vec: int) -> StructKernel:
    defines = {"BF16": int(dtype == torch.bfloat16), "VEC": vec}
    return StructKernel(_SOURCE, "silu_mul", _Args, defines)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` ``[rows, width]``, computed in float32 and rounded once.

    Args:
        gate: ``[rows, width]``, FP16 or BF16 on a card; rows may be strided, columns are contiguous.
        up: The same.
    """
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    assert gate.stride(1) == 1 and up.stride(1) == 1, "columns lie apart"  # noqa: PT018
    pointers, strides = gate.data_ptr() | up.data_ptr(), gate.stride(0) | up.stride(0) | width
    vec = 8 if pointers % 16 == 0 and strides % 8 == 0 else 1
    fields = {
        "gate": gate.data_ptr(),
        "up": up.data_ptr(),
        "out": out.data_ptr(),
        "gate_stride": gate.stride(0),
        "up_stride": up.stride(0),
        "out_stride": width,
        "rows": rows,
        "width": width,
    }
    blocks = -(-rows * (width // vec) // _THREADS)
    _kernel(gate.dtype, vec)(gate.device.index, (blocks, 1, 1), _THREADS, fields)
    return out
