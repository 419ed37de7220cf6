"""Scratch memory of kernels: one buffer a kernel and stream, shared by every layer that runs it there."""

from __future__ import annotations

import torch

from deepinfer_core.kernels.cuda import raw_stream


class Workspaces:
    """Zeroed scratch bytes on one device.

    Launches of one kernel on one stream run one after another, so they may share a buffer; two streams (lanes) may
    not, and neither may two kernels: one may rely on what it left there, such as counters at zero.

    Args:
        device: Where the buffers live.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._index: int | None = self.device.index
        self._sizes: dict[str, int] = {}
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def reserve(self, kernel: str, nbytes: int) -> None:
        """Say that a kernel will need this many bytes; the largest wish of its layers counts."""
        self._sizes[kernel] = max(nbytes, self._sizes.get(kernel, 0))

    def get(self, kernel: str) -> torch.Tensor | None:
        """Return the buffer of a kernel for the current stream, made and zeroed on first use; None for none."""
        stream = 0
        if self.device.type == "cuda":
            if self._index is None:
                self._index = torch.cuda.current_device()
            stream = raw_stream(self._index)
        buffer = self._buffers.get((kernel, stream))
        size = self._sizes.get(kernel, 0)
        if buffer is None or buffer.numel() < size:
            if size == 0:
                return None
            buffer = self._buffers[kernel, stream] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far, on all streams."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
