"""The measured table: preferred by selection, written whole, read with tolerance."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.plugin_api import MRange
from deepinfer_core.registry.dispatch import FALLBACK
from deepinfer_core.registry.select import Selection, select_linear
from deepinfer_core.registry.tuning import Timing, Timings, problem_key, timings_path


def measured(build: Any, times: dict[str, dict[int, float]], version: str = "1.0") -> Timings:
    key = problem_key(build.problem())
    entries = [
        Timing(problem=key, kernel=kernel, version=version, m=m, us=us)
        for kernel, by_m in times.items()
        for m, us in by_m.items()
    ]
    return Timings("card", tuple(entries))


def rows(selection: Selection) -> list[tuple[str, str, str, float | None]]:
    return [(str(r.m), r.kernel.spec.name, r.why, r.measured_us) for r in selection.table.rows]


def test_measured_times_beat_priority_and_are_marked(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", priority=9), build.kernel("w.b"))
    times = measured(build, {"w.a": {1: 5.0, 8: 50.0}, "w.b": {1: 7.0, 8: 20.0}})
    assert rows(select_linear(found, build.problem(), timings=times)) == [
        ("1", "w.a", "measured", 5.0),
        ("2..64", "w.b", "measured", 20.0),
    ]


def test_a_kernel_that_alone_was_measured_is_preferred(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", priority=9), build.kernel("w.b"))
    selection = select_linear(found, build.problem(), timings=measured(build, {"w.b": {1: 7.0}}))
    assert rows(selection) == [("1..64", "w.b", "measured", 7.0)]


def test_equal_times_fall_back_to_priority(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", priority=9), build.kernel("w.b"))
    times = measured(build, {"w.a": {1: 7.0}, "w.b": {1: 7.0}})
    assert rows(select_linear(found, build.problem(), timings=times)) == [("1..64", "w.a", "priority 9", 7.0)]


def test_figures_of_another_version_or_shape_do_not_count(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", priority=9), build.kernel("w.b"))
    old = measured(build, {"w.b": {1: 1.0}}, version="0.9")
    assert rows(select_linear(found, build.problem(), timings=old))[0][1:3] == ("w.a", "priority 9")
    other_shape = measured(build, {"w.b": {1: 1.0}})
    assert rows(select_linear(found, build.problem(n=128), timings=other_shape))[0][1] == "w.a"


def test_figures_never_let_a_kernel_serve_what_it_does_not(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 4)), build.kernel("w.b"))
    selection = select_linear(found, build.problem(), timings=measured(build, {"w.a": {1: 1.0}, "w.b": {1: 9.0}}))
    assert [(r[0], r[1]) for r in rows(selection)] == [("1..4", "w.a"), ("5..64", "w.b")]


def test_the_layout_with_the_better_mean_wins_even_if_it_loses_at_one_row(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.a", priority=9),
        build.kernel("w.b", layout="w.v2"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    times = measured(build, {"w.a": {1: 10.0, 64: 500.0}, "w.b": {1: 10.1, 64: 100.0}})
    assert select_linear(found, build.problem(), timings=times).layout.spec.name == "w.v2"
    assert select_linear(found, build.problem()).layout.spec.name == "w.v1"


def test_a_measured_fallback_counts_for_the_layout_that_needs_it(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.a", MRange(1, 1), priority=9),
        build.kernel("w.b", layout="w.v2"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    times = measured(build, {"w.a": {1: 9.0}, "w.b": {1: 10.0, 64: 100.0}})
    slow = Timings(
        "card",
        (
            *times.entries,
            Timing(
                problem=problem_key(build.problem()),
                kernel=f"{FALLBACK}@w.v1",
                version=core_version(),
                m=64,
                us=900.0,
            ),
        ),
    )
    assert select_linear(found, build.problem(), timings=slow).layout.spec.name == "w.v2"
    assert rows(select_linear(found, build.problem(), timings=times))[0][1] == "w.a"


def core_version() -> str:
    from deepinfer_core import __version__

    return __version__


@pytest.mark.parametrize(("m", "us"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 4.0), (5, 9.0), (9, 9.0), (4096, 9.0)])
def test_between_measured_rows_the_next_larger_counts(build: Any, m: int, us: float) -> None:
    times = measured(build, {"w.a": {1: 1.0, 2: 2.0, 4: 4.0, 9: 9.0}})
    assert times.lookup(build.problem(), m, "w.a", "1.0") == us


def test_what_was_not_measured_is_none(build: Any) -> None:
    assert measured(build, {"w.a": {1: 1.0}}).lookup(build.problem(), 1, "w.b", "1.0") is None


def test_a_table_survives_writing_and_reading(build: Any, tmp_path: Path) -> None:
    path = timings_path("NVIDIA GeForce RTX 3050 Laptop GPU", tmp_path)
    assert path.name == "nvidia-geforce-rtx-3050-laptop-gpu.json"
    times = measured(build, {"w.a": {1: 1.5, 2: 2.0}})
    times.write(path)
    assert Timings.read(path) == times
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_merging_replaces_what_was_measured_again(build: Any) -> None:
    old, new = measured(build, {"w.a": {1: 1.0, 2: 2.0}}), measured(build, {"w.a": {2: 3.0}})
    merged = old.merged(new.entries)
    assert [merged.lookup(build.problem(), m, "w.a", "1.0") for m in (1, 2)] == [1.0, 3.0]


def test_a_failed_write_leaves_the_old_table_and_no_scrap(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    old = measured(build, {"w.a": {1: 1.0}})
    old.write(path)

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError("held by another process")

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(PermissionError):
        measured(build, {"w.a": {1: 2.0}}).write(path)
    assert Timings.read(path) == old
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_missing_table_is_an_empty_one_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Timings.read(tmp_path / "none.json") == Timings()
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "JSONDecodeError"),
        (b'{"format_version": 1, "entries": [', "JSONDecodeError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"[]", "not an object"),
        (b'{"format_version": 1}', "list of entries"),
        (b'{"format_version": 99, "entries": []}', "format_version is 99"),
    ],
)
def test_a_broken_table_is_ignored_with_one_warning_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, cause: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert Timings.read(path) == Timings()
    (record,) = caplog.records
    for part in (str(path), cause, "deepinfer tune"):
        assert part in record.getMessage()


def test_malformed_entries_are_counted_and_the_others_kept(
    build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    times = measured(build, {"w.a": {1: 1.0}})
    times.write(path)
    content = json.loads(path.read_text())
    good = content["entries"][0]
    bad = [3, {}, good | {"us": -1}, good | {"us": "fast"}, good | {"m": 0}, good | {"m": True}, good | {"us": 1e999}]
    content["entries"] += bad
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert Timings.read(path) == times
    assert f"{len(bad)} of {len(bad) + 1} measurements" in caplog.text
