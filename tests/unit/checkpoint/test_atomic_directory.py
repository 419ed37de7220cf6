"""A converted model appears complete or not at all."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from deepinfer_core.checkpoint import atomic_directory as module
from deepinfer_core.checkpoint.atomic_directory import atomic_directory, check_destination
from deepinfer_core.errors import CapacityError, CheckpointError


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_the_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with atomic_directory(target) as partial:
        assert partial == tmp_path / "deep" / "model.partial"
        (partial / "a").write_text("x")
        assert not target.exists()
    assert names(tmp_path / "deep") == ["model"]
    assert names(target) == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, CheckpointError])
def test_nothing_is_left_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "model"

    def write() -> None:
        with atomic_directory(target) as partial:
            (partial / "a").write_text("x")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == []


def test_an_existing_directory_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with atomic_directory(target, overwrite=True) as partial:
        (partial / "new").write_text("x")
        assert names(target) == ["old"]
    assert names(tmp_path) == ["model"]
    assert names(target) == ["new"]


def test_an_existing_directory_survives_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with pytest.raises(KeyboardInterrupt), atomic_directory(target, overwrite=True):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["model"]
    assert names(target) == ["old"]


def test_an_existing_directory_survives_a_failure_of_the_last_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    real = os.replace

    def replace(source: Path, destination: Path) -> None:
        if Path(source).name == "model.partial":
            raise OSError("disk went away")
        real(source, destination)

    monkeypatch.setattr(module.os, "replace", replace)
    with (
        pytest.raises(CheckpointError, match=r"model cannot be written: disk went away"),
        atomic_directory(target, overwrite=True),
    ):
        pass
    assert names(tmp_path) == ["model"]
    assert names(target) == ["old"]


def test_a_file_held_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.replace, []

    def replace(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) < 3:
            raise PermissionError("in use")
        real(source, destination)

    monkeypatch.setattr(module.os, "replace", replace)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    with atomic_directory(tmp_path / "model"):
        pass
    assert len(calls) == 3
    assert names(tmp_path) == ["model"]


def test_an_empty_directory_may_be_written_to_and_a_left_over_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "stale").write_text("x")
    with atomic_directory(target) as partial:
        (partial / "a").write_text("x")
    assert names(tmp_path) == ["model"]
    assert names(target) == ["a"]


def test_a_destination_that_would_lose_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"is not empty; choose another directory or pass --overwrite"):
        check_destination(tmp_path, overwrite=False)
    check_destination(tmp_path, overwrite=True)
    with pytest.raises(CheckpointError, match=r"is a file"):
        check_destination(tmp_path / "file", overwrite=True)
    with pytest.raises(CheckpointError, match=r"kept for unfinished outputs"):
        check_destination(tmp_path / "x.partial", overwrite=True)


def test_a_destination_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"model cannot be made: .*file is a file"):
        check_destination(tmp_path / "file" / "deep" / "model", overwrite=False)
    check_destination(Path(tmp_path.anchor), overwrite=True)  # it has no parents; what lies in it is its caller's
    with pytest.raises(CheckpointError, match=r"cannot be written: .*[Ll]ong"):
        check_destination(tmp_path / ("x" * 300), overwrite=False)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EROFS, CheckpointError), (errno.EIO, CheckpointError)]
)
def test_what_the_system_refuses_is_an_error_of_ours(tmp_path: Path, number: int, error: type[Exception]) -> None:
    def write() -> None:
        with atomic_directory(tmp_path / "model") as partial:
            (partial / "a").write_text("x")
            raise OSError(number, os.strerror(number))

    with pytest.raises(error, match=r"model cannot be written: "):
        write()
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows itself keeps a file that is being written")
def test_a_second_run_does_not_touch_what_the_first_is_writing(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model") as partial:
        (partial / "a").write_text("x")
        with (
            pytest.raises(CheckpointError, match=r"another run is writing .*model\.partial"),
            atomic_directory(tmp_path / "model"),
        ):
            pass
        assert names(partial) == ["a"]
    assert names(tmp_path) == ["model"]


def test_a_result_that_another_run_finished_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, real = tmp_path / "model", module.check_destination
    checks = []

    def check(destination: Path, *, overwrite: bool) -> None:
        real(destination, overwrite=overwrite)
        checks.append(destination)
        if len(checks) == 1:
            target.mkdir()
            (target / "theirs").write_text("x")

    monkeypatch.setattr(module, "check_destination", check)
    with pytest.raises(CheckpointError, match="is not empty"), atomic_directory(target):
        pass
    assert names(tmp_path) == ["model"]
    assert names(target) == ["theirs"]


def test_a_directory_named_old_beside_it_is_nobodys_business(tmp_path: Path) -> None:
    for name in ("model", "model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    with atomic_directory(tmp_path / "model", overwrite=True) as partial:
        (partial / "new").write_text("x")
    assert names(tmp_path) == ["model", "model.old"]
    assert names(tmp_path / "model.old") == ["mine"]
