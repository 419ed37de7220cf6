"""A text file that a reader sees old or new, never half of one."""

from __future__ import annotations

import os
import time
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file under another name and put it in its place; directories above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        _replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _replace(source: Path, target: Path, attempts: int = 5) -> None:
    for attempt in range(attempts):
        try:
            source.replace(target)
            return
        except PermissionError:  # on Windows a reader or a virus scanner may hold the target for a moment
            if attempt == attempts - 1:
                raise
            time.sleep(0.05 * (attempt + 1))
