"""Lanes: where works run. CUDA streams with events on a card; on a CPU one worker, the scheduler thread itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from deepinfer_core.engine.batch import Work
from deepinfer_core.plugin_api import LaneSpec, LaneView

Forward = Callable[[Work], torch.Tensor]

POLL_S = 20e-6
"""Pause between looks at the events of several lanes; a wait for one lane alone blocks in the driver."""


class Runner(Protocol):
    """Runs works in order; what a lane stands on."""

    streams: bool

    def launch(self, work: Work, forward: Forward) -> None:
        """Start the forward and see to it that its time will be known."""
        ...

    def ended(self, work: Work) -> bool:
        """Whether the work has run to its end."""
        ...

    def join(self, work: Work) -> None:
        """Wait for the work's end, set its time, and order what the default stream does next behind it."""
        ...

    def drain(self) -> None:
        """Wait for everything that was started, also for what failed half-way."""
        ...


class HostRunner:
    """Runs a work at once, timed by a monotonic clock."""

    streams = False

    def launch(self, work: Work, forward: Forward) -> None:
        """Run the forward to its end."""
        start = time.perf_counter()
        work.logits = forward(work)
        work.seconds = time.perf_counter() - start

    def ended(self, work: Work) -> bool:
        """Return True: `launch` came back."""
        return work.logits is not None

    def join(self, work: Work) -> None:
        """Nothing to wait for."""

    def drain(self) -> None:
        """Nothing to wait for."""


class StreamRunner:
    """Runs works on a CUDA stream of its own, timed by the pair of events around each.

    Tensors cross streams without `record_stream`: a work keeps its inputs and logits alive until it is finished, and
    by then its end event has passed and the default stream waits for it.
    """

    streams = True

    def __init__(self, device: torch.device, priority: int) -> None:
        self._default = torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device, priority=-1 if priority > 0 else 0)

    def launch(self, work: Work, forward: Forward) -> None:
        """Order the forward behind the default stream (inputs, page tables, zeroed pages) and start it."""
        begin: Any = torch.cuda.Event(enable_timing=True)
        end: Any = torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(self._default)
        with torch.cuda.stream(self._stream):
            begin.record()
            work.logits = forward(work)
            end.record()
        work.events = (begin, end)

    def ended(self, work: Work) -> bool:
        """Whether the work's end event has passed."""
        return bool(work.events[1].query())

    def join(self, work: Work) -> None:
        """Wait for the work's own end event."""
        begin, end = work.events
        end.synchronize()
        self._default.wait_event(end)
        work.seconds = begin.elapsed_time(end) / 1e3

    def drain(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()


class Lanes:
    """A policy's lanes on what the device has: a stream each with overlap on a card, else one runner for all.

    Args:
        specs: The policy's lanes.
        device: Where the model runs.
        overlap: False puts all lanes onto one runner, one work after another.
    """

    def __init__(self, specs: Sequence[LaneSpec], device: torch.device, *, overlap: bool) -> None:
        self.specs = tuple(specs)
        self.overlap = overlap and device.type == "cuda" and len(self.specs) > 1
        runners: list[Runner]
        if self.overlap:
            runners = [StreamRunner(device, spec.priority) for spec in self.specs]
        else:
            only = StreamRunner(device, 0) if device.type == "cuda" else HostRunner()
            runners = [only] * len(self.specs)
        self._runners = dict(zip((spec.name for spec in self.specs), runners, strict=True))
        self.in_flight: deque[Work] = deque()  # in order of launch

    @property
    def idle(self) -> bool:
        """Whether any lane takes a work now."""
        return any(view.idle for view in self.views())

    @property
    def streams(self) -> int:
        """CUDA streams that works run on; 0 on a CPU."""
        return len({id(runner) for runner in self._runners.values() if runner.streams})

    def views(self) -> tuple[LaneView, ...]:
        """Return the lanes as a policy sees them; lanes that share a runner are busy together."""
        return tuple([LaneView(name=s.name, priority=s.priority, busy_since=self._busy(s.name)) for s in self.specs])

    def launch(self, work: Work, forward: Forward) -> None:
        """Start a work; when that fails, nothing of it runs any more."""
        runner = self._runners[work.lane]
        work.started = time.perf_counter()  # the engine's clock, which a policy's view tells time by
        try:
            runner.launch(work, forward)
        except BaseException:
            runner.drain()
            raise
        self.in_flight.append(work)

    def beside(self, work: Work) -> list[Work]:
        """Return works that are unfinished at this moment on other streams than the work's."""
        mine = self._runners[work.lane]
        others = [(other, self._runners[other.lane]) for other in self.in_flight if other is not work]
        return [other for other, on in others if on is not mine and on.streams and not on.ended(other)]

    def ended(self, *, wait: bool = False) -> list[Work]:
        """Return the works that have ended since the last call, in order of launch.

        Args:
            wait: When none has, wait for the first one; returns none only if nothing is in flight.
        """
        if wait and len({id(self._runners[work.lane]) for work in self.in_flight}) == 1:
            done = [self.in_flight[0]]
        else:
            while not (done := [w for w in self.in_flight if self._runners[w.lane].ended(w)]) and wait:
                if not self.in_flight:
                    break
                time.sleep(POLL_S)
        for work in done:
            self._runners[work.lane].join(work)
            self.in_flight.remove(work)
        return done

    def abandon(self) -> None:
        """Wait for whatever was started and forget it."""
        self.in_flight.clear()
        for runner in self._runners.values():
            runner.drain()

    def _busy(self, name: str) -> float | None:
        runner = self._runners[name]
        return next((work.started for work in self.in_flight if self._runners[work.lane] is runner), None)
