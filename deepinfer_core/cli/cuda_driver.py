"""Asks the NVIDIA driver which cards are here, through ctypes: no torch, no CuPy, no toolkit."""

from __future__ import annotations

import ctypes
import sys

from attrs import frozen

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h


@frozen(kw_only=True)
class Card:
    """One CUDA device.

    Attributes:
        name: As the driver reports it.
        capability: Compute capability.
        memory: Total bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int


@frozen(kw_only=True)
class Driver:
    """What the driver says.

    Attributes:
        cards: Devices that programs of this process can use.
        cuda: Newest CUDA version that it supports; None without a driver.
        problem: Why there are no cards; None when there are.
    """

    cards: tuple[Card, ...] = ()
    cuda: tuple[int, int] | None = None
    problem: str | None = None


def ask_driver() -> Driver:
    """Return the driver's cards; never raises for a machine without them."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return Driver(problem=f"no NVIDIA driver ({library} is not there)")
    code = cuda.cuInit(0)
    if code:
        return Driver(problem=f"the NVIDIA driver does not start (cuInit returned {code})")
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cards = tuple(_card(cuda, index) for index in range(count.value))
    supported = version.value // 1000, version.value % 1000 // 10
    return Driver(cards=cards, cuda=supported, problem=None if cards else "the driver reports no card")


def _card(cuda: ctypes.CDLL, index: int) -> Card:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Card(name=name.value.decode(errors="replace"), capability=(major.value, minor.value), memory=memory.value)
