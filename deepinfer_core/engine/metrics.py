"""What was measured: times of each request, histograms over all of them, counters of the engine."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from attrs import define, field

SECONDS = tuple(10 ** (e / 4) for e in range(-16, 9))
"""Bucket edges from 100 us to 100 s, four a decade."""

RECENT = 8192
"""Latest values that percentiles are taken over."""


def percentile(values: Sequence[float], p: float) -> float:
    """Return the p-th percentile by nearest rank of unsorted values; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] if ordered else math.nan


@define(eq=False)
class RequestMetrics:
    """Times of one choice in seconds on the engine's clock; n tokens have n - 1 gaps between them.

    Attributes:
        submitted: When it was submitted.
        admitted: When its first work was prepared; None while it waits.
        token_times: When each token was accepted.
        finished: When it ended.
        preemptions: How often its pages were taken and its tokens computed again.
        prompt_tokens: Length of its prompt.
        cached_tokens: Prompt tokens that the prefix cache had, at its first admission.
    """

    submitted: float
    prompt_tokens: int = 0
    admitted: float | None = None
    token_times: list[float] = field(factory=list)
    finished: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, from submission."""
        return self.token_times[0] - self.submitted if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token: (last - first) / (n - 1); None below two tokens."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def jitter(self) -> float | None:
        """p95 - p50 of the inter-token latencies; None below two tokens."""
        gaps = self.itl
        return percentile(gaps, 95) - percentile(gaps, 50) if gaps else None

    @property
    def queue_time(self) -> float | None:
        """From submission to admission."""
        return None if self.admitted is None else self.admitted - self.submitted


class Histogram:
    """Counts by bucket for ever, percentiles over the latest values."""

    __slots__ = ("buckets", "count", "edges", "recent", "total")

    def __init__(self, edges: tuple[float, ...] = SECONDS) -> None:
        self.edges = edges
        self.buckets = [0] * (len(edges) + 1)  # the last one counts what lies above every edge
        self.count = 0
        self.total = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        """Count one value."""
        self.buckets[bisect_left(self.edges, value)] += 1
        self.count += 1
        self.total += value
        self.recent.append(value)

    def summary(self) -> dict[str, float]:
        """Return count, mean, p50, p95, p99 and max; percentiles and max are over the latest values."""
        values = list(self.recent)
        if not values:
            return {"count": 0}
        return {
            "count": self.count,
            "mean": self.total / self.count,
            **{f"p{p}": percentile(values, p) for p in (50, 95, 99)},
            "max": max(values),
        }


class EngineMetrics:
    """Totals over all requests and works of an engine.

    Attributes:
        prefill_steps_total: (request, chunk) items that were computed.
        prefill_decode_overlap_steps: Cycles that had both kinds of work, in whatever form.
        out_of_memory_total: Times that anything found no memory, whether halved, put off or failed.
        lane_seconds: Lane -> time of the works that ran on it.
        prefill_decode_stream_overlap_steps: Launches on one CUDA stream while the other kind was unfinished on another.
    """

    def __init__(self) -> None:
        self.cycles = 0
        self.works = 0
        self.prefill_steps_total = 0
        self.prefill_decode_overlap_steps = 0
        self.prefill_decode_stream_overlap_steps = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.generated_tokens_total = 0
        self.preemptions_total = 0
        self.out_of_memory_total = 0
        self.requests_total = 0
        self.lane_seconds: dict[str, float] = {}
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.ttft_seconds = Histogram()
        self.tpot_seconds = Histogram()
        self.itl_seconds = Histogram()
        self.jitter_seconds = Histogram()
        self.queue_seconds = Histogram()
        self.prefill_chunk_seconds = Histogram()
        self.decode_step_seconds = Histogram()
        self.mixed_step_seconds = Histogram()

    @property
    def histograms(self) -> dict[str, Histogram]:
        """Every histogram by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Histogram)}

    @property
    def counters(self) -> dict[str, int]:
        """Every counter by name, without the finish reasons."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def worked(self, kind: str, seconds: float, lane: str) -> None:
        """Count a finished work of kind ``prefill``, ``decode`` or ``mixed``."""
        self.works += 1
        self.lane_seconds[lane] = self.lane_seconds.get(lane, 0.0) + seconds
        name = {"prefill": "prefill_chunk_seconds", "decode": "decode_step_seconds", "mixed": "mixed_step_seconds"}[
            kind
        ]
        histogram: Histogram = getattr(self, name)
        histogram.add(seconds)

    def token(self, request: RequestMetrics, now: float) -> None:
        """Count one accepted token."""
        self.generated_tokens_total += 1
        times = request.token_times
        if times:
            self.itl_seconds.add(now - times[-1])
        else:
            self.ttft_seconds.add(now - request.submitted)
        times.append(now)

    def ended(self, request: RequestMetrics, reason: str, now: float) -> None:
        """Count the end of one choice."""
        request.finished = now
        self.finished[reason] += 1
        if request.tpot is not None and request.jitter is not None:
            self.tpot_seconds.add(request.tpot)
            self.jitter_seconds.add(request.jitter)
