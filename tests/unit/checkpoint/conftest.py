"""Small models as files: Hugging Face safetensors and GGUF, made anew for each test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def llama_tensors(config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to(dtype)

    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": 1 + random(hidden),
        "lm_head.weight": random(config["vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors |= {
            f"{layer}input_layernorm.weight": 1 + random(hidden),
            f"{layer}post_attention_layernorm.weight": 1 + random(hidden),
            f"{layer}self_attn.q_proj.weight": random(q, hidden),
            f"{layer}self_attn.k_proj.weight": random(kv, hidden),
            f"{layer}self_attn.v_proj.weight": random(kv, hidden),
            f"{layer}self_attn.o_proj.weight": random(hidden, q),
            f"{layer}mlp.gate_proj.weight": random(wide, hidden),
            f"{layer}mlp.up_proj.weight": random(wide, hidden),
            f"{layer}mlp.down_proj.weight": random(hidden, wide),
        }
    return tensors


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """The tensors of the tiny llama that `CONFIG` describes."""
    return llama_tensors()


@pytest.fixture
def save_hf(tmp_path: Path) -> Callable[..., Path]:
    """Returns save(tensors, shards=1, name="model", **config changes) -> directory."""

    def save(tensors: dict[str, torch.Tensor], shards: int = 1, name: str = "model", **changes: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        if shards == 1:
            save_file(tensors, directory / "model.safetensors")
            return directory
        weight_map = {}
        names = sorted(tensors)
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {n: tensors[n] for n in names[i::shards]}
            save_file(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    return save


Kind = gguf.GGMLQuantizationType


@pytest.fixture
def save_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Returns save(tensors by GGUF name as (array, type), arch, keys, name) -> file.

    Float arrays are quantized to the type; uint8 arrays are taken as that type's bytes.
    """

    def save(
        tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
        arch: str = "llama",
        keys: dict[str, Any] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        facts = {
            "block_count": 1, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
            "attention.head_count": 4, "attention.head_count_kv": 2,
        }  # fmt: skip
        for key, value in (facts | {k: v for k, v in (keys or {}).items() if isinstance(v, int)}).items():
            writer.add_uint32(key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}", value)
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
        for key, value in (keys or {}).items():
            if isinstance(value, float):
                writer.add_float32(f"{arch}.{key}", value)
            elif isinstance(value, str):
                writer.add_string(f"{arch}.{key}", value)
        for tensor, (array, kind) in tensors.items():
            data = array if array.dtype == np.uint8 or kind == Kind.F32 else gguf.quants.quantize(array, kind)
            writer.add_tensor(tensor, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return save


@pytest.fixture
def gguf_tensors() -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """One llama layer of 4 query and 2 kv heads of 16, in Q4_0, Q4_1 and Q8_0."""
    rng = np.random.default_rng(3)

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    return {
        "token_embd.weight": (random(48, 64), Kind.Q8_0),
        "output_norm.weight": (1 + random(64), Kind.F32),
        "blk.0.attn_norm.weight": (1 + random(64), Kind.F32),
        "blk.0.ffn_norm.weight": (1 + random(64), Kind.F32),
        "blk.0.attn_q.weight": (random(64, 64), Kind.Q4_1),
        "blk.0.attn_k.weight": (random(32, 64), Kind.Q4_0),
        "blk.0.attn_v.weight": (random(32, 64), Kind.Q8_0),
        "blk.0.attn_output.weight": (random(64, 64), Kind.Q4_1),
        "blk.0.ffn_gate.weight": (random(96, 64), Kind.Q4_1),
        "blk.0.ffn_up.weight": (random(96, 64), Kind.F16),
        "blk.0.ffn_down.weight": (random(64, 96), Kind.BF16),
    }
