"""Result files ``{meta, rows}``: summaries over runs, and JSON that is written whole or not at all."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_core.errors import DeepinferError
from deepinfer_core.registry.atomic_file import write_whole


class BenchError(DeepinferError):
    """A measurement is worth nothing: a request failed or answered wrong, or what it needs is not here."""


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return each figure's median over runs, the runs themselves, and ``spread`` = (max - min) / median of each.

    Counts (int) stay counts: their median is one that was seen.
    """
    assert runs, "a summary is of at least one run"
    medians: dict[str, float] = {}
    spread: dict[str, float] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        counts = all(isinstance(value, int) for value in values)
        medians[name] = statistics.median_low(values) if counts else round(statistics.median(values), 3)
        if not counts:
            spread[name] = round((max(values) - min(values)) / medians[name], 4) if medians[name] else 0.0
    rounded = [{name: v if isinstance(v, int) else round(v, 3) for name, v in run.items()} for run in runs]
    return {**medians, "runs": rounded, "spread": spread}


def median_run(runs: Sequence[Mapping[str, float]], name: str) -> int:
    """Return the index of the run whose figure is the (lower) median."""
    order = sorted(range(len(runs)), key=lambda i: runs[i][name])
    return order[(len(order) - 1) // 2]


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write meta on the first line and each row on one of its own, so that files of many runs can be compared."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    text = f'{{"meta": {json.dumps(result["meta"])},\n "rows": [\n  {rows}\n ]}}\n'
    write_whole(path, text)
