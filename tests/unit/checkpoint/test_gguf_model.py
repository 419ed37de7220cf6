"""A GGUF model answers like the Hugging Face model it was made from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from deepinfer_core.checkpoint import LayerFormat, open_checkpoint
from deepinfer_core.checkpoint.base import SourceGroups
from deepinfer_core.errors import CheckpointError

Save = Callable[..., Path]
Tensors = dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
Kind = gguf.GGMLQuantizationType
LAYER = "model.layers.0"


def converter_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as the llama converter writes them: (0, half, 1, half + 1, ...) in each head."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def test_names_formats_and_dtypes_follow_the_stored_types(save_gguf: Save, gguf_tensors: Tensors) -> None:
    checkpoint = open_checkpoint(save_gguf(gguf_tensors))
    assert checkpoint.kind == "gguf"
    q, k, v, up, down = (f"{LAYER}.{m}" for m in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"
    ))  # fmt: skip
    assert checkpoint.layer_format(q) == LayerFormat("w4a16", 32, True, "deepinfer-plugin-w4a16")
    assert checkpoint.layer_format(k) == LayerFormat("w4a16", 32, False, "deepinfer-plugin-w4a16")
    assert checkpoint.layer_format(v).dense
    names = checkpoint.names()
    assert {f"{q}.packed", f"{q}.scales", f"{q}.zeros", f"{k}.packed", f"{k}.scales", f"{v}.weight"} <= names
    assert not {f"{q}.weight", f"{k}.zeros"} & names
    assert checkpoint.shape(f"{q}.packed") == (64, 32)
    assert checkpoint.shape(f"{q}.zeros") == (64, 2)
    for name in names:
        part = name.rpartition(".")[2]
        tensor = (
            checkpoint.tensor(name) if part == "weight" else checkpoint.layer_tensors(name.rpartition(".")[0])[part]
        )
        assert tuple(tensor.shape) == checkpoint.shape(name), name
        assert str(tensor.dtype) == f"torch.{checkpoint.dtype(name)}", name
    assert [checkpoint.dtype(f"{m}.weight") for m in (v, up, down)] == ["float32", "float16", "bfloat16"]
    assert [checkpoint.written_dtype(f"{m}.weight") for m in (v, up, down)] == ["float16", "float16", "bfloat16"]
    assert checkpoint.written_dtype("model.norm.weight") == "float32"
    assert checkpoint.source_groups(q) == SourceGroups(32, True)
    assert checkpoint.source_groups(v) == SourceGroups(32, False)
    assert checkpoint.source_groups(up) == SourceGroups(0, False)


def test_a_four_bit_embedding_is_dense(save_gguf: Save, gguf_tensors: Tensors) -> None:
    values, _ = gguf_tensors["token_embd.weight"]
    gguf_tensors["token_embd.weight"] = (values, Kind.Q4_0)
    checkpoint = open_checkpoint(save_gguf(gguf_tensors))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, Kind.Q4_0), Kind.Q4_0)
    assert np.array_equal(embedding.numpy(), expected)
    assert checkpoint.tied
    assert checkpoint.layer_format("lm_head").dense
    assert torch.equal(checkpoint.layer_tensors("lm_head")["weight"], embedding)


def test_an_output_tensor_unties_the_head(save_gguf: Save, gguf_tensors: Tensors) -> None:
    gguf_tensors["output.weight"] = (np.ones((48, 64), np.float32), Kind.Q4_1)
    checkpoint = open_checkpoint(save_gguf(gguf_tensors))
    assert not checkpoint.tied
    assert checkpoint.hf_config["tie_word_embeddings"] is False
    assert checkpoint.layer_format("lm_head").scheme == "w4a16"


@pytest.mark.parametrize(("kind", "part"), [(Kind.F32, "weight"), (Kind.Q4_0, "packed"), (Kind.Q4_1, "zeros")])
def test_llama_rows_of_q_and_k_are_put_back_with_their_own_head_counts(
    save_gguf: Save, gguf_tensors: Tensors, kind: gguf.GGMLQuantizationType, part: str
) -> None:
    rng = np.random.default_rng(11)
    q, k = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (64, 32))
    plain = save_gguf(
        gguf_tensors | {"blk.0.attn_q.weight": (q, kind), "blk.0.attn_k.weight": (k, kind)}, "qwen2", name="plain.gguf"
    )
    reordered = save_gguf(
        gguf_tensors
        | {
            "blk.0.attn_q.weight": (converter_order(q, 4), kind),
            "blk.0.attn_k.weight": (converter_order(k, 2), kind),
        }
    )
    expected, found = open_checkpoint(plain), open_checkpoint(reordered)
    for module in (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj"):
        theirs, ours = expected.layer_tensors(module), found.layer_tensors(module)
        assert part in ours
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_head_of_four_stored_as_0_2_1_3_comes_back_as_0_1_2_3(save_gguf: Save, gguf_tensors: Tensors) -> None:
    rows = np.tile(np.array([0, 2, 1, 3], np.float32)[:, None], (1, 64))
    for kv_heads in (1, 2):
        tensors = gguf_tensors | {
            "blk.0.attn_q.weight": (np.tile(rows, (4, 1)), Kind.F32),
            "blk.0.attn_k.weight": (np.tile(rows, (kv_heads, 1)), Kind.F32),
            "blk.0.attn_v.weight": (np.tile(rows, (kv_heads, 1)), Kind.F32),
            "blk.0.attn_q.bias": (np.tile(rows[:, 0], 4), Kind.F32),
        }
        keys = {"attention.head_count_kv": kv_heads, "attention.key_length": 4, "attention.value_length": 4}
        checkpoint = open_checkpoint(save_gguf(tensors, keys=keys))
        assert checkpoint.tensor(f"{LAYER}.self_attn.q_proj.weight")[:, 0].tolist() == [0, 1, 2, 3] * 4
        assert checkpoint.tensor(f"{LAYER}.self_attn.k_proj.weight")[:, 0].tolist() == [0, 1, 2, 3] * kv_heads
        assert checkpoint.tensor(f"{LAYER}.self_attn.q_proj.bias").tolist() == [0, 1, 2, 3] * 4
        assert checkpoint.tensor(f"{LAYER}.self_attn.v_proj.weight")[:, 0].tolist() == [0, 2, 1, 3] * kv_heads


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_are_left_as_they_are(save_gguf: Save, gguf_tensors: Tensors, arch: str) -> None:
    rows = np.arange(64, dtype=np.float32)[:, None].repeat(64, 1)
    tensors = gguf_tensors | {
        "blk.0.attn_q.weight": (rows, Kind.F32),
        "blk.0.attn_q_norm.weight": (np.ones(16, np.float32), Kind.F32),
    }
    checkpoint = open_checkpoint(save_gguf(tensors, arch))
    assert checkpoint.tensor(f"{LAYER}.self_attn.q_proj.weight")[:, 0].tolist() == list(range(64))
    assert checkpoint.has(f"{LAYER}.self_attn.q_norm.weight")


def test_the_config_has_what_the_keys_say(save_gguf: Save, gguf_tensors: Tensors) -> None:
    keys: dict[str, Any] = {
        "rope.freq_base": 1e6, "attention.key_length": 16, "context_length": 512,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9,
    }  # fmt: skip
    checkpoint = open_checkpoint(save_gguf(gguf_tensors, "qwen3", keys))
    expected = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 48, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": [2, 9],
    }  # fmt: skip
    assert {key: checkpoint.hf_config[key] for key in expected} == expected
    assert checkpoint.eos_token_ids() == {2, 9}
    assert checkpoint.generation_config == {"eos_token_id": [2, 9], "bos_token_id": 1}
    assert (checkpoint.tokenizer_path, checkpoint.tokenizer_gguf) == (checkpoint.path.parent, checkpoint.path.name)


def test_defaults_are_those_of_the_format(save_gguf: Save, gguf_tensors: Tensors) -> None:
    config = open_checkpoint(save_gguf(gguf_tensors)).hf_config
    assert (config["rope_theta"], config["head_dim"], config["model_type"]) == (10_000.0, 16, "llama")
    assert config["attention_bias"] is False
    assert "sliding_window" not in config


def test_a_window_in_a_llama_file_makes_it_mistral(save_gguf: Save, gguf_tensors: Tensors) -> None:
    config = open_checkpoint(save_gguf(gguf_tensors, keys={"attention.sliding_window": 32})).hf_config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 32)


def llama3_divisors(head_dim: int, base: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The rule as Llama 3.1's paper code has it, frequency by frequency."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(32.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 8192), (4.0, 1.0, 8.0, 4096)]
)
def test_a_rope_freqs_tensor_becomes_llama3_scaling(
    save_gguf: Save, gguf_tensors: Tensors, factor: float, low: float, high: float, original: int
) -> None:
    divisors = llama3_divisors(64, 5e5, factor, low, high, original)
    tensors = {name: entry for name, entry in gguf_tensors.items() if "attn" not in name}
    tensors |= {"rope_freqs.weight": (divisors, Kind.F32)}
    keys = {"rope.freq_base": 5e5, "attention.key_length": 64, "attention.value_length": 64}
    checkpoint = open_checkpoint(save_gguf(tensors, keys=keys))
    scaling = checkpoint.hf_config["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == pytest.approx(factor)
    assert scaling["low_freq_factor"] == 1.0
    assert scaling["high_freq_factor"] == pytest.approx(high / low, rel=1e-3)
    assert scaling["original_max_position_embeddings"] == pytest.approx(original / low, abs=8)
    assert not checkpoint.has("rope_freqs.weight")


def test_llama3_divisors_give_the_published_frequencies() -> None:
    """NU-03: head_dim 64, theta 5e5, factor 32, low 1, high 4, original 8192."""
    frequencies = 5e5 ** (-np.arange(0, 64, 2) / 64) / llama3_divisors(64, 5e5, 32, 1, 4, 8192)
    expected = {14: 0.00321145, 15: 0.00129055, 16: 0.000429557, 17: 9.70829e-5, 18: 1.94616e-5, 31: 9.41831e-8}
    assert {i: pytest.approx(frequencies[i], rel=1e-5) for i in expected} == expected


def test_rope_freqs_of_ones_scale_nothing(save_gguf: Save, gguf_tensors: Tensors) -> None:
    tensors = gguf_tensors | {"rope_freqs.weight": (np.ones(8, np.float32), Kind.F32)}
    assert open_checkpoint(save_gguf(tensors)).hf_config["rope_scaling"] is None


@pytest.mark.parametrize("divisors", [np.linspace(1, 30, 8), np.ones(7) * 2, np.full(8, 0.5), np.full(8, np.nan)])
def test_rope_freqs_of_another_rule_are_refused(save_gguf: Save, gguf_tensors: Tensors, divisors: np.ndarray) -> None:
    tensors = gguf_tensors | {"rope_freqs.weight": (divisors.astype(np.float32), Kind.F32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs"):
        open_checkpoint(save_gguf(tensors))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"rope.scaling.type": "none"}, None),
    ],
)
def test_scaling_keys_are_read(
    save_gguf: Save, gguf_tensors: Tensors, keys: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert open_checkpoint(save_gguf(gguf_tensors, keys=keys)).hf_config["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("gpt2", {}, "general.architecture is 'gpt2'; this release reads llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "8 experts"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count 8 differs from the head's 16"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is unknown"),
        ("llama", {"attention.value_length": 8}, "values of another width"),
    ],
)
def test_models_that_are_not_supported_are_refused_by_name(
    save_gguf: Save, gguf_tensors: Tensors, arch: str, keys: dict[str, Any], message: str
) -> None:
    path = save_gguf(gguf_tensors, arch, keys)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_part_of_a_split_model_is_refused(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors, keys={"split.count": 2})
    with pytest.raises(CheckpointError, match=r"is one of 2 parts; join them"):
        open_checkpoint(path)


def test_a_missing_key_is_named(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors)
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cuont"))
    with pytest.raises(CheckpointError, match=r"key llama.block_count is missing"):
        open_checkpoint(path)


def test_unknown_tensors_are_a_warning_and_missing_ones_an_error(
    save_gguf: Save, gguf_tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    del gguf_tensors["blk.0.ffn_up.weight"]
    gguf_tensors["blk.0.ffn_gate_exps.weight"] = (np.ones((4, 32), np.float32), Kind.F32)
    with caplog.at_level(logging.WARNING, "deepinfer"):
        checkpoint = open_checkpoint(save_gguf(gguf_tensors))
    assert "blk.0.ffn_gate_exps.weight" in caplog.text
    with pytest.raises(CheckpointError, match=rf"missing tensors \(1\): {LAYER}.mlp.up_proj.weight"):
        checkpoint.verify({f"{LAYER}.mlp.up_proj.weight": (96, 64)})


def test_a_directory_with_one_gguf_opens_it(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors)
    assert open_checkpoint(path.parent).path == path
