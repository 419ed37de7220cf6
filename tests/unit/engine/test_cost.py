"""The fitted cost: finds the true prices, and keeps its head with few, odd or changing measurements."""

from __future__ import annotations

import random
from typing import Any

import pytest
from attrs import evolve

from deepinfer_core.engine.cost import OnlineCost, StepCost
from deepinfer_core.plugin_api import StepFeedback

CARD = StepCost.small_card()
OTHER = StepCost(base_ms=20.0, prefill_token_ms=1.5, decode_row_ms=0.9, context_token_ms=0.0008)


def _step(true: StepCost, prefill: int, rows: int, context: int, factor: float = 1.0) -> StepFeedback:
    ms = true.predict_ms(prefill, rows, context) * factor
    return StepFeedback(lane="main", ms=ms, prefill_tokens=prefill, decode_rows=rows, context=context)


def _mixed_steps(true: StepCost, count: int, noise: float = 0.0, seed: int = 0) -> list[StepFeedback]:
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        prefill, rows = rng.choice([0, 0, 0, 32, 64, 512]), rng.randint(1, 16)
        context = rows * rng.randint(50, 3000) + prefill
        steps.append(_step(true, prefill, rows, context, 1 + rng.uniform(-noise, noise)))
    return steps


def _worst(cost: OnlineCost, true: StepCost) -> float:
    points = [(0, 1, 100), (0, 16, 16000), (64, 4, 4000), (512, 0, 2000), (512, 16, 30000)]
    return max(abs(cost.predict_ms(*p) / true.predict_ms(*p) - 1) for p in points)


def test_the_preset_is_the_small_card() -> None:
    assert CARD.predict_ms(0, 1, 0) == 9.0
    assert CARD.predict_ms(0, 16, 0) == 9.0
    assert CARD.predict_ms(0, 18, 0) == 10.0
    assert CARD.predict_ms(64, 4, 1000) == pytest.approx(9 + 0.5 * 52 + 0.19)
    assert CARD.predict_ms(512, 0, 0) == 9 + 0.5 * 496


def test_before_any_step_the_prior_is_the_answer() -> None:
    assert OnlineCost(OTHER).predict_ms(64, 4, 1000) == OTHER.predict_ms(64, 4, 1000)


def test_one_step_scales_the_prior() -> None:
    cost = OnlineCost(CARD)
    cost.observe(_step(CARD, 0, 4, 1000, factor=3.0))
    assert cost.predict_ms(64, 4, 1000) == pytest.approx(3 * CARD.predict_ms(64, 4, 1000))


@pytest.mark.parametrize(
    ("prior", "within"), [(CARD, 0.03), (evolve(OTHER, prefill_token_ms=0.0, decode_row_ms=0.0), 0.12)]
)
def test_exact_steps_give_the_true_prices(prior: StepCost, within: float) -> None:
    cost = OnlineCost(evolve(prior, free_tokens=0))
    for step in _mixed_steps(OTHER, 200):
        cost.observe(step)
    assert _worst(cost, OTHER) < within


def test_noise_is_averaged() -> None:
    cost = OnlineCost(evolve(CARD, free_tokens=0))
    for step in _mixed_steps(OTHER, 300, noise=0.2):
        cost.observe(step)
    assert _worst(cost, OTHER) < 0.12


def test_rare_slow_steps_are_shrugged_off() -> None:
    cost = OnlineCost(CARD)
    rng = random.Random(1)
    for step in _mixed_steps(CARD, 200, noise=0.05):
        cost.observe(evolve(step, ms=step.ms * 50) if rng.random() < 0.05 else step)
    assert _worst(cost, CARD) < 0.25


def test_a_slow_first_step_does_not_spoil_the_fit() -> None:
    cost = OnlineCost(CARD)
    steps = _mixed_steps(CARD, 30)
    cost.observe(evolve(steps[0], ms=10_000.0))
    for step in steps[1:]:
        cost.observe(step)
    assert _worst(cost, CARD) < 0.05


def test_a_device_that_becomes_three_times_slower_is_followed() -> None:
    cost = OnlineCost(CARD)
    for step in _mixed_steps(CARD, 100, noise=0.02):
        cost.observe(step)
    slow = StepCost(base_ms=27.0, prefill_token_ms=1.5, decode_row_ms=1.5, context_token_ms=0.00057, free_tokens=16)
    for step in _mixed_steps(slow, 150, noise=0.02, seed=2):
        cost.observe(step)
    assert _worst(cost, slow) < 0.2


def test_the_first_chunks_after_many_decodes_are_no_outliers() -> None:
    cost = OnlineCost(evolve(CARD, prefill_token_ms=0.05))
    for i in range(60):
        cost.observe(_step(CARD, 0, 4, 1000 + 4 * i))
    for i in range(3):
        cost.observe(_step(CARD, 512, 4, 1500 + 512 * i))
    assert cost.predict_ms(512, 4, 2000) == pytest.approx(CARD.predict_ms(512, 4, 2000), rel=0.1)


def test_prices_are_never_negative() -> None:
    cost = OnlineCost(CARD)
    for context in range(100, 8000, 100):  # the longer the context, the faster: no price can say that
        cost.observe(StepFeedback(lane="main", ms=50 - context / 200, prefill_tokens=0, decode_rows=4, context=context))
    assert min(cost.fitted.prices) >= 0
    assert cost.predict_ms(0, 0, 0) > 0


def test_what_was_never_varied_keeps_its_price() -> None:
    cost = OnlineCost(CARD)
    for _ in range(100):
        cost.observe(_step(CARD, 0, 4, 1000))
    assert cost.predict_ms(512, 4, 1000) == pytest.approx(CARD.predict_ms(512, 4, 1000), rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"ms": float("nan")},
        {"ms": float("inf")},
        {"ms": 0.0},
        {"ms": -1.0},
        {"out_of_memory": True},
        {"decode_rows": 0},
    ],
)
def test_steps_that_teach_nothing_are_left_out(change: dict[str, Any]) -> None:
    cost = OnlineCost(CARD)
    cost.observe(evolve(_step(CARD, 0, 4, 1000, factor=9), **change))
    assert cost.steps == 0
    assert cost.fitted == CARD
