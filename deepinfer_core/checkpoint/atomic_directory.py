"""A directory that appears complete or not at all: written beside its place, renamed into it at the end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deepinfer_core.checkpoint.reader import PARTIAL_SUFFIX
from deepinfer_core.errors import CapacityError, CheckpointError, DeepinferError

logger = logging.getLogger("deepinfer")

_ATTEMPTS = 8


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that would lose something or cannot be, before any work.

    Raises:
        CheckpointError: It is a file, below one, a directory with content and ``overwrite`` is false, or no possible
            path.
    """
    if destination.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{destination}: names ending in {PARTIAL_SUFFIX} are kept for unfinished outputs")
    try:
        if destination.exists() and not destination.is_dir():
            raise CheckpointError(f"{destination} is a file; give a directory to write to")
        if destination.is_dir() and any(destination.iterdir()) and not overwrite:
            raise CheckpointError(
                f"{destination} exists and is not empty; choose another directory or pass --overwrite"
            )
        above = next(path for path in (destination, *destination.parents) if path.exists())
        if not above.is_dir():
            raise CheckpointError(f"{destination} cannot be made: {above} is a file")
    except OSError as error:
        raise _cannot_write(destination, error) from error


@contextlib.contextmanager
def atomic_directory(destination: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a sibling directory to write into; it takes the destination's name when the block ends well.

    On any exception, Ctrl-C included, it is removed. An existing destination is kept until the new one is complete.

    Raises:
        CheckpointError: As `check_destination`; another run is writing there; or the system refuses to write.
        CapacityError: The disk is full.
    """
    check_destination(destination, overwrite=overwrite)
    partial = destination.with_name(destination.name + PARTIAL_SUFFIX)
    try:
        with _claimed(partial):
            try:
                check_destination(destination, overwrite=overwrite)  # another run may have finished meanwhile
                yield partial
                sync_tree(partial)
                _move_into_place(partial, destination)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise _cannot_write(destination, error) from error


def _cannot_write(destination: Path, error: OSError) -> DeepinferError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{destination} cannot be written: {error}; make room or choose another disk")
    return CheckpointError(f"{destination} cannot be written: {error}; choose another directory")


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Make the directory, empty, and hold a lock on it that ends with this process, however that ends.

    What stands in a directory without a lock is left from a run that was killed. Windows has no such lock, but does
    not remove a file that another run is writing.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        if sys.platform != "win32":
            handle = os.open(partial, os.O_RDONLY)
            held.callback(os.close, handle)
            _lock(handle, partial)
        left = list(partial.iterdir())
        if left:
            logger.warning("%s is left from a run that was killed; it is replaced", partial)
        for path in left:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield


def _lock(handle: int, partial: Path) -> None:
    """Lock an open directory, or say that another run has it; the name may speak of another one by now."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.path.samestat(os.fstat(handle), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        mine = False
    if not mine:
        raise CheckpointError(f"another run is writing {partial}; wait for it or choose another directory")


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
    old = destination.with_name(f"{destination.name}.old{PARTIAL_SUFFIX}")  # a name that no user's directory has
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
