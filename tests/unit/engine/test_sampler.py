"""Sampling: each option against plain arithmetic, and the promise that a row depends on nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.engine.sampler import NUCLEUS_TRY, Sampled, Sampler, _Batch, _edit
from deepinfer_core.engine.sampler_state import SamplerState, uniform
from deepinfer_core.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | options))


def _choose(logits: Sequence[float] | Tensor, prompt: Sequence[int] = (), **options: Any) -> Sampled:
    sampler = Sampler()
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    return sampler.sample(row, [sampler.open(_params(**options), prompt)])[0]


def _support(logits: Sequence[float], draws: int = 400, **options: Any) -> set[int | None]:
    """Ids that come up in many draws."""
    sampler = Sampler()
    rows = torch.tensor(logits).repeat(draws, 1)
    states = [sampler.open(_params(temperature=1.0, seed=i, **options), ()) for i in range(draws)]
    return {s.token for s in sampler.sample(rows, states)}


def _run(
    model: Tensor, seed: int | None, steps: int = 30, neighbours: int = 0, place: int = 0, **options: Any
) -> list[int | None]:
    """Decode ``steps`` tokens of a first-order model [vocab, vocab], alone or among neighbours."""
    sampler = Sampler()
    state = sampler.open(_params(temperature=1.0, seed=seed, **options), [0])
    others = [sampler.open(SamplingParams(top_p=0.9), [0]) for _ in range(neighbours)]
    tokens: list[int | None] = []
    last = 0
    for _ in range(steps):
        states = [*others[:place], state, *others[place:]]
        logits = model[torch.tensor([1] * place + [last] + [2] * (neighbours - place))]
        for row, sampled in zip(states, sampler.sample(logits, states), strict=True):
            assert sampled.token is not None
            row.accept(sampled.token)
            if row is state:
                tokens.append(sampled.token)
                last = sampled.token
    return tokens


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    assert _choose([0.0, 3.0, 3.0, -1.0]) == Sampled(1)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6])
def test_a_tiny_temperature_takes_the_most_likely(temperature: float) -> None:
    assert _choose([1.0, 1.0001, 0.5], temperature=temperature).token == 1


def test_extreme_temperatures_share_a_batch_without_nan() -> None:
    sampler = Sampler()
    logits = torch.tensor([40.0, 39.0, -60000.0, 0.0]).repeat(6, 1)
    temperatures = [0.0, 1e-8, 1e-5, 1e-4, 2.0, 1.0]
    states = [sampler.open(_params(temperature=t, seed=7), ()) for t in temperatures]
    tokens = [s.token for s in sampler.sample(logits, states)]
    assert tokens[:4] == [0, 0, 0, 0]
    alone = [sampler.sample(logits[:1], [s])[0].token for s in states]
    assert tokens == alone


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    sampler = Sampler()
    states = [sampler.open(_params(temperature=1.0, seed=5), ()) for _ in range(1)]
    counts = torch.zeros(4)
    for _ in range(4000):
        token = sampler.sample(probabilities.log()[None], states)[0].token
        assert token is not None
        counts[token] += 1
        states[0].accept(token)
    assert torch.allclose(counts / 4000, probabilities, atol=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    probabilities = torch.tensor([0.8, 0.2]).log()
    share = {}
    for temperature in (0.5, 2.0):
        sampler = Sampler()
        states = [sampler.open(_params(temperature=temperature, seed=i), ()) for i in range(2000)]
        tokens = sampler.sample(probabilities.repeat(2000, 1), states)
        share[temperature] = sum(s.token == 0 for s in tokens) / 2000
    assert share[0.5] == pytest.approx(0.941, abs=0.03)  # 0.8^2 / (0.8^2 + 0.2^2)
    assert share[2.0] == pytest.approx(0.667, abs=0.04)  # sqrt(0.8) / (sqrt(0.8) + sqrt(0.2))


FOUR = [2.0, 1.0, 0.0, -1.0]  # probabilities 0.644, 0.237, 0.087, 0.032


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.64}, {0}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.89}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1}),  # of the three that are left, two have 0.91
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"min_p": 0.2}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.2}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"logit_bias": {0: -100}}, {1, 2, 3}),
    ],
)
def test_truncation_leaves_exactly_these(options: dict[str, Any], left: set[int]) -> None:
    assert _support(FOUR, **options) == left


def test_top_k_breaks_ties_by_id() -> None:
    assert _support([1.0, 1.0, 1.0, 1.0, 0.0], top_k=2) == {0, 1}
    assert _support([0.0, -0.0, 0.0], top_k=2) == {0, 1}


def test_a_row_does_not_depend_on_the_widths_its_neighbours_need() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(4, 3000) * 3).half().float()
    sampler = Sampler()
    options: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.9999}, {"top_k": 2000, "top_p": 0.9}]
    states = [sampler.open(_params(temperature=1.5, seed=3, **o), ()) for o in options]
    for _ in range(20):
        together = sampler.sample(logits, states)
        alone = [Sampler().sample(logits[i : i + 1], [s])[0] for i, s in enumerate(states)]
        assert together == alone
        for state in states:
            state.accept(0)


def test_a_flat_nucleus_wider_than_the_first_look_is_sampled_whole() -> None:
    vocab = 2 * NUCLEUS_TRY
    support = _support([0.0] * vocab, draws=300, top_p=0.9)
    assert max(t for t in support if t is not None) > NUCLEUS_TRY
    assert max(t for t in support if t is not None) < 0.9 * vocab + 1


def test_a_seed_gives_the_same_tokens_alone_among_neighbours_twice_and_after_a_retry() -> None:
    torch.manual_seed(1)
    model = torch.randn(50, 50)
    alone = _run(model, 42)
    assert _run(model, 42) == alone
    assert _run(model, 42, neighbours=7, place=3) == alone
    assert _run(model, 43) != alone
    sampler = Sampler()
    state = sampler.open(_params(temperature=1.0, seed=42), [0])
    assert sampler.sample(model[:1], [state]) == sampler.sample(model[:1], [state])
    copies = [sampler.open(_params(temperature=1.0, seed=42), [0]) for _ in range(2)]
    first, second = sampler.sample(model[[0, 0]], copies)
    assert first == second == Sampled(alone[0])


def test_penalized_tokens_are_the_same_after_a_preemption_threw_the_tables_away() -> None:
    torch.manual_seed(2)
    model = torch.randn(30, 30)
    options = {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    results = []
    for preempt_at in (None, 4):
        sampler = Sampler()
        state = sampler.open(_params(**options), [1, 2])
        tokens: list[int] = []
        for step in range(12):
            if step == preempt_at:
                state.release()
            token = sampler.sample(model[tokens[-1:] or [2]], [state])[0].token
            assert token is not None
            state.accept(token)
            tokens.append(token)
        results.append(tokens)
    assert results[0] == results[1]


def test_a_flat_model_draws_many_different_tokens() -> None:
    assert len(set(_run(torch.zeros(100, 100), 42, steps=100))) > 40


def test_requests_without_a_seed_differ() -> None:
    assert _run(torch.zeros(1000, 1000), None) != _run(torch.zeros(1000, 1000), None)


def test_forks_differ_and_the_first_is_the_original() -> None:
    state = Sampler().open(_params(temperature=1.0, seed=1), ())
    draws = [state.fork(i).draw() for i in range(8)]
    assert draws[0] == state.draw()
    assert len(set(draws)) == 8


def test_the_uniform_numbers_are_uniform_and_unrelated() -> None:
    draws = torch.tensor([[uniform(seed, position) for position in range(200)] for seed in range(100)])
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    histogram = torch.histc(draws, bins=20, min=0, max=1)
    assert float(((histogram - 1000) ** 2 / 1000).sum()) < 45  # chi-squared with 19 degrees: 0.1 % above 43.8
    for left, right in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        correlation = torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]
        assert abs(float(correlation)) < 0.03


def _penalized(logits: Sequence[float], neighbour: bool, **options: Any) -> list[float]:
    """Return the logits after penalties for a prompt of ids 3 3 3 and the one generated id 1."""
    sampler = Sampler()
    state = sampler.open(_params(**options), [3, 3, 3])
    state.accept(1)
    states = [state]
    rows = torch.tensor([logits])
    if neighbour:
        states.append(sampler.open(_params(**options), list(range(4)) * 50))
        rows = rows.repeat(2, 1)
    edited: list[float] = _edit(rows, _Batch(states, rows.device))[0].tolist()
    return edited


@pytest.mark.parametrize("neighbour", [False, True])
def test_penalties_count_as_documented(neighbour: bool) -> None:
    logits = [1.2, 2.4, -1.0, -1.2]
    assert _penalized(logits, neighbour, presence_penalty=0.5) == pytest.approx([1.2, 1.9, -1.0, -1.2])
    assert _penalized(logits, neighbour, frequency_penalty=0.5) == pytest.approx([1.2, 1.9, -1.0, -1.2])
    assert _penalized(logits, neighbour, repetition_penalty=1.2) == pytest.approx([1.2, 2.0, -1.0, -1.44])
    together = _penalized(logits, neighbour, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2)
    assert together == pytest.approx([1.2, 1.0, -1.0, -1.44])


def test_a_generated_token_of_the_prompt_is_penalized_once_by_repetition() -> None:
    sampler = Sampler()
    state = sampler.open(_params(repetition_penalty=2.0, frequency_penalty=1.0), [0, 0, 0])
    for _ in range(3):
        state.accept(0)
    # 8 / 2 - 3 = 1, below the other's 1.5, above its 0.5
    assert sampler.sample(torch.tensor([[8.0, 1.5]]), [state])[0].token == 1
    assert sampler.sample(torch.tensor([[8.0, 0.5]]), [state])[0].token == 0


def test_end_tokens_do_not_come_before_min_tokens() -> None:
    sampler = Sampler(end_ids={0})
    state = sampler.open(_params(min_tokens=2, stop_token_ids=[1]), ())
    seen = []
    for _ in range(3):
        seen.append(sampler.sample(torch.tensor([[9.0, 8.0, 7.0]]), [state])[0].token)
        state.accept(2)
    assert seen == [2, 2, 0]
    ignoring = sampler.open(_params(min_tokens=2, ignore_eos=True), ())
    assert sampler.sample(torch.tensor([[9.0, 8.0, 7.0]]), [ignoring])[0].token == 0


def test_bias_is_added_and_the_given_logits_stay_as_they_were() -> None:
    sampler = Sampler()
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    state = sampler.open(_params(logit_bias={"0": 5, "2": -100}), ())
    assert sampler.sample(logits, [state])[0].token == 0
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}])
@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0], [1.0, 2.0, NAN], [INF, 1.0, 2.0], [-INF, -INF, -INF]])
def test_a_row_without_a_finite_maximum_is_reported_and_others_are_not(bad: list[float], options: Any) -> None:
    sampler = Sampler()
    states = [sampler.open(_params(seed=1, **options), ()) for _ in range(3)]
    good = [1.0, 200.0, 2.0]
    sampled = sampler.sample(torch.tensor([good, bad, good]), states)
    assert sampled[1] == Sampled(None)
    assert [sampled[0].token, sampled[2].token] == [1, 1]


def test_minus_infinity_is_never_drawn() -> None:
    assert _support([-INF, 0.0, -INF, 0.0, -INF]) == {1, 3}
    assert _support([-INF, 0.0, -INF, 0.0, -INF], top_p=0.999) == {1, 3}


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = logits.double().log_softmax(0).tolist()
    sampled = _choose(logits, logprobs=2, temperature=0.0, logit_bias={"3": 50})
    assert sampled.token == 3
    assert sampled.logprob == pytest.approx(expected[3])
    assert [i for i, _ in sampled.top] == [0, 1]
    assert [p for _, p in sampled.top] == pytest.approx(expected[:2])
    assert _choose(logits, logprobs=0).top == ()
    assert len(_choose(logits, logprobs=20).top) == 4


def test_rows_report_only_what_each_asked_for() -> None:
    sampler = Sampler()
    states = [sampler.open(_params(logprobs=n), ()) for n in (None, 3, 1)]
    sampled = sampler.sample(torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1), states)
    assert [len(s.top) for s in sampled] == [0, 3, 1]
    assert sampled[0].logprob is None
    assert sampled[1].top[0] == sampled[2].top[0] == (2, sampled[2].logprob)


def test_prompt_logprobs_report_the_tokens_that_follow() -> None:
    logits = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    rows = Sampler().prompt_logprobs(logits, [0, 1], 1)
    expected = logits.double().log_softmax(-1)
    assert [r.logprob for r in rows] == pytest.approx([float(expected[0, 0]), float(expected[1, 1])])
    assert [r.top[0][0] for r in rows] == [1, 0]
    assert Sampler().prompt_logprobs(logits[:0], [], 1) == []


def test_half_precision_logits_are_taken() -> None:
    sampler = Sampler()
    states = [sampler.open(_params(temperature=t, seed=0), ()) for t in (0.0, 1.0)]
    assert all(s.token is not None for s in sampler.sample(torch.randn(2, 8).bfloat16(), states))


def test_changing_the_batch_between_steps_changes_nothing_for_a_row() -> None:
    sampler = Sampler()
    logits = torch.zeros(3, 64)
    a, b, c = (sampler.open(_params(temperature=1.0, seed=i), ()) for i in range(3))

    def tokens(*states: SamplerState) -> list[int | None]:
        return [s.token for s in sampler.sample(logits[: len(states)], states)]

    ab = tokens(a, b)
    assert tokens(b, a) == ab[::-1]
    assert tokens(c, a, b)[1:] == ab
    assert tokens(a) == ab[:1]
    assert sampler.sample(logits[:0], []) == []


@pytest.mark.gpu
def test_a_card_chooses_what_the_cpu_chooses() -> None:
    torch.manual_seed(4)
    logits = torch.randn(256, 5000) * 3
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {"7": 4.0}},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_tokens": 2, "stop_token_ids": [1, 2, 3]},
    ]
    sampler = Sampler(end_ids=[0])
    states = [sampler.open(_params(seed=i, **options[i % 4]), [5, 6, 7]) for i in range(256)]
    logits[17, 3] = NAN
    here, there = sampler.sample(logits, states), sampler.sample(logits.cuda(), states)
    assert here[17] == there[17] == Sampled(None)
    same = sum(a.token == b.token for a, b in zip(here, there, strict=True))
    assert same >= 254  # exp differs in its last bit, which may move a draw that falls on an edge
