"""Launch a loaded kernel with one struct by value through the driver, optionally before its predecessor has ended."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

from deepinfer_core.errors import KernelError

_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DEPENDENT_DRIVER = 12_030
"""Driver from which a dependent launch may be captured in a graph."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise KernelError(
            f"the CUDA driver library {name} cannot be loaded ({error}); is a driver installed?"
        ) from error


@functools.cache
def dependent_launch_available(capability: tuple[int, int]) -> bool:
    """Return whether kernels on this card may start before their predecessor has ended (9.0 and newer)."""
    if capability < (9, 0):
        return False
    version = ctypes.c_int()
    return _driver().cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= _DEPENDENT_DRIVER


class StructLaunch:
    """One grid of one kernel with its argument struct; only pointers and the stream change between calls.

    Everything that a launch needs is made here, once: a call writes the stream's handle and enters the driver.

    Attributes:
        args: The kernel's argument; the caller writes into it before each launch.
        lock: Held by a caller from writing ``args`` until the launch has returned: threads share the struct.

    Args:
        function: The driver's function handle.
        grid: Blocks in x, y, z.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        args: The kernel's argument.
        dependent: Start before the predecessor on the stream has ended; the kernel must wait before it reads anything
            that changes.
        cluster: Blocks of a cluster along y (9.0 and newer); 1 for none.
    """

    def __init__(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        args: ctypes.Structure,
        *,
        dependent: bool,
        cluster: int = 1,
    ) -> None:
        self.args = args
        self.lock = threading.Lock()
        self._function = ctypes.c_void_p(function)
        wanted: list[tuple[int, tuple[int, ...]]] = [(_DEPENDENT, (1,))] if dependent else []
        if cluster > 1:
            wanted.append((_CLUSTER, (1, cluster, 1)))
        self._attributes = (_Attribute * 2)()
        for attribute, (number, values) in zip(self._attributes, wanted, strict=False):
            attribute.id = number
            attribute.value[: len(values)] = values
        self._config = _Config(grid=grid, block=(threads, 1, 1), shared_bytes=shared_bytes, attribute_count=len(wanted))
        self._config.attributes = self._attributes
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._config_pointer = ctypes.byref(self._config)
        self._launch = _driver().cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        """Launch on a stream.

        Raises:
            KernelError: The driver refused.
        """
        self._config.stream = stream
        status = self._launch(self._config_pointer, self._function, self._parameters, None)
        if status != 0:
            raise KernelError(f"the CUDA driver refused a launch with error {status}; grid {tuple(self._config.grid)}")
