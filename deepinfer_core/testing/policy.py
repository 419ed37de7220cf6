"""What every scheduling policy must hold: a suite that its author subclasses, run in the simulator, without a GPU."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

from attrs import evolve

from deepinfer_core.plugin_api import EngineView, LaneView, Limits, Plan, SchedulingPolicy, SchedulingPolicySpec
from deepinfer_core.testing.simulator import Simulator
from deepinfer_core.testing.trace import Arrival, SimulationResult, random_trace, streams

LIMITS = Limits(
    max_batched_tokens=256, max_requests=16, prefill_chunk_tokens=128, page_size=16, max_model_len=2048, overlap=True
)
PLENTY = 4096
"""Pages that no trace here uses up."""

PASSED_WORKS = 2000
"""Works that may pass a request which could be served, here where queues are long and some are urgent."""

FEW_WORKS = 6
"""Works that may run between two tokens of a stream: it must not freeze while others prefill."""


class PolicySuite:
    """Subclass it as ``class TestMine(PolicySuite)``, name your descriptor, and pytest runs the rest.

    Attributes:
        spec: The policy's descriptor.
        options: Values for its options class; none for the defaults.
    """

    spec: ClassVar[SchedulingPolicySpec]
    options: ClassVar[Mapping[str, Any]] = {}

    def make(self) -> SchedulingPolicy:
        """Return a fresh policy, made as the engine makes it."""
        factory = _load(self.spec.factory)
        policy: SchedulingPolicy = factory(_load(self.spec.options)(**self.options)) if self.spec.options else factory()
        return policy

    def simulate(self, trace: list[Arrival], *, pages: int = PLENTY, limits: Limits = LIMITS) -> SimulationResult:
        """Serve a trace with a fresh policy; every plan, page and work is checked on the way."""
        simulator = Simulator(
            self.make(), limits=limits, total_pages=pages, lanes=self.spec.lanes, patience=PASSED_WORKS
        )
        return simulator.run(trace)

    def test_it_can_be_made_twice_and_the_two_know_nothing_of_each_other(self) -> None:
        """A policy has no state at module level."""
        trace = random_trace(0)
        self.simulate(random_trace(1))
        assert self.simulate(trace) == self.simulate(trace)

    def test_it_plans_nothing_when_there_is_nothing_to_do(self) -> None:
        """An empty view gives an empty plan."""
        lanes = tuple(LaneView(name=lane.name, priority=lane.priority) for lane in self.spec.lanes)
        view = EngineView(
            now=0.0,
            waiting=(),
            prefilling=(),
            decoding=(),
            lanes=lanes,
            free_pages=8,
            total_pages=8,
            limits=LIMITS,
            cost=_NoCost(),
        )
        assert self.make().plan(view) == Plan()

    def test_everything_completes_whatever_arrives(self) -> None:
        """Short, long, urgent, cached and aborted requests all end, with valid plans alone."""
        for seed in range(6):
            self.simulate(random_trace(seed))

    def test_everything_completes_when_pages_run_out(self) -> None:
        """With a pool that barely holds the longest request, everyone gets through, by preemption."""
        for seed in range(4):
            trace = random_trace(seed)
            longest = max(a.prompt_tokens + a.max_tokens for a in trace)
            self.simulate(trace, pages=-(-longest // LIMITS.page_size) + seed)

    def test_everything_completes_on_one_lane(self) -> None:
        """A CPU, or ``--no-prefill-decode-overlap``, has one lane."""
        for seed in range(3):
            self.simulate(random_trace(seed), limits=evolve(LIMITS, overlap=False))

    def test_everything_completes_at_tight_limits(self) -> None:
        """One token a work; one request at once."""
        trace = random_trace(3, requests=8, longest=60)
        self.simulate(trace, limits=evolve(LIMITS, max_batched_tokens=1, prefill_chunk_tokens=1))
        self.simulate(trace, limits=evolve(LIMITS, max_requests=1))

    def test_a_stream_goes_on_while_long_prompts_arrive(self) -> None:
        """No phase has unconditional priority: decodes are not frozen by prefill."""
        prompts = [Arrival(id=f"p{i}", at=0.5, prompt_tokens=1500, max_tokens=4) for i in range(6)]
        result = self.simulate([*streams(1), *prompts])
        own = [i for i, work in enumerate(result.works) if any(name == "s0" for name, _ in work.items)]
        assert max(later - earlier for earlier, later in pairwise(own)) <= FEW_WORKS

    def test_a_newcomer_starts_beside_running_streams(self) -> None:
        """No phase has unconditional priority: prefill is not starved by decodes."""
        newcomer = Arrival(id="new", at=1.0, prompt_tokens=20, max_tokens=2)
        result = self.simulate([*streams(8, max_tokens=300), newcomer])
        first = result.served["new"].token_times[0]
        assert sum(newcomer.at < (work.launched_at or 0) < first for work in result.works) <= 8 * FEW_WORKS

    def test_admitted_prompts_go_on_while_one_that_does_not_fit_waits(self) -> None:
        """A waiting prompt holds back those behind it, never those that were admitted before it."""
        rng = random.Random(0)
        trace = [Arrival(id=f"r{i}", at=0.0, prompt_tokens=rng.randint(1, 60), max_tokens=20) for i in range(40)]
        limits = evolve(LIMITS, page_size=8, prefill_chunk_tokens=24)
        Simulator(self.make(), limits=limits, total_pages=30, lanes=self.spec.lanes, patience=60).run(trace)

    def test_low_priority_waits_but_not_for_ever(self) -> None:
        """A flow of urgent requests delays a plain one, and does not starve it."""
        urgent = [Arrival(id=f"u{i}", at=i * 0.06, prompt_tokens=100, max_tokens=3, priority=1) for i in range(300)]
        plain = Arrival(id="plain", at=0.0, prompt_tokens=12, max_tokens=20)
        served = self.simulate([plain, *urgent]).served
        assert served["plain"].token_times[-1] < served["u299"].token_times[-1]


class _NoCost:
    def predict_ms(self, prefill_tokens: int, decode_rows: int, context: int) -> float:
        """Return a constant: nothing is planned by it."""
        return 1.0


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
