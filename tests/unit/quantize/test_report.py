"""The report says what was done, as JSON and as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_core.quantize.report import (
    REPORT_NAME,
    LayerReport,
    PerplexityReport,
    QuantizationReport,
    write_report,
)


def layer(index: int, error: float, scheme: str = "w4a16", carried: bool = False) -> LayerReport:
    return LayerReport(
        module=f"model.layers.{index}.mlp.up_proj",
        n=8,
        k=64,
        source="fp16",
        scheme=scheme,
        group_size=-1 if scheme == "w4a16" else 0,
        zeros=True,
        carried=carried,
        relative_error=error,
        nbytes=1 << 20,
    )


def report(*layers: LayerReport) -> QuantizationReport:
    return QuantizationReport(
        source="in",
        destination="out",
        recipe="w4",
        method="search",
        layers=layers,
        total_bytes=1,
        linear_bits=4.5,
        seconds=1.0,
        perplexity=PerplexityReport(source=10.0, result=12.0, tokens=99, text="t"),
    )


def test_layers_of_one_kind_and_format_make_one_row() -> None:
    rows = report(layer(0, 0.1), layer(1, 0.3), layer(10, 0.0, carried=True), layer(11, 0.0, "fp16")).table()
    kind = "model.layers.*.mlp.up_proj"
    assert rows == [
        (kind, "w4a16 row zeros", 2, "0.2000", "0.3000", "2.0"),
        (kind, "w4a16 row zeros (carried over)", 1, "0.0000", "0.0000", "1.0"),
        (kind, "dense", 1, "0.0000", "0.0000", "1.0"),
    ]


def test_json_holds_every_layer_and_the_ratio(tmp_path: Path) -> None:
    write_report(report(layer(0, 0.1)), tmp_path)
    write_report(report(layer(0, 0.25)), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [REPORT_NAME]
    data = json.loads((tmp_path / REPORT_NAME).read_text())
    assert data["layers"][0]["relative_error"] == 0.25
    assert data["perplexity"] == {
        "source": 10.0,
        "result": 12.0,
        "tokens": 99,
        "text": "t",
        "ratio": pytest.approx(1.2),
    }
