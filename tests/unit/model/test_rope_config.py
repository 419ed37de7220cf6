"""Rotary parameters in the layouts that configs have used."""

import logging
import math

import pytest

from deepinfer_core.errors import ModelError
from deepinfer_core.model.config_values import ConfigValues
from deepinfer_core.model.rope_config import rope_from_hf

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope(**values):
    return rope_from_hf(ConfigValues({"max_position_embeddings": 32768, **values}))


def test_the_base_is_read_from_the_old_and_the_new_place():
    old = rope(rope_theta=1e6)
    new = rope(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert old == new
    assert old.theta == 1e6


def test_of_two_bases_the_one_in_rope_parameters_wins_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        found = rope(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert found.theta == 1e6
    assert "10000 at the top and 1e+06" in caplog.text


def test_equal_bases_in_both_places_warn_of_nothing(caplog):
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        rope(rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert not caplog.records


def test_without_a_base_ten_thousand_is_used_with_a_notice(caplog):
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert rope().theta == 10_000.0
    assert "no rope_theta" in caplog.text


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_llama3_is_found_under_either_name_and_table(key, table):
    found = rope(rope_theta=5e5, **{table: {key: "llama3", **LLAMA3}})
    assert (found.type, found.theta, found.factor) == ("llama3", 5e5, 32.0)
    assert (found.low_freq_factor, found.high_freq_factor, found.original_max_positions) == (1.0, 4.0, 8192)


@pytest.mark.parametrize("kind", ["foo", "dynamic", "longrope", "mrope", ["llama3"]])
def test_other_types_are_refused_by_name(kind):
    with pytest.raises(ModelError, match=r"rope type .* is not supported; .*default, linear, llama3, yarn"):
        rope(rope_theta=1e4, rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_llama3_parameter_is_named(key):
    values = {k: v for k, v in LLAMA3.items() if k != key}
    with pytest.raises(ModelError, match=f"rope_scaling has no {key}"):
        rope(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **values})


def test_llama3_factors_in_the_wrong_order_are_refused():
    with pytest.raises(ModelError, match="low_freq_factor < high_freq_factor"):
        rope(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0})


def test_linear_needs_a_factor():
    assert rope(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4}).factor == 4.0
    with pytest.raises(ModelError, match="no factor"):
        rope(rope_theta=1e4, rope_scaling={"type": "linear"})


class TestYarnAttentionFactor:
    def yarn(self, **values):
        return rope(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "factor": 4.0, **values})

    def test_it_is_inferred_from_the_factor(self):
        assert self.yarn().attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)

    def test_it_is_what_the_config_says(self):
        assert self.yarn(attention_factor=1.5).attention_factor == 1.5

    def test_it_is_a_ratio_of_both_mscales(self):
        found = self.yarn(mscale=1.0, mscale_all_dim=0.5).attention_factor
        assert found == pytest.approx((0.1 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1))

    def test_one_mscale_alone_changes_nothing(self):
        assert self.yarn(mscale=0.7).attention_factor == self.yarn().attention_factor

    def test_a_factor_below_one_leaves_values_as_they_are(self):
        assert self.yarn(factor=0.5).attention_factor == 1.0

    def test_a_missing_factor_is_the_ratio_of_the_lengths(self):
        found = self.yarn(factor=None, original_max_position_embeddings=4096)
        assert found.factor == 8.0

    def test_the_original_length_at_the_top_wins(self):
        found = rope(
            original_max_position_embeddings=2048,
            rope_theta=1e6,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        )
        assert found.original_max_positions == 2048


def test_partial_rotation_is_refused():
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5"):
        rope(rope_theta=1e4, partial_rotary_factor=0.5)


def test_parameters_that_differ_by_layer_type_are_refused():
    with pytest.raises(ModelError, match="by layer type"):
        rope(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})


@pytest.mark.parametrize("table", [[], "yarn", 3])
def test_a_table_of_the_wrong_type_is_ignored_when_empty_and_refused_otherwise(table):
    if not table:
        assert rope(rope_theta=1e4, rope_scaling=table).type == "default"
    else:
        with pytest.raises(ModelError, match="rope_scaling is"):
            rope(rope_theta=1e4, rope_scaling=table)
