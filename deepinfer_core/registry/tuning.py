"""The measured table of one device: microseconds by problem, kernel version and M, kept as JSON."""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from deepinfer_core.plugin_api import LinearProblem
from deepinfer_core.registry.atomic_file import write_whole

log = logging.getLogger("deepinfer")

FORMAT_VERSION = 1
Key = tuple[str, str, str]


@frozen(kw_only=True)
class Timing:
    """One measurement.

    Attributes:
        problem: `problem_key` of the layer.
        kernel: `timing_name` of the kernel.
        version: Version of the distribution that brought the kernel; another version's figures do not count.
        m: Rows.
        us: Median microseconds of one call.
    """

    problem: str
    kernel: str
    version: str
    m: int
    us: float


@frozen
class Timings:
    """Measurements of one device; look-ups between measured Ms take the next larger one.

    Attributes:
        device: The device's name, as the device reports it.
        entries: The measurements.
    """

    device: str = ""
    entries: tuple[Timing, ...] = ()
    _by_key: Mapping[Key, Mapping[int, float]] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        by_key: dict[Key, dict[int, float]] = defaultdict(dict)
        for entry in sorted(self.entries, key=lambda e: e.us, reverse=True):  # the fastest of duplicates stays
            by_key[entry.problem, entry.kernel, entry.version][entry.m] = entry.us
        object.__setattr__(self, "_by_key", {k: dict(sorted(v.items())) for k, v in by_key.items()})

    def measured(self, problem: LinearProblem, kernel: str, version: str) -> tuple[int, ...]:
        """Return the Ms at which a kernel was measured on a problem, ascending."""
        return tuple(self._by_key.get((problem_key(problem), kernel, version), ()))

    def lookup(self, problem: LinearProblem, m: int, kernel: str, version: str) -> float | None:
        """Return microseconds at M, or at the next measured M (the last one past the end); None if unmeasured."""
        times = self._by_key.get((problem_key(problem), kernel, version))
        if not times:
            return None
        ms = list(times)
        return times[ms[min(bisect_left(ms, m), len(ms) - 1)]]

    def merged(self, entries: Iterable[Timing]) -> Timings:
        """Return a table in which new measurements replace those of the same problem, kernel, version and M."""
        kept = {(e.problem, e.kernel, e.version, e.m): e for e in self.entries}
        kept.update({(e.problem, e.kernel, e.version, e.m): e for e in entries})
        return Timings(self.device, tuple(kept[key] for key in sorted(kept)))

    def write(self, path: Path) -> None:
        """Write the table so that a reader sees the old or the new file, never half of one."""
        content = {
            "format_version": FORMAT_VERSION,
            "device": self.device,
            "entries": [
                {"problem": e.problem, "kernel": e.kernel, "version": e.version, "m": e.m, "us": e.us}
                for e in self.entries
            ],
        }
        write_whole(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Timings:
        """Read a table; a missing file is an empty table, a broken one is too, with a warning that says what is wrong.

        Selection must not fail for a cache: without figures it goes by priority, and the warning says so.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            return cls._unusable(path, f"{type(error).__name__}: {error}")
        if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
            return cls._unusable(path, "it is not an object with a list of entries")
        if content.get("format_version") != FORMAT_VERSION:
            found = content.get("format_version")
            return cls._unusable(path, f"format_version is {found!r}, this core reads {FORMAT_VERSION}")
        entries = [entry for raw in content["entries"] if (entry := _entry(raw)) is not None]
        dropped = len(content["entries"]) - len(entries)
        if dropped:
            log.warning("%s: %d of %d measurements are malformed and ignored", path, dropped, len(content["entries"]))
        return cls(str(content.get("device", "")), tuple(entries))

    @classmethod
    def _unusable(cls, path: Path, cause: str) -> Timings:
        log.warning("%s: measured table ignored (%s); run `deepinfer tune` to measure again", path, cause)
        return cls()


def problem_key(problem: LinearProblem) -> str:
    """Return the text by which a table knows a problem: what decides speed, so without bias, parts and m_max."""
    capability = "" if problem.capability is None else f" sm_{problem.capability[0]}{problem.capability[1]}"
    zeros = " zeros" if problem.zeros else ""
    return (
        f"{problem.scheme} g{problem.group_size}{zeros} {problem.n}x{problem.k} {problem.act_dtype} "
        f"{problem.epilogue} {problem.device}{capability}"
    )


def timings_path(device: str, directory: Path) -> Path:
    """Return where the table of a device is kept, one file a device.

    Args:
        device: The device's name, as the device reports it.
        directory: deepinfer's cache directory.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unnamed"
    return directory / "tuning" / f"{slug}.json"


def _entry(raw: Any) -> Timing | None:
    if not isinstance(raw, dict):
        return None
    names = (raw.get("problem"), raw.get("kernel"), raw.get("version"))
    m, us = raw.get("m"), raw.get("us")
    if not all(isinstance(n, str) for n in names) or type(m) is not int or m < 1:
        return None
    if isinstance(us, bool) or not isinstance(us, int | float) or not 0 < us < float("inf"):
        return None
    return Timing(problem=raw["problem"], kernel=raw["kernel"], version=raw["version"], m=m, us=float(us))
