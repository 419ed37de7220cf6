"""Compiled kernels on disk: safe under parallel starts, read-only homes and broken files."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_core.kernels.nvrtc import INCLUDE, compile_options, nvrtc_version

if TYPE_CHECKING:
    from deepinfer_core.kernels.nvrtc import CudaSource
    from deepinfer_core.plugin_api import Capability

log = logging.getLogger("deepinfer.kernels")

CACHE_ENV = "DEEPINFER_CACHE_DIR"
_MAGIC = b"deepinfer-cubin-1\n"
_INCLUDE_LINE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def cache_directory() -> Path:
    """Return where compiled kernels and tuning tables live: ``$DEEPINFER_CACHE_DIR`` or the platform's cache folder."""
    if directory := os.environ.get(CACHE_ENV):
        return Path(directory)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "deepinfer" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer"


def cache_key(source: CudaSource, capability: Capability) -> str:
    """Hash everything that the machine code depends on: text, our own headers, options, NVRTC's version."""
    digest = hashlib.sha256()
    for part in (*_closure(source), *compile_options(source, capability), repr(nvrtc_version())):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def read(key: str) -> bytes | None:
    """Return the cached machine code, or None when there is none or it is damaged (it will be written anew)."""
    path = cache_directory() / "cubin" / f"{key}.bin"
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    payload = blob[len(_MAGIC) + 32 :]
    if blob.startswith(_MAGIC) and hashlib.sha256(payload).digest() == blob[len(_MAGIC) : len(_MAGIC) + 32]:
        return payload
    log.warning("kernel cache file %s is damaged; compiling anew", path.name)
    return None


def write(key: str, cubin: bytes) -> None:
    """Store machine code; written beside its place and renamed, so that a reader never sees half a file."""
    folder = cache_directory() / "cubin"
    temporary: str | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, folder / f"{key}.bin")
    except OSError as error:
        _warn_once(folder, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


_warned: set[str] = set()


def _warn_once(folder: Path, error: OSError) -> None:
    if str(folder) not in _warned:
        _warned.add(str(folder))
        log.warning(
            "compiled kernels cannot be kept in %s (%s); every start compiles them again. Set %s to a writable folder",
            folder,
            error.strerror,
            CACHE_ENV,
        )


def _closure(source: CudaSource) -> list[str]:
    """Return the source's text and that of every quoted include found in our own include directories."""
    texts = [source.text()]
    seen: set[str] = set()
    pending = _INCLUDE_LINE.findall(texts[0])
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for folder in (source.path.parent, INCLUDE, *source.include):
            if (folder / name).is_file():
                texts.append((folder / name).read_text(encoding="utf-8"))
                pending += _INCLUDE_LINE.findall(texts[-1])
                break
    return texts
