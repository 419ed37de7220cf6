"""GGUF's 4-bit blocks as canonical ``w4a16`` tensors: the same codes and scales, only rearranged.

A Q4_0 or Q4_1 block holds 32 values of a row: an FP16 scale d (Q4_1: and an FP16 minimum m), then 16 bytes whose low
nibbles are codes 0..15 and whose high nibbles are codes 16..31. Ours has even k in the low and odd k in the high
nibble.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepinfer_core.errors import CheckpointError

GROUP = 32
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20}

Arrays = dict[str, npt.NDArray[np.generic]]


def w4a16_from_q4(raw: npt.NDArray[np.uint8], kind: str, where: str) -> Arrays:
    """Return ``packed`` uint8 ``[N, K/2]``, ``scales`` float16 ``[N, K/32]`` and, of Q4_1, ``zeros`` likewise.

    Q4_0 is ``(code - 8) * d``: signed codes without zeros. Q4_1 is ``code * d + m``: the zero is ``-m / d`` in code
    units, rounded to FP16 (error at most 2^-11 |zero| d). Where that overflows FP16, the block is constant or nearly
    so, and is stored as scale = its value, code 1, zero 0.

    Args:
        raw: The tensor's bytes, ``[N, K / 32 * block bytes]``.
        kind: ``"Q4_0"`` or ``"Q4_1"``.
        where: File and tensor for error messages.

    Raises:
        CheckpointError: A block's scale or minimum is not finite.
    """
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, _BLOCK_BYTES[kind])
    scales = _halves(blocks, 0)
    nibbles = blocks[:, :, -16:]
    low, high = np.bitwise_and(nibbles, 15, dtype=np.uint8), np.right_shift(nibbles, 4, dtype=np.uint8)
    if kind == "Q4_0":
        _require_finite(scales, where)
        packed = _joined(low, high) ^ np.uint8(0x88)  # nibble - 8 in two's complement is nibble xor 8
        return {"packed": packed.reshape(rows, -1), "scales": scales}
    minima = _halves(blocks, 2)
    _require_finite(scales, where)
    _require_finite(minima, where)
    packed = _joined(low, high)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = (-minima.astype(np.float64) / scales.astype(np.float64)).astype(np.float16)
    constant = ~np.isfinite(zeros)
    if constant.any():
        mean = (low[constant].sum(-1, dtype=np.float64) + high[constant].sum(-1, dtype=np.float64)) / GROUP
        value = minima[constant].astype(np.float64) + mean * scales[constant].astype(np.float64)
        scales[constant] = np.clip(value, -65504, 65504).astype(np.float16)
        zeros[constant] = 0
        packed[constant] = 0x11  # code 1 in both nibbles
    return {"packed": packed.reshape(rows, -1), "scales": scales, "zeros": zeros}


def _halves(blocks: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.float16]:
    """Return the FP16 at a byte offset of every block, as a copy."""
    return np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view("<f2")[:, :, 0].copy()


def _joined(low: npt.NDArray[np.uint8], high: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Join codes 0..15 and 16..31 of each block into 16 bytes, even k in the low nibble."""
    codes = np.concatenate([low, high], axis=-1)
    joined: npt.NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return joined


def _require_finite(values: npt.NDArray[np.float16], where: str) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{where}: a block's scale is not finite; the file is damaged")
