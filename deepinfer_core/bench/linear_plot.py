"""A picture of `bench linear`: microseconds over rows, a panel for each scheme and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_core.bench.plot import require

LINES = {
    "us": ("deepinfer", "C0", 1.8),
    "us_fp16": ("cuBLAS FP16", "C1", 1.0),
    "us_humming": ("humming", "C2", 1.0),
    "us_tinygemm": ("tinygemm", "C3", 1.0),
    "us_fallback": ("fallback", "C7", 1.0),
}


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Write a picture of the rows with group 128, no zeros and FP16 of the kernels that are selected.

    Raises:
        BenchError: matplotlib is not installed, or the file's ending is not a picture's.
    """
    require(path)
    from matplotlib.figure import Figure

    rows = [r for r in result["rows"] if ".rows." not in r["layout"] and r["group_size"] == 128]
    rows = [r for r in rows if not r["zeros"] and r["act_dtype"] == "float16"]
    schemes = list(dict.fromkeys(r["scheme"] for r in rows))
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in rows))
    figure = Figure(figsize=(3.2 * max(1, len(shapes)), 3.2 * max(1, len(schemes))), layout="constrained")
    axes = figure.subplots(max(1, len(schemes)), max(1, len(shapes)), sharex=True, squeeze=False)
    for line, scheme in zip(axes, schemes, strict=False):
        for axis, (n, k) in zip(line, shapes, strict=True):
            cells = [r for r in rows if r["scheme"] == scheme and (r["n"], r["k"]) == (n, k)]
            _panel(axis, sorted(cells, key=lambda r: r["m"]), f"{scheme} {n} x {k}")
    if rows:
        axes[0][0].legend(fontsize="x-small")
    meta = result["meta"]
    figure.supxlabel(f"rows M; {meta['device']}, torch {meta['torch']}, {meta['date']}", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _panel(axis: Any, cells: Sequence[Mapping[str, Any]], title: str) -> None:
    for column, (label, colour, width) in LINES.items():
        points = [(r["m"], r[column]) for r in cells if r[column] is not None]
        if points:
            axis.plot(*zip(*points, strict=True), ".-", markersize=3, color=colour, linewidth=width, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_title(title, fontsize="small")
    axis.set_ylabel("us", fontsize="small")
