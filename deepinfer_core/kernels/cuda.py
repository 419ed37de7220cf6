"""Load and launch CUDA kernels on torch's current stream; with `nvrtc`, the only code that touches CuPy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels import cubin_cache
from deepinfer_core.kernels.nvrtc import INSTALL_HINT, CudaSource, compile_source

if TYPE_CHECKING:
    from collections.abc import Mapping

GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
"""CUDA's limits on the three grid dimensions."""

SHARED_DEFAULT = 48 * 1024
"""Dynamic shared memory of a block, in bytes, above which a kernel must ask for more."""

raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)
"""The handle of a device's current stream alone: `torch.cuda.current_stream` builds an object on every call."""


class CudaKernel:
    """One entry point of one specialized source; compiled and loaded on first use on each device.

    Args:
        source: The file and its macros.
        entry: Name of an ``extern "C"`` kernel.
        shared_bytes: Dynamic shared memory of a block; above 48 KB the limit is raised when it is loaded.
    """

    def __init__(self, source: CudaSource, entry: str, *, shared_bytes: int = 0) -> None:
        self.source = source
        self.entry = entry
        self.shared_bytes = shared_bytes
        self._loaded: dict[int, Any] = {}
        self._lock = threading.Lock()  # of its own: threads may compile different kernels at once

    @classmethod
    def from_file(
        cls,
        path: Path,
        entry: str,
        defines: Mapping[str, object] | None = None,
        *,
        include: tuple[Path, ...] = (),
        shared_bytes: int = 0,
    ) -> CudaKernel:
        """Build a kernel from a file and a mapping of macros."""
        return cls(CudaSource.make(path, defines, include), entry, shared_bytes=shared_bytes)

    def load(self, device: int | None = None) -> Any:
        """Compile (or fetch from the disk cache) and load for a device; idempotent and thread-safe.

        Raises:
            KernelError: No CUDA device, CuPy missing, the source does not compile, or a block cannot have this much
                shared memory on this card.
        """
        index = torch.cuda.current_device() if device is None else device
        function = self._loaded.get(index)
        if function is None:
            with self._lock:
                function = self._loaded.get(index)
                if function is None:
                    function = self._loaded[index] = _load(self.source, self.entry, self.shared_bytes, index)
        return function

    def launch(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        """Launch on torch's current stream of torch's current device.

        Args:
            grid: Blocks in x, y, z; a zero means there is nothing to do and nothing is launched.
            block: Threads of a block in x, y, z.
            args: Kernel arguments in order: ``tensor.data_ptr()`` for pointers, numpy scalars for the rest.
        """
        if 0 in grid:
            return
        if any(size > limit for size, limit in zip(grid, GRID_LIMITS, strict=False)):
            raise KernelError(f"{self.entry}: grid {tuple(grid)} is beyond CUDA's limits {GRID_LIMITS}")
        function = self._loaded.get(torch.cuda.current_device()) or self.load()
        stream = torch.cuda.current_stream().cuda_stream
        function(tuple(grid), tuple(block), tuple(args), shared_mem=self.shared_bytes, stream=_stream(stream))


def require_dense_columns(kernel: str, x: torch.Tensor) -> None:
    """Refuse an input whose columns lie apart: a kernel walks a row from one address.

    Raises:
        KernelError: Names the kernel and the strides.
    """
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise KernelError(f"{kernel}: the columns of x must be contiguous, got strides {x.stride()}; pass a copy")


def _load(source: CudaSource, entry: str, shared_bytes: int, device: int) -> Any:
    cupy = _cupy()
    capability = torch.cuda.get_device_capability(device)
    key = cubin_cache.cache_key(source, capability)
    cubin = cubin_cache.read(key)
    if cubin is None:
        cubin = compile_source(source, capability).cubin
        cubin_cache.write(key, cubin)
    with torch.cuda.device(device), cupy.cuda.Device(device):
        torch.cuda.current_stream()  # torch makes the primary context that CuPy then shares
        module = cupy.cuda.function.Module()
        module.load(cubin)
        function = module.get_function(entry)
        if shared_bytes > SHARED_DEFAULT:
            limit = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
            if shared_bytes > limit:
                raise KernelError(
                    f"{entry} wants {shared_bytes} bytes of shared memory a block; this card allows {limit}"
                )
            cupy.cuda.driver.funcSetAttribute(
                function.ptr, cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
    return function


@functools.cache
def _cupy() -> Any:
    try:
        import cupy

        return cupy
    except Exception as error:
        raise KernelError(f"CUDA kernels need CuPy, which cannot be imported ({error}): {INSTALL_HINT}") from error


@functools.lru_cache(maxsize=256)
def _stream(pointer: int) -> Any:
    """Wrap torch's stream for CuPy; streams live as long as their pool, so a pointer always means the same one."""
    cupy = _cupy()
    wrap = getattr(cupy.cuda.Stream, "from_external", None)
    if wrap is None:  # CuPy 13
        return cupy.cuda.ExternalStream(pointer)

    class _Torch:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, pointer)

    return wrap(_Torch())
