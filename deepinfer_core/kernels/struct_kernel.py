"""A CUDA kernel that takes one struct, launched on the current stream, if possible before its predecessor has ended."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.cuda import GRID_LIMITS, CudaKernel
from deepinfer_core.kernels.struct_launch import StructLaunch, dependent_launch_available

# The stream's handle alone: `torch.cuda.current_stream` builds an object on every call.
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)


class _AnyGrid(StructLaunch):
    """A launch whose grid is set anew each time."""

    def resize(self, grid: tuple[int, int, int], threads: int) -> None:
        """Set blocks and threads for the launches that follow."""
        config = self._config
        config.grid[0], config.grid[1], config.grid[2] = grid
        config.block[0] = threads


class StructKernel:
    """One kernel whose grid and arguments change from launch to launch.

    The kernel must wait for its predecessor (``wait_for_predecessor`` of ``ptx.cuh``) before it reads or writes
    anything but constants.

    Args:
        path: The ``.cu`` file.
        entry: Its ``extern "C"`` kernel.
        args: The struct that it takes by value.
        defines: Macros.
        include: More include directories.
        constants: Fields of the struct that never change.
    """

    def __init__(
        self,
        path: Path,
        entry: str,
        args: type[ctypes.Structure],
        defines: Mapping[str, object],
        *,
        include: tuple[Path, ...] = (),
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.kernel = CudaKernel.from_file(path, entry, defines, include=include)
        self._args = args
        self._constants = dict(constants or {})
        self._lock = threading.Lock()
        self._launches: dict[int, _AnyGrid] = {}

    def load(self, device: int) -> _AnyGrid:
        """Compile and load for a device, once."""
        found = self._launches.get(device)
        if found is None:
            function = self.kernel.load(device)
            found = self._launches[device] = _AnyGrid(
                int(function.ptr),
                (1, 1, 1),
                32,
                self.kernel.shared_bytes,
                self._args(**self._constants),
                dependent=dependent_launch_available(torch.cuda.get_device_capability(device)),
            )
        return found

    def __call__(self, device: int, grid: tuple[int, int, int], threads: int, fields: Mapping[str, object]) -> None:
        """Launch on the device's current stream; an empty grid launches nothing.

        Args:
            device: Index of the device.
            grid: Blocks in x, y, z.
            threads: Threads of a block.
            fields: Values of the struct's fields; pointers as ``data_ptr()``, None for a null pointer.

        Raises:
            KernelError: The grid is beyond CUDA's limits, or the driver refused.
        """
        if 0 in grid:
            return
        if grid[1] > GRID_LIMITS[1] or grid[2] > GRID_LIMITS[2] or grid[0] > GRID_LIMITS[0]:
            raise KernelError(f"{self.kernel.entry}: grid {grid} is beyond CUDA's limits {GRID_LIMITS}")
        launch = self._launches.get(device) or self.load(device)
        with self._lock:  # threads share the struct
            for name, value in fields.items():
                setattr(launch.args, name, value)
            launch.resize(grid, threads)
            launch(_raw_stream(device))
