"""A Chrome and Perfetto trace of the scheduler: a slice for each cycle and each work, counters for pool and queues."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from deepinfer_core.engine.batch import Work
from deepinfer_core.engine.request import Queues
from deepinfer_core.errors import ConfigError
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import Plan

log = logging.getLogger("deepinfer")

FLUSH_S = 0.25
"""Events are written after at most so long, and at once when the engine has nothing left to do."""

SCHEDULER_ROW = 0
MAX_ITEMS = 64
"""Requests that a work's slice names; it counts the others."""


class Observer(Protocol):
    """What an engine tells, on the scheduler thread; it must be quick and must not raise."""

    def planned(self, plan: Plan) -> None:
        """A plan is about to be carried out."""
        ...

    def finished(self, work: Work) -> None:
        """A work has ended, and its time is known."""
        ...

    def cycle_ended(self, queues: Queues, kv: KVCache) -> None:
        """A cycle is over."""
        ...


class TraceFile:
    """The file: events in the JSON array form, which readers take without its closing bracket.

    Whole events are written at once, without a buffer of ours or of Python's in between, so that what is there when
    the process is killed can be read. After `close` the file is complete JSON. What cannot be written (a full disk)
    ends the trace with a warning, never the engine.

    Args:
        path: Where to write; what was there is replaced.
        clock: Seconds, the clock that lanes stamp works with.

    Raises:
        ConfigError: It cannot be created.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.path = Path(path)
        self.clock = clock
        self._origin = clock()
        self._pending: list[str] = []
        self._written = False
        self._flushed_at = self._origin
        self._processes = 0
        self._lock = threading.Lock()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
            self._file: int | None = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise ConfigError(f"--trace {self.path}: cannot be written: {error.strerror or error}") from None

    def observer(self, name: str, lanes: tuple[str, ...], *, shared: bool) -> EngineTrace:
        """Return what one engine reports to: a process of its own in the trace, with a row for each lane.

        Args:
            name: What the process is called.
            lanes: The policy's lanes.
            shared: They all stand on one stream, or on none, so that their works run one after another.
        """
        self._processes += 1
        return EngineTrace(self, self._processes, name, lanes, shared=shared)

    def microseconds(self, at: float) -> float:
        """Return a time of the clock as the trace counts it."""
        return round((at - self._origin) * 1e6, 1)

    def write(self, event: dict[str, Any]) -> None:
        """Add an event; it reaches the file with the next flush."""
        self._pending.append(json.dumps(event, separators=(",", ":")))

    def flush(self, *, now: bool = False) -> None:
        """Write what is pending, if that is due or wanted ``now``."""
        if self._pending and (now or self.clock() - self._flushed_at >= FLUSH_S):
            self._put("")

    def close(self) -> None:
        """Write the rest and the closing bracket. A second call does nothing."""
        if self._file is None:
            return
        self._put("\n]\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, tail: str) -> None:
        with self._lock:
            events, self._pending = self._pending, []
            self._flushed_at = self.clock()
            if self._file is None:
                return
            lead = ("" if self._written else "[\n") if not events else ",\n" if self._written else "[\n"
            data = (lead + ",\n".join(events) + tail).encode()
            self._written = True
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                log.warning("the trace %s ends here: %s", self.path, error)
                os.close(self._file)
                self._file = None


class EngineTrace:
    """Turns what one engine reports into events."""

    def __init__(self, file: TraceFile, process: int, name: str, lanes: tuple[str, ...], *, shared: bool) -> None:
        """Name the rows; arguments as `TraceFile.observer`'s."""
        self._file = file
        self._process = process
        self._rows = {lane: row for row, lane in enumerate(lanes, SCHEDULER_ROW + 1)}
        self._shared = shared
        self._free_at: dict[str, float] = {}  # lane, or "" for all of them -> end of its last work
        self._begun: float | None = None
        self._plan = Plan()
        self._last: dict[str, dict[str, int]] = {}
        self._meta("process_name", SCHEDULER_ROW, name=name)
        for row, title in [(SCHEDULER_ROW, "scheduler"), *((r, f"lane {lane}") for lane, r in self._rows.items())]:
            self._meta("thread_name", row, name=title)
            self._meta("thread_sort_index", row, sort_index=row)
        file.flush(now=True)

    def planned(self, plan: Plan) -> None:
        """Begin the cycle's slice."""
        self._begun, self._plan = self._file.clock(), plan

    def finished(self, work: Work) -> None:
        """Write a work's slice: from its launch, or from the end of the work before it on the same stream."""
        stream = "" if self._shared else work.lane
        begin = max(work.started, self._free_at.get(stream, 0.0))
        self._free_at[stream] = begin + work.seconds
        named = {item.request.id: item.tokens for item in work.items[:MAX_ITEMS]}
        self._slice(
            work.kind,
            self._rows.get(work.lane, SCHEDULER_ROW),
            begin,
            work.seconds,
            tokens=work.tokens,
            decode_rows=work.decode_rows,
            context=work.context,
            requests=named,
            more_requests=len(work.items) - len(named),
        )

    def cycle_ended(self, queues: Queues, kv: KVCache) -> None:
        """End the cycle's slice, where it had anything to do, and write the counters that have changed."""
        now = self._file.clock()
        if self._begun is not None and (self._plan.works or self._plan.preempt):
            works = [f"{work.lane}: {sum(n for _, n in work.items)} tokens" for work in self._plan.works]
            preempted = list(self._plan.preempt)
            self._slice("cycle", SCHEDULER_ROW, self._begun, now - self._begun, works=works, preempted=preempted)
        self._begun = None
        cached = kv.prefix.reclaimable if kv.prefix is not None else 0
        used = kv.total_pages - kv.available_pages
        free = kv.total_pages - used - cached
        self._counter("KV pages", now, used=used, cached=cached, free=free)
        waiting, prefilling, decoding = len(queues.waiting), len(queues.prefilling), len(queues.decoding)
        self._counter("requests", now, waiting=waiting, prefilling=prefilling, decoding=decoding)
        self._file.flush(now=not len(queues))

    def _slice(self, name: str, row: int, begin: float, seconds: float, **args: Any) -> None:
        at, duration = self._file.microseconds(begin), round(seconds * 1e6, 1)
        self._event("X", name, row, ts=at, dur=duration, args=args)

    def _counter(self, name: str, now: float, **values: int) -> None:
        if self._last.get(name) != values:
            self._last[name] = values
            self._event("C", name, SCHEDULER_ROW, ts=self._file.microseconds(now), args=values)

    def _meta(self, kind: str, row: int, **args: Any) -> None:
        self._event("M", kind, row, ts=0, args=args)

    def _event(self, phase: str, name: str, row: int, **rest: Any) -> None:
        self._file.write({"name": name, "ph": phase, "pid": self._process, "tid": row, **rest})
