"""Reading model specs from HF configs."""

import logging
import subprocess
import sys

import pytest

from deepinfer_core.errors import ModelError
from deepinfer_core.model.hf_config import model_spec_from_hf

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}


def config(architecture="LlamaForCausalLM", **values):
    return {**BASE, "architectures": [architecture], **values}


def test_llama_values_are_taken_over():
    spec = model_spec_from_hf(config(tie_word_embeddings=True, torch_dtype="bfloat16", hidden_act="silu"))
    assert (spec.hidden_size, spec.intermediate_size, spec.layers, spec.vocab_size) == (64, 96, 4, 128)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.q_size, spec.kv_size) == (4, 2, 16, 64, 32)
    assert spec.rms_eps == 1e-5
    assert spec.tie_word_embeddings
    assert spec.max_length == 256
    assert spec.dtype == "bfloat16"
    assert spec.sliding_windows == (None,) * 4
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4


def test_llama_biases_follow_the_config():
    spec = model_spec_from_hf(config(attention_bias=True, mlp_bias=True))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)


def test_qwen2_always_has_qkv_biases_and_no_others():
    spec = model_spec_from_hf(config("Qwen2ForCausalLM", attention_bias=False))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (True, False, False, False)


def test_mistral_has_no_biases_whatever_the_config_says():
    spec = model_spec_from_hf(config("MistralForCausalLM", attention_bias=True, mlp_bias=True, sliding_window=None))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False, False, False)


def test_qwen3_norms_heads_and_keeps_its_own_head_dim():
    spec = model_spec_from_hf(config("Qwen3ForCausalLM", head_dim=32))
    assert spec.qk_norm
    assert (spec.head_dim, spec.q_size, spec.kv_size) == (32, 128, 64)
    assert spec.scale == pytest.approx(32**-0.5)


def test_qwen3_without_head_dim_uses_128_as_transformers_does():
    assert model_spec_from_hf(config("Qwen3ForCausalLM")).head_dim == 128


def test_llama_without_kv_heads_is_multi_head():
    assert model_spec_from_hf(config(num_key_value_heads=None)).kv_heads == 4


def test_a_config_without_architectures_is_found_by_its_model_type():
    values = {**BASE, "model_type": "qwen2"}
    assert model_spec_from_hf(values).architecture == "Qwen2ForCausalLM"


class TestSlidingWindow:
    def test_mistral_window_is_on_in_every_layer(self):
        assert model_spec_from_hf(config("MistralForCausalLM", sliding_window=32)).sliding_windows == (32,) * 4

    @pytest.mark.parametrize("values", [{"sliding_window": None}, {}])
    def test_mistral_without_a_window_attends_to_all(self, values):
        assert model_spec_from_hf(config("MistralForCausalLM", **values)).sliding_windows == (None,) * 4

    def test_a_window_that_no_context_outgrows_is_off(self):
        assert model_spec_from_hf(config("MistralForCausalLM", sliding_window=256)).sliding_windows == (None,) * 4
        assert model_spec_from_hf(config("MistralForCausalLM", sliding_window=255)).sliding_windows == (255,) * 4

    def test_llama_ignores_a_stray_window(self):
        assert model_spec_from_hf(config(sliding_window=32)).sliding_windows == (None,) * 4

    @pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    def test_qwen_writes_a_window_that_is_not_in_use(self, architecture):
        spec = model_spec_from_hf(config(architecture, sliding_window=32, use_sliding_window=False))
        assert spec.sliding_windows == (None,) * 4

    def test_qwen_window_begins_at_max_window_layers(self):
        values = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}
        spec = model_spec_from_hf(config("Qwen2ForCausalLM", **values))
        assert spec.sliding_windows == (None, None, None, 32)

    def test_qwen_layer_types_win_over_max_window_layers(self):
        types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        values = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3, "layer_types": types}
        spec = model_spec_from_hf(config("Qwen3ForCausalLM", **values))
        assert spec.sliding_windows == (32, None, 32, None)

    @pytest.mark.parametrize("types", [["full_attention"] * 3, ["chunked_attention"] * 4, "full_attention"])
    def test_impossible_layer_types_are_refused(self, types):
        values = {"sliding_window": 32, "use_sliding_window": True, "layer_types": types}
        with pytest.raises(ModelError, match="layer"):
            model_spec_from_hf(config("Qwen3ForCausalLM", **values))


class TestRefusals:
    def test_an_unknown_architecture_is_named_with_the_supported_ones(self):
        with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM.*did you mean 'Qwen3ForCausalLM'.*Mistral"):
            model_spec_from_hf(config("Qwen3MoeForCausalLM"))

    def test_nothing_that_names_an_architecture(self):
        with pytest.raises(ModelError, match="model_type None"):
            model_spec_from_hf(BASE)

    def test_another_activation_is_named(self):
        with pytest.raises(ModelError, match=r"hidden_act 'gelu'.*silu"):
            model_spec_from_hf(config(hidden_act="gelu"))

    @pytest.mark.parametrize(
        "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    )
    def test_a_missing_size_is_named(self, key):
        values = config()
        del values[key]
        with pytest.raises(ModelError, match=f"no {key}"):
            model_spec_from_hf(values)

    @pytest.mark.parametrize("value", [0, -4, "64", 2.5, True, [64], float("nan"), float("inf")])
    def test_an_impossible_size_is_named_with_its_value(self, value):
        with pytest.raises(ModelError, match="hidden_size is"):
            model_spec_from_hf(config(hidden_size=value))

    @pytest.mark.parametrize("key", sorted(BASE.keys() - {"rms_norm_eps", "rope_theta"} | {"head_dim"}))
    @pytest.mark.parametrize("value", [10**18, 1e308, 10**400])
    def test_a_size_that_no_model_has_is_refused_before_anything_is_made_of_it(self, key, value):
        with pytest.raises(ModelError, match=f"{key} is .*; it must be a whole number, 1 to"):
            model_spec_from_hf(config(**{key: value}))

    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_a_number_beyond_floats_is_named(self, key):
        with pytest.raises(ModelError, match=f"{key} is 1000.*; it must be a positive number"):
            model_spec_from_hf(config(**{key: 10**400}))

    def test_the_file_is_named(self):
        for values in (
            config("Nobody"),
            config(hidden_size=0),
            config(hidden_act="x"),
            config(rope_scaling={"type": "x"}),
        ):
            with pytest.raises(ModelError, match=r"^models/a/config\.json: "):
                model_spec_from_hf(values, "models/a/config.json")

    @pytest.mark.parametrize("value", [0, -1e-5, "small", float("inf"), float("nan")])
    def test_an_impossible_epsilon_is_named(self, value):
        with pytest.raises(ModelError, match="rms_norm_eps is"):
            model_spec_from_hf(config(rms_norm_eps=value))

    def test_a_flag_that_is_no_boolean_is_named(self):
        with pytest.raises(ModelError, match="tie_word_embeddings is 'yes'"):
            model_spec_from_hf(config(tie_word_embeddings="yes"))

    def test_heads_that_do_not_divide_are_refused(self):
        with pytest.raises(ModelError, match=r"4 is not a multiple of num_key_value_heads 3"):
            model_spec_from_hf(config(num_key_value_heads=3))

    def test_a_head_dim_that_cannot_be_derived_is_refused(self):
        with pytest.raises(ModelError, match="head_dim"):
            model_spec_from_hf(config(num_attention_heads=6, num_key_value_heads=2))

    def test_an_odd_head_dim_is_refused(self):
        with pytest.raises(ModelError, match="head_dim 15 is odd"):
            model_spec_from_hf(config(head_dim=15))

    def test_no_length_for_a_family_without_a_default(self):
        values = config("Qwen2ForCausalLM")
        del values["max_position_embeddings"]
        with pytest.raises(ModelError, match="max_position_embeddings"):
            model_spec_from_hf(values)


def test_an_assumed_length_is_noticed(caplog):
    values = config()
    del values["max_position_embeddings"]
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert model_spec_from_hf(values).max_length == 2048
    assert "max_position_embeddings" in caplog.text


def test_specs_and_shapes_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import deepinfer_core.model.hf_config, deepinfer_core.model.shapes, deepinfer_core.model.spec"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
