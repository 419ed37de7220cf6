"""Result files and what they say about runs and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.bench.meta import collect, command_line, first_line, version
from deepinfer_core.bench.results import median_run, summary, write_result

RUNS = [{"ms": 2.0, "steps": 7}, {"ms": 10.0, "steps": 9}, {"ms": 4.0, "steps": 8}, {"ms": 3.0, "steps": 7}]


def test_a_summary_has_medians_runs_and_spread() -> None:
    found = summary(RUNS)
    assert found["ms"] == 3.5
    assert found["runs"] == RUNS
    assert found["spread"] == {"ms": round(8 / 3.5, 4)}


def test_the_median_of_a_count_is_a_count_that_was_seen() -> None:
    assert summary(RUNS)["steps"] == 7


def test_a_figure_of_nothing_has_no_spread() -> None:
    assert summary([{"ms": 0.0}, {"ms": 0.0}])["spread"] == {"ms": 0.0}


def test_the_run_in_the_middle_is_found_also_of_an_even_number() -> None:
    assert median_run(RUNS[:3], "ms") == 2
    assert median_run(RUNS, "ms") == 3


def test_a_result_has_a_line_for_each_row_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "made" / "result.json"
    for rows in ([{"a": 1}], [{"a": 2}, {"a": 3}], []):
        result = {"meta": {"device": "cpu"}, "rows": rows}
        write_result(path, result)
        text = path.read_text(encoding="utf-8")
        assert json.loads(text) == result
        assert sum(line.startswith('  {"a"') for line in text.splitlines()) == len(rows)
    assert list(path.parent.iterdir()) == [path]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, {"meta": {}, "rows": []})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_result(path, {"meta": {}, "rows": [{"a": object()}]})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_meta_names_machine_versions_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/deepinfer", "bench", "serving", "my model"])
    meta = collect("cpu")
    assert meta["device"] == "cpu"
    assert meta["cpu"]
    assert meta["torch"] == torch.__version__
    assert meta["torch_threads"] == torch.get_num_threads()
    assert {"deepinfer-core", "deepinfer-plugin-policies", "transformers"} <= set(meta["versions"])
    assert meta["command"] == "deepinfer bench serving 'my model'"
    assert "capability" not in meta
    json.dumps(meta)


def test_what_is_not_there_is_unknown() -> None:
    assert first_line(["no-such-program-of-that-name"]) == "unknown"
    assert version("no-such-distribution-of-that-name") is None
    assert command_line(["deepinfer"]) == "deepinfer"


@pytest.mark.gpu
def test_meta_names_the_card() -> None:
    meta: dict[str, Any] = collect("cuda")
    assert meta["device"] == torch.cuda.get_device_name()
    assert meta["capability"] == list(torch.cuda.get_device_capability())
