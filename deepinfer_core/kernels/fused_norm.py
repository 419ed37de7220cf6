"""RMSNorm on a card, with the residual add in front of it in the same launch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from deepinfer_core.kernels.struct_kernel import StructKernel

_THREADS = 1024
_SOURCE = Path(__file__).parent / "csrc" / "rms_norm.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "delta", "weight", "y")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "delta_stride", "y_stride")),
        ("width", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


def norm_defines(width: int, dtype: torch.dtype, *, aligned: bool = True) -> dict[str, int]:
    """Return the macros for a row width: elements an access and accesses a thread."""
    vec = 8 if aligned and width % 8 == 0 else 1
    return {"BF16": int(dtype == torch.bfloat16), "VEC": vec, "PER": -(-width // (vec * _THREADS))}


@functools.cache
def _kernel(width: int, dtype: torch.dtype, aligned: bool) -> tuple[StructKernel, int]:
    defines = norm_defines(width, dtype, aligned=aligned)
    packs = -(-width // defines["VEC"])
    threads = -(-packs // (32 * defines["PER"])) * 32
    return StructKernel(_SOURCE, "rms_norm", _Args, defines), threads


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of ``x + delta``, having stored ``x + delta`` (rounded to x's dtype) in x.

    Args:
        x: ``[rows, width]``, FP16 or BF16 on a card; rows may be strided, columns are contiguous.
        weight: ``[width]`` in the same dtype.
        eps: Added to the mean square, which is taken in float32.
        delta: ``[rows, width]`` in the same dtype, or None: then x is only read.
    """
    rows, width = x.shape
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    pointers = x.data_ptr() | weight.data_ptr() | (0 if delta is None else delta.data_ptr())
    strides = x.stride(0) | (0 if delta is None else delta.stride(0))
    aligned = pointers % 16 == 0 and strides % 8 == 0
    kernel, threads = _kernel(width, x.dtype, aligned)
    assert x.stride(1) == 1 and (delta is None or delta.stride(1) == 1), "columns lie apart"  # noqa: PT018
    fields = {
        "x": x.data_ptr(),
        "delta": None if delta is None else delta.data_ptr(),
        "weight": weight.data_ptr(),
        "y": y.data_ptr(),
        "x_stride": x.stride(0),
        "delta_stride": 0 if delta is None else delta.stride(0),
        "y_stride": width,
        "width": width,
        "eps": eps,
    }
    kernel(x.device.index, (rows, 1, 1), threads, fields)
    return y
