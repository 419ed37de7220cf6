"""Runs a tensor-core kernel's own source on a CPU, through g++ and the stand-in for its PTX; for tests, and slow."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from deepinfer_core.kernels.nvrtc import INCLUDE

EMULATION = Path(__file__).parent / "include"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

# What is PTX outside of ptx.cuh, or a CUDA keyword that g++ has no word for.
_REPLACED = (
    (r"extern __shared__ __align__\(128\) u8 (\w+)\[\];", r"u8* const \1 = shared_memory();"),
    (r"__shared__ u32 arrived;", "u32& arrived = arrived_of_block();"),
    (r'asm volatile\("ld\.global\.nc[^;]*;"[^;]*;', "memcpy(&v, p, sizeof(v));"),
    (r'asm\("(?:fma\.rn\.bf16x2|sub\.f16x2)[^;]*;"[^;]*;', "r = act_minus(a, BF16 ? off ^ 0x80008000 : off);"),
)


@functools.cache
def build(source: Path, entry: str, struct: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile a kernel for this machine, once a set of macros."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))
    for header in INCLUDE.glob("*.cuh"):
        text = header.read_text(encoding="utf-8")
        for pattern, replacement in _REPLACED:
            text = re.sub(pattern, replacement, text)
        (folder / header.name).write_text(text, encoding="utf-8")
    shutil.copy(EMULATION / "ptx.cuh", folder / "ptx.cuh")
    go = (
        f'\nextern "C" void go(const {struct}* p, int x, int y, int z, int threads, int cluster, int shared) {{\n'
        f"  emulate({{x, y, z}}, threads, cluster, shared, [&]() {{ {entry}(*p); }});\n}}\n"
    )
    (folder / "kernel.cpp").write_text(source.read_text(encoding="utf-8") + go, encoding="utf-8")
    library = folder / "kernel.so"
    macros = [f"-D{name}={value}" for name, value in defines]
    command = ["g++", "-O2", "-w", "-std=c++17", "-shared", "-fPIC", f"-I{folder}", *macros]
    done = subprocess.run(
        [*command, str(folder / "kernel.cpp"), "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def launch(
    source: Path,
    entry: str,
    args: ctypes.Structure,
    struct: str,
    defines: Mapping[str, int],
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    *,
    cluster: int = 1,
) -> None:
    """Run every block of a grid, one cluster after another."""
    library = build(source, entry, struct, tuple(sorted(defines.items())))
    library.go(ctypes.byref(args), *grid, threads, cluster, shared_bytes)
