"""A directory that appears complete or not at all: written beside its place, renamed into it at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from deepinfer_core.checkpoint.reader import PARTIAL_SUFFIX
from deepinfer_core.errors import CheckpointError

logger = logging.getLogger("deepinfer")

_ATTEMPTS = 8


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that would lose something, before any work.

    Raises:
        CheckpointError: It is a file, or a directory with content and ``overwrite`` is false.
    """
    if destination.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{destination}: names ending in {PARTIAL_SUFFIX} are kept for unfinished outputs")
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination} is a file; give a directory to write to")
    if destination.is_dir() and any(destination.iterdir()) and not overwrite:
        raise CheckpointError(f"{destination} exists and is not empty; choose another directory or pass --overwrite")


@contextlib.contextmanager
def atomic_directory(destination: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a sibling directory to write into; it takes the destination's name when the block ends well.

    On any exception, Ctrl-C included, it is removed. An existing destination is kept until the new one is complete.

    Raises:
        CheckpointError: As `check_destination`.
    """
    check_destination(destination, overwrite=overwrite)
    partial = destination.with_name(destination.name + PARTIAL_SUFFIX)
    if partial.exists():
        logger.warning("%s is left from a run that was killed; it is removed", partial)
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        _move_into_place(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_tree(directory: Path) -> None:
    """Have the system write all files of a directory, and its list of names, to the disk."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    _sync_names(directory)


def _sync_names(directory: Path) -> None:
    if os.name != "posix":
        return  # Windows cannot open a directory for this, and its rename is journaled
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move_into_place(partial: Path, destination: Path) -> None:
    old = destination.with_name(destination.name + ".old")
    if not destination.exists():
        rename(partial, destination)
    elif not any(destination.iterdir()):
        destination.rmdir()
        rename(partial, destination)
    else:
        if old.exists():
            shutil.rmtree(old)
        rename(destination, old)
        try:
            rename(partial, destination)
        except BaseException:
            rename(old, destination)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _sync_names(destination.parent)


def rename(source: Path, target: Path) -> None:
    """Rename, trying again for a second: on Windows a virus scanner or indexer may hold a fresh file for a moment."""
    for attempt in range(_ATTEMPTS):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.01 * 2**attempt)
