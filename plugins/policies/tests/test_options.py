"""Options are checked where they are made; the error names option and value."""

from __future__ import annotations

from typing import Any

import pytest
from deepinfer_policies.dual_stream import DualStreamOptions
from deepinfer_policies.mixed import MixedOptions
from deepinfer_policies.serial import SerialOptions
from deepinfer_policies.slo import SloOptions
from deepinfer_policies.time_sliced import TimeSlicedOptions

from deepinfer_core.errors import ConfigError


@pytest.mark.parametrize("options", [SerialOptions, MixedOptions, DualStreamOptions])
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True])
def test_chunk_tokens_is_a_whole_number_above_0(options: Any, value: object) -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens = .*whole number of at least 1"):
        options(chunk_tokens=value)


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_p95_ms", "max_itl_ms"])
@pytest.mark.parametrize("value", [0, -5.0, float("nan"), float("inf"), "50", True])
def test_objectives_are_milliseconds_above_0(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*milliseconds above 0"):
        SloOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1.1, -0.5, "x"])
def test_the_margin_is_a_share(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"margin = .*above 0 and at most 1"):
        SloOptions(margin=value)


def test_a_slice_needs_a_length_and_a_style_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match="slice_ms = None"):
        TimeSlicedOptions(slice_ms=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="style = 'fast': it must be one of mixed, sliced"):
        SloOptions(style="fast")  # type: ignore[arg-type]


def test_whole_milliseconds_and_none_are_taken() -> None:
    options = SloOptions(ttft_ms=500, tpot_p95_ms=None, max_itl_ms=80.5, margin=1)
    assert (options.ttft_ms, options.tpot_p95_ms, options.max_itl_ms) == (500, None, 80.5)
