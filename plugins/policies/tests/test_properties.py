"""Whatever arrives, and whatever the device costs, every policy serves everyone by the rules."""

from __future__ import annotations

import importlib

import pytest
from attrs import evolve
from deepinfer_policies.plugin import POLICIES
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.plugin_api import Limits, SchedulingPolicySpec, Slo
from deepinfer_core.testing.simulator import Sharing, Simulator, StepCost
from deepinfer_core.testing.trace import Arrival


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    trace = []
    for i in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, 40)) / 20
        prompt = draw(st.sampled_from([1, 15, 16, 17, 33]) | st.integers(1, 200))
        trace.append(
            Arrival(
                id=f"r{i}",
                at=at,
                prompt_tokens=prompt,
                max_tokens=draw(st.integers(1, 16)),
                cached_tokens=16 * draw(st.integers(0, (prompt - 1) // 16)),
                priority=draw(st.integers(-2, 2)),
                deadline=draw(st.none() | st.just(at + 0.2) | st.just(at + 20.0)),
                abort_at=draw(st.none() | st.none() | st.floats(at, at + 1)),
                slo=Slo(max_itl_ms=draw(st.none() | st.just(20.0)), ttft_ms=draw(st.none() | st.just(100.0))),
            )
        )
    return trace


costs = st.builds(
    StepCost,
    base_ms=st.sampled_from([0.5, 9.0, 50.0]),
    prefill_token_ms=st.sampled_from([0.0, 0.01, 0.5]),
    decode_row_ms=st.sampled_from([0.0, 0.5]),
    context_token_ms=st.sampled_from([0.0, 0.002]),
    free_tokens=st.sampled_from([0, 16]),
)

all_limits = st.builds(
    Limits,
    max_batched_tokens=st.sampled_from([1, 13, 64, 512]),
    max_requests=st.sampled_from([1, 3, 16]),
    prefill_chunk_tokens=st.sampled_from([5, 32, 512]),
    page_size=st.sampled_from([1, 16, 32]),
    max_model_len=st.just(512),
    overlap=st.booleans(),
)


@pytest.mark.parametrize("spec", POLICIES, ids=lambda spec: spec.name)
@given(
    trace=traces(),
    cost=costs,
    limits=all_limits,
    spare=st.integers(0, 12),
    interference=st.sampled_from([0.0, 0.9, 1.0]),
)
@settings(max_examples=25, deadline=None)
def test_everyone_is_served_by_the_rules(
    spec: SchedulingPolicySpec, trace: list[Arrival], cost: StepCost, limits: Limits, spare: int, interference: float
) -> None:
    module, _, name = spec.factory.partition(":")
    policy = getattr(importlib.import_module(module), name)()
    pages = max(-(-(a.prompt_tokens + a.max_tokens) // limits.page_size) for a in trace) + spare
    simulator = Simulator(
        policy,
        limits=limits,
        total_pages=pages,
        lanes=spec.lanes,
        cost=cost,
        prior=evolve(cost, base_ms=5.0),
        sharing=Sharing(interference=interference),
        patience=3000,
    )
    result = simulator.run(trace)
    for arrival in trace:
        served = result.served[arrival.id]
        assert served.complete or (arrival.abort_at is not None and served.aborted)
    computed = sum(work.prefill_tokens for work in result.works)
    if not result.preemptions and all(a.abort_at is None for a in trace):
        assert computed == sum(a.prompt_tokens - a.cached_tokens for a in trace)
