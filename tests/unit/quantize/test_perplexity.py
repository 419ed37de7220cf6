"""Perplexity over the text that ships with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from deepinfer_core.quantize.perplexity import perplexity, public_domain_text


def test_a_model_that_knows_nothing_has_the_vocabulary_as_its_perplexity() -> None:
    value, count = perplexity(lambda tokens: torch.full((len(tokens) - 1,), -math.log(97)), range(50))
    assert value == pytest.approx(97)
    assert count == 49


def test_each_windows_first_token_is_not_scored_and_a_last_lone_token_is_left_out() -> None:
    seen: list[list[int]] = []

    def score(tokens: Sequence[int]) -> torch.Tensor:
        seen.append(list(tokens))
        return torch.full((len(tokens) - 1,), -1.0)

    value, count = perplexity(score, list(range(9)), window=4)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert count == 6
    assert value == pytest.approx(math.e)


def test_nan_is_never_a_good_number() -> None:
    value, _ = perplexity(lambda tokens: torch.full((len(tokens) - 1,), float("nan")), range(8))
    assert math.isnan(value)


def test_the_text_ships_with_the_package_and_is_long_enough_to_tell_models_apart() -> None:
    text = public_domain_text()
    assert text.startswith("When on board H.M.S. 'Beagle,'")
    assert 3000 < len(text) < 8000
    assert text.isascii()
