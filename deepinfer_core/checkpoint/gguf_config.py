"""A GGUF file's keys as the config.json that the Hugging Face model would have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from deepinfer_core.checkpoint.end_tokens import GGUF_END_KEYS
from deepinfer_core.errors import CheckpointError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@frozen
class TensorFacts:
    """What the keys do not say and the tensors do.

    Attributes:
        vocab_size: Rows of the embedding.
        has_head: There is an ``output.weight``; without it the head is tied.
        has_qkv_bias: q, k and v have biases.
        rope_factors: The ``rope_freqs`` tensor, None when there is none.
    """

    vocab_size: int
    has_head: bool
    has_qkv_bias: bool
    rope_factors: npt.NDArray[np.float32] | None


def hf_config_from_gguf(fields: Mapping[str, Any], facts: TensorFacts, source: str) -> dict[str, Any]:
    """Return the config of a GGUF model.

    Args:
        fields: The file's keys.
        facts: What only its tensors tell.
        source: File name for error messages.

    Raises:
        CheckpointError: The architecture is not one of ours, a key is missing, or rope is scaled in an unknown way.
    """
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(
            f"{source}: general.architecture is {arch!r}; this release reads {', '.join(_ARCHITECTURES)} "
            "(Mistral files say llama)"
        )
    keys = _Keys(fields, arch, source)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"{source}: {arch}.rope.dimension_count {keys.integer('rope.dimension_count')} differs from the head's "
            f"{head_dim} dimensions; rotary over a part of the head is not supported"
        )
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{source}: keys of {head_dim} but values of another width are not supported")
    if keys.integer("expert_count", 0):
        raise CheckpointError(f"{source}: {keys.integer('expert_count')} experts; this release reads dense models")
    context, base = keys.integer("context_length"), keys.number("rope.freq_base", 10_000.0)
    window = keys.integer("attention.sliding_window", 0) if arch == "llama" else 0
    config = {
        "architectures": ["MistralForCausalLM" if window else _ARCHITECTURES[arch]],
        "model_type": "mistral" if window else arch,
        "vocab_size": facts.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": base,
        "rope_scaling": _rope_scaling(keys, facts.rope_factors, head_dim=head_dim, base=base, context=context),
        "hidden_act": "silu",
        "attention_bias": facts.has_qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": not facts.has_head,
        "torch_dtype": "float16",
        **generation_config_from_gguf(fields),
    }
    if window:
        config["sliding_window"] = window
    return config


def generation_config_from_gguf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the begin and end ids; ``eos_token_id`` lists end of text, end of turn and end of message alike."""
    ends = sorted({fields[key] for key in GGUF_END_KEYS if isinstance(fields.get(key), int)})
    found: dict[str, Any] = {"eos_token_id": ends or None}
    found["bos_token_id"] = fields.get("tokenizer.ggml.bos_token_id")
    return {key: value for key, value in found.items() if value is not None}


class _Keys:
    """Typed access to ``<arch>.<key>``."""

    def __init__(self, fields: Mapping[str, Any], arch: str, source: str) -> None:
        self.fields, self.arch, self.source = fields, arch, source

    def number(self, key: str, default: float | None = None) -> float:
        value = self.fields.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # some files write one entry a layer, all alike
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            fault = "is missing" if value is None else f"is {value!r}, not a number"
            raise CheckpointError(f"{self.source}: key {self.arch}.{key} {fault}")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 0:
            raise CheckpointError(f"{self.source}: key {self.arch}.{key} is {value!r}, not a natural number")
        return int(value)

    def text(self, key: str, default: str) -> str:
        return str(self.fields.get(f"{self.arch}.{key}", default))


def _rope_scaling(
    keys: _Keys, factors: npt.NDArray[np.float32] | None, *, head_dim: int, base: float, context: int
) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    if factors is not None and not np.allclose(factors, 1.0):
        return llama3_scaling(factors, head_dim=head_dim, base=base, source=keys.source)
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", round(context / factor) if factor else context)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind != "none":
        raise CheckpointError(f"{keys.source}: rope.scaling.type {kind!r} is unknown; known: none, linear, yarn")
    return None


def llama3_scaling(factors: npt.NDArray[np.float32], *, head_dim: int, base: float, source: str) -> dict[str, Any]:
    """Return llama3's ``rope_scaling`` from the divisors of the inverse frequencies that a GGUF file stores.

    High frequencies have divisor 1, low ones the full factor F; between them ``1/divisor = (1 - s)/F + s`` with
    ``s = (original / wavelength - low) / (high - low)``. The usual values (low 1, high 4, original 8192) are tried
    first. Otherwise the straight line s over 1/wavelength is fitted; it fixes original/low and original/high, which
    is all that matters, so low is set to 1.

    Args:
        factors: ``[head_dim / 2]`` divisors.
        head_dim: Width of one head.
        base: rope_theta.
        source: File name for error messages.

    Raises:
        CheckpointError: The divisors do not follow that rule.
    """
    divisors = factors.astype(np.float64).reshape(-1)
    if divisors.size != head_dim // 2 or not np.isfinite(divisors).all() or (divisors < 1).any():
        raise CheckpointError(
            f"{source}: rope_freqs must hold {head_dim // 2} divisors of at least 1, got {divisors.size}"
        )
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # 1 / wavelength
    full = float(divisors.max())
    candidates = [(1.0, 4.0, 8192.0)]
    share = (1 / divisors - 1 / full) / (1 - 1 / full)
    middle = (share > 1e-6) & (share < 1 - 1e-6)
    if middle.sum() >= 2:
        slope, intercept = np.polyfit(frequency[middle], share[middle], 1)
        if intercept < 0 < slope:
            high = (1 - intercept) / -intercept
            candidates.append((1.0, float(high), float(slope * (high - 1))))
    for low, high, original in candidates:
        smooth = np.clip((original * frequency - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / full + smooth), divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": full,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": round(original),
            }
    raise CheckpointError(f"{source}: the rope_freqs tensor does not follow llama3's rule, and no other is known")
