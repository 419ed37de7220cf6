"""A picture of a serving bench: gaps between tokens over time, one panel a policy, side by side on one scale."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from attrs import field, frozen

from deepinfer_core.bench.results import BenchError

PANEL_INCHES = (4.2, 3.8)
MS = 1e3
KINDS = (".png", ".svg", ".pdf")


@frozen
class Series:
    """Points (seconds, gap in ms) under one name; ``ends`` is drawn as a line: when what was waited for came."""

    label: str
    points: Sequence[tuple[float, float]]
    ends: float | None = None


@frozen(kw_only=True)
class Panel:
    """One policy; ``mark`` is a moment in seconds and what happens then."""

    title: str
    series: Sequence[Series] = field(factory=tuple)
    mark: tuple[float, str] | None = None


def gaps_over_time(token_times_ms: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return (seconds, gap in ms) of every token but each request's first, in order of time."""
    points = [(end / MS, end - begin) for times in token_times_ms for begin, end in pairwise(times)]
    return sorted(points)


def require(path: Path) -> None:
    """Say so before anything is measured when nothing could be drawn.

    Raises:
        BenchError: The file's ending is none of `KINDS`, or matplotlib is not installed.
    """
    if path.suffix.lower() not in KINDS:
        raise BenchError(f"--plot {path}: the file must end in one of {', '.join(KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which is not installed: pip install 'deepinfer-core[bench]'")


def draw(path: Path, panels: Sequence[Panel], caption: str) -> None:
    """Write a picture.

    Args:
        path: The file, of one of the `KINDS`.
        panels: From left to right.
        caption: Model, device and date, below the panels.

    Raises:
        BenchError: As `require`.
    """
    require(path)
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for number, series in enumerate(panel.series):
            seconds, gaps = [s for s, _ in series.points], [g for _, g in series.points]
            axis.plot(seconds, gaps, ".", markersize=3, color=f"C{number}", label=series.label)
            if series.ends is not None:
                axis.axvline(series.ends, color=f"C{number}", linewidth=0.8, linestyle=":")
        if panel.mark is not None:
            axis.axvline(panel.mark[0], color="black", linewidth=0.8, label=panel.mark[1])
        axis.set_title(panel.title)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_xlabel("s")
        if panel.series:
            axis.legend(fontsize="x-small")
    axes[0].set_ylabel("gap between tokens (ms)")
    figure.supxlabel(caption, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
