"""Slots, problems and tensors that follow from a spec."""

from typing import NamedTuple

from deepinfer_core.model.hf_config import model_spec_from_hf
from deepinfer_core.model.shapes import attention_problem, dense_tensors, linear_slots, required_tensors


class Format(NamedTuple):
    scheme: str = "fp16"
    group_size: int = 0
    zeros: bool = False


def spec(architecture="LlamaForCausalLM", **values):
    base = {
        "architectures": [architecture],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
    }
    return model_spec_from_hf(base | values)


def test_equal_formats_merge_qkv_and_gate_up():
    slots = {slot.name: slot for slot in linear_slots(spec(), lambda module: Format())}
    per_layer = ("qkv", "o", "gate_up", "down")
    assert list(slots) == [*(f"layers.{i}.{name}" for i in range(2) for name in per_layer), "lm_head"]
    qkv = slots["layers.1.qkv"]
    assert qkv.modules == tuple(f"model.layers.1.self_attn.{p}_proj" for p in "qkv")
    assert (qkv.ns, qkv.k) == ((64, 32, 32), 64)
    assert (slots["layers.0.gate_up"].ns, slots["layers.0.gate_up"].k) == ((96, 96), 64)
    assert (slots["layers.0.down"].ns, slots["layers.0.down"].k) == ((64,), 96)
    assert (slots["lm_head"].ns, slots["lm_head"].k) == ((128,), 64)


def test_parts_of_different_formats_stay_apart_in_their_layer_alone():
    def formats(module):
        odd = module in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj")
        return Format("w3a16", 32) if odd else Format("w4a16", 32)

    names = [slot.name for slot in linear_slots(spec(), formats)]
    assert names[:3] == ["layers.0.q", "layers.0.k", "layers.0.v"]
    assert "layers.0.gate_up" in names
    assert "layers.1.qkv" in names
    assert "layers.1.gate" in names
    assert "layers.1.up" in names


def test_another_group_size_or_zeros_also_keep_parts_apart():
    for other in (Format("w4a16", 64), Format("w4a16", 32, True)):
        found = linear_slots(spec(), lambda m, other=other: other if m.endswith("k_proj") else Format("w4a16", 32))
        assert "layers.0.qkv" not in {slot.name for slot in found}


def test_explicit_head_dim_gives_the_projections_their_shapes():
    wide = spec("Qwen3ForCausalLM", head_dim=32)
    shapes = required_tensors(wide)
    attention = "model.layers.0.self_attn."
    assert shapes[f"{attention}q_proj.weight"] == (128, 64)
    assert shapes[f"{attention}k_proj.weight"] == shapes[f"{attention}v_proj.weight"] == (64, 64)
    assert shapes[f"{attention}o_proj.weight"] == (64, 128)
    assert shapes[f"{attention}q_norm.weight"] == shapes[f"{attention}k_norm.weight"] == (32,)


def test_kv_bytes_follow_head_dim():
    problem = attention_problem(
        spec("Qwen3ForCausalLM", head_dim=32),
        page_size=16,
        act_dtype="float16",
        kv_dtype="int8",
        device="cpu",
        max_batched_tokens=64,
        max_requests=4,
        max_model_len=256,
    )
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.scale) == (4, 2, 32, 32**-0.5)


def test_biases_are_dense_tensors_where_the_family_has_them():
    names = set(dense_tensors(spec("Qwen2ForCausalLM")))
    assert {f"model.layers.0.self_attn.{p}_proj.bias" for p in "qkv"} <= names
    assert "model.layers.0.self_attn.o_proj.bias" not in names
    assert not any(name.endswith(".bias") for name in dense_tensors(spec()))


def test_a_slot_states_its_problem():
    slot = linear_slots(spec("Qwen2ForCausalLM"), lambda m: Format("w4a16", 32, True))[0]
    problem = slot.problem(m_max=64, device="cpu", act_dtype="bfloat16")
    assert (problem.n, problem.k, problem.parts, problem.bias) == (128, 64, (64, 32, 32), True)
    assert (problem.scheme, problem.group_size, problem.zeros, problem.act_dtype) == ("w4a16", 32, True, "bfloat16")
    assert linear_slots(spec(), lambda m: Format())[1].problem(m_max=1, device="cpu", act_dtype="float32").parts == ()
