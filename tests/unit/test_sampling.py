"""SamplingParams refuses what cannot be sampled, by field, value and range."""

import math

import pytest

from deepinfer_core.errors import DeepinferError, RequestError
from deepinfer_core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x y": -50}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": 1e30}),
        ("logit_bias", {"5": math.nan}),
        ("logit_bias", [1]),
        ("seed", 1 << 70),
        ("seed", 1.0),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("n", 0),
        ("n", 10_000),
        ("priority", "high"),
        ("deadline_ms", 0),
    ],
)
def test_impossible_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens = 9: it must be at most max_tokens = 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_json_forms_are_taken_as_they_come() -> None:
    params = SamplingParams(logit_bias={"5": 1, 7: -2.5}, stop="END", stop_token_ids=[3, 4])
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 9e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 2.0])
def test_other_temperature_samples(temperature: float) -> None:
    assert not SamplingParams(temperature=temperature).greedy


def test_ids_beyond_the_vocabulary_are_refused_before_admission() -> None:
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=(99,)).check_for(100)
    with pytest.raises(DeepinferError, match="logit_bias = 100"):
        SamplingParams(logit_bias={100: 1.0}).check_for(100)
    with pytest.raises(DeepinferError, match="stop_token_ids = 10000000"):
        SamplingParams(stop_token_ids=(10**7,)).check_for(100)


def test_changed_names_what_the_caller_set() -> None:
    assert SamplingParams().changed() == {}
    assert SamplingParams(seed=0, top_k=5).changed() == {"seed": 0, "top_k": 5}
