"""What goes into a simulation and what comes out: arrivals, and the times of every token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, field, frozen

from deepinfer_core.plugin_api import Slo


@frozen(kw_only=True)
class Arrival:
    """One request of a trace.

    Attributes:
        id: Its name.
        at: Seconds after the start at which it is submitted.
        prompt_tokens: Length of its prompt, at least 1.
        max_tokens: Tokens it generates, at least 1: simulated requests have no end token.
        cached_tokens: Prompt tokens in the prefix cache.
        priority: Higher is more urgent.
        deadline: Seconds after the start; None for none.
        abort_at: When its client goes away; None for never.
        slo: Its own objectives.
    """

    id: str
    at: float
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    abort_at: float | None = None
    slo: Slo = field(factory=Slo)

    def __attrs_post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_tokens < 1 or not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ValueError(f"{self} needs prompt and max tokens of at least 1, and fewer cached than prompt tokens")


@frozen(kw_only=True)
class Served:
    """What one request saw. Times in seconds after the start, spans in milliseconds.

    Attributes:
        arrival: The request.
        admitted_at: When it was first planned; None for never.
        token_times: When each token came.
        preemptions: How often its pages were taken away.
        aborted: Its client went away before the end.
    """

    arrival: Arrival
    admitted_at: float | None = None
    token_times: tuple[float, ...] = ()
    preemptions: int = 0
    aborted: bool = False

    @property
    def complete(self) -> bool:
        """True when all tokens came."""
        return len(self.token_times) == self.arrival.max_tokens

    @property
    def ttft_ms(self) -> float:
        """From submission to the first token."""
        return (self.token_times[0] - self.arrival.at) * 1000

    @property
    def tpot_ms(self) -> float:
        """(last - first token) / (n - 1); 0 for one token."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) * 1000 / gaps if gaps > 0 else 0.0

    @property
    def itls_ms(self) -> tuple[float, ...]:
        """The gaps between tokens."""
        return tuple((b - a) * 1000 for a, b in zip(self.token_times, self.token_times[1:], strict=False))

    @property
    def max_itl_ms(self) -> float:
        """The longest gap between two tokens; 0 for one token."""
        return max(self.itls_ms, default=0.0)


@frozen(kw_only=True)
class WorkRecord:
    """One work: prepared by a plan, launched when its lane was free, finished.

    Attributes:
        lane: Where it ran.
        items: What it computed.
        prepared_at: Seconds.
        launched_at: Seconds; None for a work that never ran.
        finished_at: Seconds.
        prefill_tokens: Prompt tokens computed.
        decode_rows: Requests that decoded.
        context: Context tokens read.
    """

    lane: str
    items: tuple[tuple[str, int], ...]
    prepared_at: float
    launched_at: float | None = None
    finished_at: float | None = None
    prefill_tokens: int
    decode_rows: int
    context: int


@frozen(kw_only=True)
class SimulationResult:
    """What a simulation saw.

    Attributes:
        served: Every request by id.
        works: Every work in the order of preparation.
        duration: Seconds until the last request was done.
        faults: (time, rule) of plans that were replaced by the built-in one.
    """

    served: Mapping[str, Served]
    works: tuple[WorkRecord, ...]
    duration: float
    faults: tuple[tuple[float, str], ...] = field(default=())

    def select(self, ids: Iterable[str] | None = None) -> list[Served]:
        """Return the requests of these ids, or all."""
        return [self.served[i] for i in (self.served if ids is None else ids)]

    def max_itl_ms(self, ids: Iterable[str] | None = None) -> float:
        """Return the longest gap between two tokens of any of these requests."""
        return max((s.max_itl_ms for s in self.select(ids)), default=0.0)

    def ttft_ms(self, quantile: float, ids: Iterable[str] | None = None) -> float:
        """Return a quantile (0..1) of time to first token."""
        return quantile_of([s.ttft_ms for s in self.select(ids) if s.token_times], quantile)

    def tpot_ms(self, quantile: float, ids: Iterable[str] | None = None) -> float:
        """Return a quantile (0..1) of time per output token, of requests with more than one."""
        return quantile_of([s.tpot_ms for s in self.select(ids) if len(s.token_times) > 1], quantile)

    def itl_ms(self, quantile: float, ids: Iterable[str] | None = None) -> float:
        """Return a quantile (0..1) of the gaps between tokens of all these requests."""
        return quantile_of([gap for s in self.select(ids) for gap in s.itls_ms], quantile)

    @property
    def preemptions(self) -> int:
        """How often any request lost its pages."""
        return sum(s.preemptions for s in self.served.values())


def quantile_of(values: Sequence[float], quantile: float) -> float:
    """Return the value that ``quantile`` of the values do not exceed (nearest rank); 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else 0.0


def streams(count: int, *, prompt_tokens: int = 64, max_tokens: int = 200, at: float = 0.0) -> list[Arrival]:
    """Return ``count`` equal requests that start together, named s0, s1, ..."""
    shape = Arrival(id="s", at=at, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    return [evolve(shape, id=f"s{i}") for i in range(count)]


def random_trace(seed: int, *, requests: int = 24, longest: int = 600, span_s: float = 5.0) -> list[Arrival]:
    """Return arrivals of all kinds: short, long, urgent, with deadlines, cached prefixes, clients that go away."""
    rng = random.Random(seed)
    trace = []
    for i in range(requests):
        at = round(rng.uniform(0, span_s) if rng.random() < 0.7 else 0.0, 3)
        prompt = rng.choice([1, rng.randint(2, 40), rng.randint(2, longest)])
        trace.append(
            Arrival(
                id=f"r{i}",
                at=at,
                prompt_tokens=prompt,
                max_tokens=rng.choice([1, rng.randint(2, 16), rng.randint(2, max(2, longest // 6))]),
                cached_tokens=rng.choice([0, 0, 16 * rng.randint(0, (prompt - 1) // 16)]),
                priority=rng.choice([0, 0, 0, 1, -1]),
                deadline=at + rng.uniform(0.05, 3) if rng.random() < 0.2 else None,
                abort_at=at + rng.uniform(0, 2) if rng.random() < 0.15 else None,
            )
        )
    return sorted(trace, key=lambda a: a.at)
