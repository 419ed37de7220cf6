"""What the policies do to people who wait, on the simulated small card: a long prompt among streams, idle and busy."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from attrs import evolve
from deepinfer_policies.dual_stream import DualStream
from deepinfer_policies.mixed import Mixed, MixedOptions
from deepinfer_policies.plugin import POLICIES
from deepinfer_policies.serial import Serial, SerialOptions
from deepinfer_policies.slo import SloOptions, SloPolicy
from deepinfer_policies.time_sliced import TimeSliced, TimeSlicedOptions

from deepinfer_core.plugin_api import Limits, SchedulingPolicy
from deepinfer_core.testing.simulator import Simulator, StepCost
from deepinfer_core.testing.trace import Arrival, SimulationResult, streams

CARD = StepCost.small_card()
WRONG = evolve(CARD, base_ms=25.0, prefill_token_ms=0.2, decode_row_ms=0.2)
LIMITS = Limits(
    max_batched_tokens=2048, max_requests=64, prefill_chunk_tokens=512, page_size=16, max_model_len=4096, overlap=True
)
LANES = {spec.name: spec.lanes for spec in POLICIES}

INSERTION = [*streams(4, max_tokens=300), Arrival(id="long", at=1.0, prompt_tokens=2000, max_tokens=8)]
STREAMS = [f"s{i}" for i in range(4)]

PHASES = [
    *(Arrival(id=f"idle{i}", at=1.5 * i, prompt_tokens=2000, max_tokens=8) for i in range(4)),
    *(Arrival(id=f"stream{i}", at=7 + 0.05 * i, prompt_tokens=100, max_tokens=400) for i in range(8)),
    *(Arrival(id=f"insert{i}", at=8 + 0.25 * i, prompt_tokens=300, max_tokens=40) for i in range(20)),
]


class Target(NamedTuple):
    ttft_ms: float
    tpot_p95_ms: float
    max_itl_ms: float


TARGET = Target(ttft_ms=1015, tpot_p95_ms=20, max_itl_ms=40)


def _serve(
    policy: SchedulingPolicy, trace: list[Arrival], name: str = "serial", prior: StepCost | None = None
) -> SimulationResult:
    simulator = Simulator(policy, limits=LIMITS, total_pages=4096, lanes=LANES[name], cost=CARD, prior=prior)
    return simulator.run(trace)


def _reached(result: SimulationResult) -> Target:
    return Target(result.ttft_ms(1.0), result.tpot_ms(0.95), result.max_itl_ms())


def _holds(reached: Target) -> bool:
    return all(value <= limit for value, limit in zip(reached, TARGET, strict=True))


@pytest.fixture(scope="module")
def serial() -> SimulationResult:
    return _serve(Serial(), INSERTION)


@pytest.mark.parametrize(
    "policy",
    [Mixed(MixedOptions(chunk_tokens=64)), SloPolicy(SloOptions(tpot_p95_ms=40, max_itl_ms=50))],
    ids=["mixed", "slo"],
)
def test_a_long_prompt_hardly_disturbs_streams_and_still_comes_soon(
    policy: SchedulingPolicy, serial: SimulationResult
) -> None:
    result = _serve(policy, INSERTION)
    assert serial.max_itl_ms(STREAMS) >= 5 * result.max_itl_ms(STREAMS)
    assert result.ttft_ms(1.0, ["long"]) <= 1.3 * serial.ttft_ms(1.0, ["long"])


def test_time_slices_bound_the_gap_by_milliseconds(serial: SimulationResult) -> None:
    for slice_ms in (20.0, 50.0):
        gap = _serve(TimeSliced(TimeSlicedOptions(slice_ms=slice_ms)), INSERTION).max_itl_ms(STREAMS)
        decode_ms = serial.itl_ms(0.5, STREAMS)
        assert decode_ms + 0.8 * slice_ms < gap <= decode_ms + slice_ms + 1


def test_two_lanes_keep_streams_going_at_the_cost_of_the_prompt(serial: SimulationResult) -> None:
    dual = _serve(DualStream(), INSERTION, "dual_stream")
    assert dual.max_itl_ms(STREAMS) < 0.1 * serial.max_itl_ms(STREAMS)
    assert dual.ttft_ms(1.0, ["long"]) > serial.ttft_ms(1.0, ["long"])


@pytest.mark.parametrize("prior", [CARD, WRONG], ids=["right prior", "wrong prior"])
def test_slo_holds_a_joint_target_through_idle_and_busy_phases(prior: StepCost) -> None:
    policy = SloPolicy(SloOptions(**TARGET._asdict()))
    reached = _reached(_serve(policy, PHASES, prior=prior))
    assert _holds(reached), reached


@pytest.mark.parametrize("chunk", [16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048])
def test_no_fixed_chunk_holds_that_target(chunk: int) -> None:
    for policy in (Mixed(MixedOptions(chunk_tokens=chunk)), Serial(SerialOptions(chunk_tokens=chunk))):
        reached = _reached(_serve(policy, PHASES))
        assert not _holds(reached), (policy, reached)


def test_each_part_of_the_target_is_missed_by_some_chunk_that_holds_the_others() -> None:
    small = _reached(_serve(Mixed(MixedOptions(chunk_tokens=32)), PHASES))
    large = _reached(_serve(Mixed(MixedOptions(chunk_tokens=512)), PHASES))
    assert small.ttft_ms > TARGET.ttft_ms
    assert _holds(small._replace(ttft_ms=0))
    assert large.ttft_ms < TARGET.ttft_ms
    assert large.max_itl_ms > TARGET.max_itl_ms
    assert large.tpot_p95_ms > TARGET.tpot_p95_ms


def test_a_requests_own_objective_goes_before_the_options() -> None:
    policy = SloPolicy(SloOptions(tpot_p95_ms=None, max_itl_ms=200))
    touchy = [evolve(a, slo=evolve(a.slo, max_itl_ms=30.0)) if a.id == "s2" else a for a in INSERTION]
    assert _serve(policy, INSERTION).max_itl_ms(STREAMS) > 150
    assert _serve(policy, touchy).max_itl_ms(STREAMS) <= 31


def test_slo_without_objectives_is_mixed_with_the_largest_chunk() -> None:
    policy = SloPolicy(SloOptions(tpot_p95_ms=None, max_itl_ms=None))
    largest = _serve(Mixed(MixedOptions(chunk_tokens=2048)), INSERTION)
    own = _serve(policy, INSERTION)
    assert own.ttft_ms(1.0, ["long"]) <= 1.01 * largest.ttft_ms(1.0, ["long"])


def test_a_late_prompt_is_worth_a_slower_mean_but_never_a_longer_gap() -> None:
    steady = SloOptions(tpot_p95_ms=12, max_itl_ms=60)
    slow = _serve(SloPolicy(steady), INSERTION)
    urgent = _serve(SloPolicy(evolve(steady, ttft_ms=1200)), INSERTION)
    assert slow.ttft_ms(1.0, ["long"]) > 1200 > urgent.ttft_ms(1.0, ["long"])
    assert urgent.max_itl_ms(STREAMS) <= 60


def test_sliced_slo_holds_the_gap_too() -> None:
    policy = SloPolicy(SloOptions(style="sliced", max_itl_ms=60, tpot_p95_ms=None))
    assert 30 < _serve(policy, INSERTION).max_itl_ms(STREAMS) <= 60
