"""Figures of a run from the times of its tokens, and the picture that is drawn of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.bench import jitter, serving
from deepinfer_core.bench.plot import Panel, Series, draw, gaps_over_time, require
from deepinfer_core.bench.results import BenchError
from deepinfer_core.engine.metrics import RequestMetrics
from deepinfer_core.engine.outputs import RequestHandle

PNG = b"\x89PNG\r\n\x1a\n"


def answered(submitted: float, *times: float) -> RequestHandle:
    metrics = RequestMetrics(submitted, prompt_tokens=3, token_times=list(times))
    return RequestHandle("r", [1, 2, 3], [metrics], lambda name: None)


def test_serving_figures_are_of_all_requests_together() -> None:
    found = serving.figures([answered(0.0, 0.1, 0.2, 0.3), answered(0.1, 0.4, 0.45, 1.0)])
    assert found["tok_s"] == pytest.approx(6.0)
    assert found["ttft_ms_p50"] == pytest.approx(100)
    assert found["ttft_ms_p95"] == pytest.approx(300)
    assert found["tpot_ms_p50"] == pytest.approx(100)
    assert found["itl_ms_p50"] == pytest.approx(100)
    assert found["itl_ms_p99"] == found["itl_ms_max"] == pytest.approx(550)
    assert found["jitter_ms"] == pytest.approx(450)


def test_answers_of_one_token_have_no_gaps() -> None:
    found = serving.figures([answered(0.0, 0.5)])
    assert (found["tok_s"], found["itl_ms_max"], found["tpot_ms_p50"]) == (2.0, 0.0, 0.0)


def test_jitter_counts_gaps_from_when_the_long_prompt_came() -> None:
    streams = [answered(0.0, 0.1, 0.2, 0.7, 0.8), answered(0.0, 0.1, 0.2, 0.65, 0.75)]
    found = jitter.figures(answered(0.25, 0.72, 0.8), streams)
    assert found["calm_itl_ms_p50"] == pytest.approx(100)
    assert found["itl_ms_max"] == pytest.approx(500)
    assert found["itl_ms_p50"] == pytest.approx(100)
    assert found["jitter_ms"] == pytest.approx(400)
    assert found["long_ttft_ms"] == pytest.approx(470)
    assert found["streams_that_ended_first"] == 0
    assert jitter.figures(answered(0.25, 0.78), streams)["streams_that_ended_first"] == 1


def test_a_trace_counts_from_when_the_long_prompt_came() -> None:
    found = jitter.trace(answered(0.25, 0.75), [answered(0.0, 0.125, 0.5)])
    assert found == {"long_token_times_ms": [500.0], "token_times_ms": [[-125.0, 250.0]]}


def test_gaps_are_in_order_of_time() -> None:
    assert gaps_over_time([[0, 100, 300], [50, 120], [7]]) == [(0.1, 100), (0.12, 70), (0.3, 200)]


ROW: dict[str, Any] = {"token_times_ms": [[0, 100, 300]], "long_token_times_ms": [250.0]}


def test_there_is_a_panel_for_each_policy_and_a_series_for_each_case() -> None:
    rows = [ROW | {"policy": p, "prefill_chunk_tokens": c} for c in (64, 256) for p in ("serial", "mixed")]
    panels = jitter.panels(rows)
    assert [panel.title for panel in panels] == ["serial", "mixed"]
    assert [series.label for series in panels[1].series] == ["chunk 64", "chunk 256"]
    assert panels[1].series[0].ends == 0.25
    (one,) = serving.panels([ROW | {"policy": "slo", "concurrency": n} for n in (1, 4)])
    assert [series.label for series in one.series] == ["1 clients", "4 clients"]


def test_the_picture_has_a_panel_each_side_by_side(tmp_path: Path) -> None:
    series = [Series("chunk 64", [(0.1, 20.0), (0.2, 200.0)], 0.3)]
    sizes = []
    for count in (1, 3):
        path = tmp_path / "made" / f"{count}.png"
        draw(path, [Panel(title=f"p{i}", series=series, mark=(0.0, "now")) for i in range(count)], "model, cpu")
        content = path.read_bytes()
        assert content.startswith(PNG)
        sizes.append((int.from_bytes(content[16:20]), int.from_bytes(content[20:24])))
    assert sizes[1][0] == pytest.approx(3 * sizes[0][0], abs=3)
    assert sizes[1][1] == sizes[0][1]


def test_an_ending_that_is_no_picture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"x\.txt"):
        draw(tmp_path / "x.txt", [Panel(title="p")], "")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'deepinfer-core\[bench\]'"):
        require(Path("x.png"))
