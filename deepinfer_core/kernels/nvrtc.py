"""CUDA C++ to machine code through NVRTC: needs no GPU and no CUDA toolkit, only the pip packages' headers."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from deepinfer_core.errors import KernelError

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import Capability

INCLUDE = Path(__file__).parent / "include"
"""Device code that core offers to every kernel author; always on the include path."""

INSTALL_HINT = "pip install deepinfer-core[cuda12] (or [cuda13] for a CUDA 13 driver)"

_compiled: list[str] = []  # what this process has compiled, for `compilations`


@frozen(kw_only=True)
class CudaSource:
    """A CUDA C++ file and what specializes it.

    Attributes:
        path: The ``.cu`` file.
        defines: Macros; part of the cache key, so each set of values is a kernel of its own.
        include: More include directories (a plugin's own ``csrc``).
    """

    path: Path
    defines: tuple[tuple[str, str], ...] = ()
    include: tuple[Path, ...] = ()

    @classmethod
    def make(
        cls, path: Path, defines: Mapping[str, object] | None = None, include: tuple[Path, ...] = ()
    ) -> CudaSource:
        """Build a source from a mapping of macros; values are written with ``str``."""
        return cls(path=path, defines=tuple(sorted((k, str(v)) for k, v in (defines or {}).items())), include=include)

    def text(self) -> str:
        """Return the file's text.

        Raises:
            KernelError: The file cannot be read.
        """
        try:
            return self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise KernelError(
                f"kernel source {self.path.name} cannot be read ({error.strerror}); reinstall the plugin that ships it"
            ) from error


@frozen(kw_only=True)
class KernelResources:
    """What one kernel needs of a multiprocessor, as the assembler reported it.

    Attributes:
        registers: Registers of a thread.
        spill_bytes: Bytes spilled to local memory, stores and loads together; 0 is the rule of this house.
        stack_bytes: Stack frame of a thread in bytes.
        shared_bytes: Static shared memory of a block in bytes.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@frozen(kw_only=True)
class Compiled:
    """Machine code for one architecture, with the assembler's report on each kernel in it."""

    cubin: bytes
    resources: Mapping[str, KernelResources]


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version.

    Raises:
        KernelError: CuPy or NVRTC is not installed.
    """
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def compilations() -> int:
    """Return how many sources this process has compiled."""
    return len(_compiled)


@functools.cache
def available() -> bool:
    """Return whether CuPy and NVRTC are here, so that kernels can be compiled."""
    try:
        return nvrtc_version() > (0, 0)
    except KernelError:
        return False


def compile_source(source: CudaSource, capability: Capability) -> Compiled:
    """Compile for one compute capability.

    Args:
        source: What to compile.
        capability: For example ``(8, 6)``. 9.0 compiles for ``sm_90`` (no architecture-specific features).

    Raises:
        KernelError: NVRTC or a header is missing, or the source does not compile (the compiler's log is in the text).
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source.text(), source.path.name, [], [])
    try:
        try:
            with _plain_temporary_directory():
                nvrtc.compileProgram(program, compile_options(source, capability))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelError(_explain(source, capability, log)) from error
        log = nvrtc.getProgramLog(program)
        _compiled.append(source.path.name)
        return Compiled(cubin=nvrtc.getCUBIN(program), resources=parse_resources(log))
    finally:
        nvrtc.destroyProgram(program)


def compile_options(source: CudaSource, capability: Capability) -> tuple[str, ...]:
    """Return the compiler's options in the order that it gets them."""
    includes = [INCLUDE, *source.include, *toolkit_headers()]
    return (
        "-std=c++17",
        f"-arch=sm_{capability[0]}{capability[1]}",
        "--ptxas-options=-v",
        "-default-device",
        *(f"-I{path}" for path in includes),
        *(f"-D{name}={value}" for name, value in source.defines),
    )


@functools.cache
def toolkit_headers() -> tuple[Path, ...]:
    """Return the directories that hold ``cuda_fp16.h`` and what it includes, pip's packages first.

    Raises:
        KernelError: None is found; names the header and the remedy.
    """
    candidates: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates += [Path(root) / "cuda_runtime" / "include", *sorted(Path(root).glob("cu1*/include"), reverse=True)]
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if variable in os.environ:
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for path in candidates:
        if (path / "cuda_fp16.h").is_file():
            return (path,)
    raise KernelError(
        "the header cuda_fp16.h was not found, so CUDA kernels cannot be compiled; it comes with the package "
        f"nvidia-cuda-runtime-cu12: {INSTALL_HINT}. Looked in: {', '.join(map(str, candidates))}"
    )


_FUNCTION = re.compile(r"Compiling entry function '([^']+)'|Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Read ``--ptxas-options=-v``'s report: one entry a kernel."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            name = match[1] or match[2]
            found.setdefault(name, {"registers": 0, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0})
        elif match := _STACK.search(line):
            found[name]["stack_bytes"] = int(match[1])
            found[name]["spill_bytes"] = int(match[2]) + int(match[3])
        elif match := _USED.search(line):
            found[name]["registers"] = int(match[1])
            found[name]["shared_bytes"] = int(match[2] or 0)
    return {key: KernelResources(**value) for key, value in found.items()}


@functools.cache
def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()  # the library itself is found at the first call, not at import
    except Exception as error:
        raise KernelError(
            f"CUDA kernels need CuPy and NVRTC, which cannot be loaded ({error}): {INSTALL_HINT}"
        ) from error
    return nvrtc


def _explain(source: CudaSource, capability: Capability, log: str) -> str:
    if match := re.search(r'(?:could not|cannot) open source file "([^"]+)"', log):
        return f"{source.path.name} includes {match[1]}, which was not found; {INSTALL_HINT}"
    macros = " ".join(f"{k}={v}" for k, v in source.defines)
    return f"{source.path.name} ({macros}) does not compile for sm_{capability[0]}{capability[1]}:\n{log.strip()}"


class _plain_temporary_directory:  # noqa: N801 - reads as the context manager that it is
    """NVRTC's assembler writes temporary files and fails in a directory whose name is not ASCII; lend it another."""

    def __enter__(self) -> None:
        self._saved = {name: os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")}
        if tempfile.gettempdir().isascii() and all(v is None or v.isascii() for v in self._saved.values()):
            return
        fallback = next((d for d in ("/tmp", "C:\\Windows\\Temp", ".") if os.path.isdir(d)), ".")
        for name in self._saved:
            os.environ[name] = fallback

    def __exit__(self, *_: object) -> None:
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
