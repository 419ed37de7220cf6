"""How much of the machine's own memory is free: what a model on a CPU may take."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_ulong),
        ("load", ctypes.c_ulong),
        *((name, ctypes.c_ulonglong) for name in ("total", "available", "a", "b", "c", "d", "e")),
    )


def available_memory() -> int | None:
    """Return the bytes that programs can still take without swapping; None where the system does not say."""
    if sys.platform == "win32":
        status = _MemoryStatus()
        status.length = ctypes.sizeof(status)
        return int(status.available) if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
