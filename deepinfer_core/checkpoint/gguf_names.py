"""GGUF's tensor names in Hugging Face's words, and the row order that the llama converter changed."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from deepinfer_core.checkpoint.base import EMBEDDING, HEAD

ROPE_FACTORS = "rope_freqs.weight"
"""Not a tensor of the model: llama3's frequency factors, which the config carries instead."""

_TOP = {"token_embd": EMBEDDING.removesuffix(".weight"), "output_norm": "model.norm", "output": HEAD.split(".")[0]}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor; None when the decoder has no such tensor."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match is None or match[2] not in _BLOCK:
        return None
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{kind}"


def rope_row_order(name: str, rows: int, *, heads: int, kv_heads: int) -> npt.NDArray[np.int64] | None:
    """Return for a llama q or k tensor where its original rows lie in the file; None for every other tensor.

    The llama converter stores each head's rows as pairs (0, half, 1, half + 1, ...) for rotary on neighbours; the
    Hugging Face form rotates halves. Only the ``llama`` architecture is stored so: not qwen2, not qwen3. With grouped
    heads, k has ``kv_heads`` of them.

    Args:
        name: Hugging Face name.
        rows: The tensor's rows (or elements of a bias).
        heads: Query heads.
        kv_heads: Key and value heads.
    """
    if ".self_attn.q_proj." in name:
        count = heads
    elif ".self_attn.k_proj." in name:
        count = kv_heads
    else:
        return None
    return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)
