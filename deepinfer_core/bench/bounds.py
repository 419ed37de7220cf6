"""``python -m deepinfer_core.bench.bounds FILE``: which bounds a result of `bench linear` holds and which it misses.

The bounds are those of the linear kernels' acceptance (docs/kernels.md): absolute times for one NVIDIA H200, and ratios
to the kernels that were measured beside ours in the same run. Nobody has to believe a table: the file says it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

Row = Mapping[str, Any]

GOALS_US: Mapping[tuple[str, int, int, int], float] = {
    ("w4a16", 1, 37888, 3584): 19.7,
    ("w4a16", 8, 37888, 3584): 20.5,
    ("w4a16", 16, 37888, 3584): 23,
    ("w4a16", 1, 3584, 18944): 11.5,
    ("w4a16", 1, 22016, 2048): 8.5,
    ("w4a16", 1, 2048, 11008): 6,
    ("w4a16", 1, 2560, 2048): 3.2,
    ("w3a16", 1, 37888, 3584): 15.5,
    ("w3a16", 1, 3584, 18944): 10,
    ("w3a16", 1, 22016, 2048): 7.5,
    ("w4a16", 30, 5632, 2048): 5.5,
    ("w4a16", 30, 2048, 5632): 6,
    ("w4a16", 30, 3584, 18944): 15,
    ("w3a16", 30, 37888, 3584): 28,
    ("w3a16", 30, 3584, 18944): 14,
}
"""(scheme, M, N, K) -> microseconds on an H200; group 128, no zeros, FP16."""

FALLBACK_RATIO = {"w4a16": 15, "w3a16": 50}
"""At M = 30: the fallback's time over ours, at least."""

REL_ERR = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-4}


@frozen(kw_only=True)
class Verdict:
    """One bound for one row.

    Attributes:
        bound: What is demanded, the same text for all rows that it is demanded of.
        cell: Scheme and shape of the row.
        measured: What the row has.
        limit: What it may have at most.
    """

    bound: str
    cell: str
    measured: float
    limit: float

    @property
    def held(self) -> bool:
        """Whether the row is within the limit."""
        return self.measured <= self.limit


def judge(rows: Iterable[Row]) -> list[Verdict]:
    """Hold every row of a served layout to the bounds that apply to it.

    Rows of the first system's kernels (layouts ``*.rows.*``) are references and judged by their error alone; ratios
    apply to the plain case: group 128, no zeros, FP16.
    """
    found: list[Verdict] = []
    for row in rows:
        cell = f"{row['scheme']} {row['m']} x {row['n']} x {row['k']} {row['kernel']}"
        limit = REL_ERR[row["act_dtype"]]
        found.append(Verdict(bound=f"relative error below {limit:g}", cell=cell, measured=row["rel_err"], limit=limit))
        plain = row["group_size"] == 128 and not row["zeros"] and row["act_dtype"] == "float16"
        if plain and ".rows." not in row["layout"]:
            found += (Verdict(bound=bound, cell=cell, measured=row["us"], limit=limit) for bound, limit in _limits(row))
    return found


def _limits(row: Row) -> Iterable[tuple[str, float]]:
    m, scheme = row["m"], row["scheme"]
    goal = GOALS_US.get((scheme, m, row["n"], row["k"]))
    if goal is not None:
        yield "goal in us (one H200)", goal
    if m == 30 and row["us_fallback"] is not None:
        ratio = FALLBACK_RATIO[scheme]
        yield f"{scheme} at M = 30: {ratio} times as fast as the fallback", row["us_fallback"] / ratio
    dense = row["us_fp16"]
    if dense is None:
        return
    humming = min(dense, row["us_humming"] or dense)
    if m <= 48:
        best = min(humming, row["us_tinygemm"] or dense)
        yield "M <= 48: at most 5 % slower than the faster of cuBLAS FP16 and the best peer", 1.05 * best
    elif m <= 96:
        yield "M 64-96: at most 1.35 x the faster of cuBLAS FP16 and humming", 1.35 * humming
    elif m <= 256:
        yield "M 128-256: at most 1.67 x cuBLAS FP16", 1.67 * dense
    elif m < 1024:
        yield "M 512: at most 1.4 x cuBLAS FP16 + 3 us", 1.4 * dense + 3
    else:
        yield "M >= 1024: at most 1.2 x cuBLAS FP16 + 3 us", 1.2 * dense + 3


def report(verdicts: Sequence[Verdict], *, every: bool = False) -> str:
    """Return a line for each bound with how often it is held, and under it the rows that miss it (or all rows)."""
    lines: list[str] = []
    for bound in dict.fromkeys(verdict.bound for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.bound == bound]
        held = sum(verdict.held for verdict in mine)
        lines.append(f"{'held' if held == len(mine) else 'MISSED'} {held}/{len(mine)}  {bound}")
        for verdict in sorted(mine, key=lambda v: v.measured / v.limit, reverse=True):
            if every or not verdict.held:
                word = "held" if verdict.held else "missed"
                lines.append(f"    {word} {verdict.cell}: {verdict.measured:.4g}, limit {verdict.limit:.4g}")
    return "\n".join(lines)


def references(rows: Sequence[Row]) -> str:
    """Return a line for each row of the first system's kernels: beside the fallback, ours, and one another."""
    plain = [r for r in rows if r["group_size"] == 128 and not r["zeros"] and r["act_dtype"] == "float16"]
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in plain:
        cells.setdefault((row["scheme"], row["m"], row["n"], row["k"]), []).append(row)
    lines: list[str] = []
    for (scheme, m, n, k), found in cells.items():
        old = [row for row in found if ".rows." in row["layout"]]
        fallback = next((row["us_fallback"] for row in found if row["us_fallback"] is not None), None)
        ours = min((row["us"] for row in found if ".rows." not in row["layout"]), default=None)
        for row in old:
            parts = [f"{scheme} {m} x {n} x {k} {row['kernel']}: {row['us']:.1f} us"]
            if fallback is not None:
                parts.append(f"{fallback / row['us']:.2f} x as fast as the fallback")
            if ours is not None:
                parts.append(f"{row['us'] / ours:.1f} x the time of ours")
            others = [other for other in old if other is not row]
            parts += [f"{other['us'] / row['us']:.2f} x as fast as {other['kernel']}" for other in others]
            lines.append(", ".join(parts))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report of a file; the status is 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_core.bench.bounds", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--all", action="store_true", help="list the rows that hold a bound too")
    options = parser.parse_args(argv)
    result = json.loads(options.file.read_text(encoding="utf-8"))
    meta = result["meta"]
    print(f"{meta['device']}, torch {meta['torch']}, {meta['date']}, {len(result['rows'])} rows")
    verdicts = judge(result["rows"])
    print(report(verdicts, every=options.all))
    if old := references(result["rows"]):
        print(f"the first system's kernels:\n{old}")
    return 0 if all(verdict.held for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
