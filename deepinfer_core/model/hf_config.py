"""A model spec from an HF config.json, or an error that says what about it is not supported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.errors import ModelError, nearest
from deepinfer_core.layers.rope import RopeSpec
from deepinfer_core.model.config_values import ConfigValues
from deepinfer_core.model.rope_config import rope_from_hf
from deepinfer_core.model.spec import ModelSpec

_log = logging.getLogger("deepinfer")

MAX_LAYERS = 10_000
"""Far beyond any model; what a spec lists layer by layer stays small whatever a broken config says."""

Windows = tuple[int | None, ...]


@frozen(kw_only=True)
class _Family:
    """What the families differ in; None for a default means that the config has to say it."""

    model_type: str
    windows: Callable[[ConfigValues, int], Windows]
    qkv_bias: bool | None = None  # None: the config's attention_bias decides, for o too
    o_bias: bool | None = None
    mlp_bias: bool | None = False  # None: the config's mlp_bias decides
    qk_norm: bool = False
    head_dim: int | None = None
    default_max_positions: int | None = None
    kv_heads_default_to_heads: bool = False


def _no_window(config: ConfigValues, layers: int) -> Windows:
    return (None,) * layers


def _window_everywhere(config: ConfigValues, layers: int) -> Windows:
    """Mistral's window is on where the config states one: v0.1 says 4096, later ones null."""
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return (window,) * layers


def _window_by_layer(config: ConfigValues, layers: int) -> Windows:
    """Qwen writes a window into every config; ``use_sliding_window`` alone turns it on."""
    if not config.boolean("use_sliding_window", False) or "sliding_window" not in config:
        return (None,) * layers
    window = config.integer("sliding_window")
    types = config.raw("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, at_least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise ModelError(f"{config.where}: layer_types is {types!r}; it must list one type for each of {layers} layers")
    known = {"sliding_attention": window, "full_attention": None}
    for kind in types:
        if kind not in known:
            raise ModelError(f"{config.where}: layer type {kind!r} is not supported; {nearest(str(kind), known)}")
    return tuple(known[kind] for kind in types)


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(
        model_type="llama",
        windows=_no_window,
        mlp_bias=None,
        default_max_positions=2048,
        kv_heads_default_to_heads=True,
    ),
    "MistralForCausalLM": _Family(model_type="mistral", windows=_window_everywhere, qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": _Family(model_type="qwen2", windows=_window_by_layer, qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": _Family(model_type="qwen3", windows=_window_by_layer, qk_norm=True, head_dim=128),
}


def model_spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Read a config.json.

    Notices about values that had to be assumed go to the logger ``"deepinfer"``.

    Args:
        config: The file as parsed JSON, or an equal mapping made from GGUF metadata.
        where: The file, for messages.

    Raises:
        ModelError: The architecture, or something that the config turns on, is not supported; or a value is missing,
            of the wrong type or contradicts another. The text names the key, what was found and what is possible.
    """
    values = ConfigValues(config, where)
    architecture, family = _family(values)
    activation = values.raw("hidden_act") or "silu"
    if activation != "silu":
        raise ModelError(
            f"{values.where}: hidden_act {activation!r} is not supported; {architecture} runs with 'silu' only"
        )
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    layers = values.integer("num_hidden_layers", at_most=MAX_LAYERS)
    kv_heads = values.integer("num_key_value_heads", heads if family.kv_heads_default_to_heads else None)
    if heads % kv_heads:
        raise ModelError(
            f"{values.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _head_dim(values, family, hidden, heads)
    attention_bias = values.boolean("attention_bias", False)
    mlp_bias = values.boolean("mlp_bias", False)
    rope = rope_from_hf(values)
    max_length = _max_length(values, family, rope)
    windows = family.windows(values, layers)
    return ModelSpec(
        architecture=architecture,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=values.boolean("tie_word_embeddings", False),
        # A window that no context outgrows changes nothing; without it attention needs no mask.
        sliding_windows=tuple(w if w is not None and w < max_length else None for w in windows),
        max_length=max_length,
        dtype=_dtype(values),
    )


def _family(values: ConfigValues) -> tuple[str, _Family]:
    named = values.raw("architectures")
    names = list(named) if isinstance(named, list | tuple) else [named] if named else []
    for name in names:
        if isinstance(name, str) and name in _FAMILIES:
            return name, _FAMILIES[name]
    if not names:  # base checkpoints and hand-written configs often have the model type alone
        for name, family in _FAMILIES.items():
            if family.model_type == values.raw("model_type"):
                return name, family
    asked = ", ".join(map(str, names)) or f"model_type {values.raw('model_type')!r}"
    raise ModelError(f"{values.where}: the architecture {asked} is not supported; {nearest(asked, _FAMILIES)}")


def _head_dim(values: ConfigValues, family: _Family, hidden: int, heads: int) -> int:
    if "head_dim" in values:
        head_dim = values.integer("head_dim")
    elif family.head_dim is not None:
        head_dim = family.head_dim
    elif hidden % heads:
        raise ModelError(
            f"{values.where}: hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given"
        )
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise ModelError(f"{values.where}: head_dim {head_dim} is odd; rotary embeddings need an even one")
    return head_dim


def _max_length(values: ConfigValues, family: _Family, rope: RopeSpec) -> int:
    """Return the trained length, or what yarn stretches it to; llama3 and linear configs state the stretched one."""
    if "max_position_embeddings" not in values and family.default_max_positions is not None:
        _log.warning("%s has no max_position_embeddings; %d is used", values.where, family.default_max_positions)
    stated = values.integer("max_position_embeddings", family.default_max_positions)
    if rope.type == "yarn":
        return max(stated, int(rope.original_max_positions * rope.factor))
    return stated


def _dtype(values: ConfigValues) -> str | None:
    stated = values.raw("dtype") or values.raw("torch_dtype")
    return None if stated in (None, "auto") else str(stated).removeprefix("torch.")
