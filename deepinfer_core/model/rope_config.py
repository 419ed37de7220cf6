"""Rotary parameters out of a config.json, in the old layout (rope_theta, rope_scaling) and the new one."""

from __future__ import annotations

import logging

from deepinfer_core.errors import ModelError, nearest
from deepinfer_core.layers.rope import RopeSpec, yarn_attention_factor
from deepinfer_core.model.config_values import ConfigValues

_log = logging.getLogger("deepinfer")

DEFAULT_THETA = 10_000.0
SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_from_hf(config: ConfigValues) -> RopeSpec:
    """Read the rotary embedding.

    The parameters stand in ``rope_scaling`` (old) or ``rope_parameters`` (new; old wins where both are filled, as in
    transformers). A base inside them wins over the one at the top; where neither is there it is 10,000, with a
    notice. The type may be called ``rope_type`` or ``type``.

    Raises:
        ModelError: The type is unknown or not supported, or a parameter of its is missing or impossible.
    """
    values = _parameters(config)
    kind = values.raw("rope_type") or values.raw("type") or "default"
    if kind not in SUPPORTED:
        known = nearest(str(kind), SUPPORTED)
        raise ModelError(f"{config.where}: rope type {kind!r} is not supported; {known}")
    partial = values.raw("partial_rotary_factor") or config.raw("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{config.where}: partial_rotary_factor is {partial!r}; heads are rotated in full only")
    theta = _theta(config, values)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(type="linear", theta=theta, factor=values.number("factor"))
    # Phi-style configs keep the original length at the top; it wins there, as in transformers.
    source = config if "original_max_position_embeddings" in config else values
    original = source.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        if low >= high:
            raise ModelError(
                f"{config.where}: llama3 rope needs low_freq_factor < high_freq_factor, found {low} and {high}"
            )
        return RopeSpec(
            type="llama3",
            theta=theta,
            factor=values.number("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _yarn(config, values, theta, original)


def _yarn(config: ConfigValues, values: ConfigValues, theta: float, original: int) -> RopeSpec:
    implied = config.integer("max_position_embeddings") / original
    factor = values.number("factor", implied)
    if "attention_factor" in values:
        attention_factor = values.number("attention_factor")
    else:
        mscale = values.number("mscale", zero=True) if "mscale" in values else None
        all_dim = values.number("mscale_all_dim", zero=True) if "mscale_all_dim" in values else None
        attention_factor = yarn_attention_factor(factor, mscale, all_dim)
    return RopeSpec(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=values.number("beta_fast", 32.0, zero=True) or 32.0,
        beta_slow=values.number("beta_slow", 1.0, zero=True) or 1.0,
        truncate=values.boolean("truncate", True),
        attention_factor=attention_factor,
    )


def _parameters(config: ConfigValues) -> ConfigValues:
    values = config.section("rope_scaling") or config.section("rope_parameters") or ConfigValues({}, config.where)
    if "full_attention" in values or "sliding_attention" in values:
        raise ModelError(
            f"{config.where}: rope_parameters differ by layer type; one set of parameters for all layers is supported"
        )
    return values


def _theta(config: ConfigValues, values: ConfigValues) -> float:
    top = config.number("rope_theta") if "rope_theta" in config else None
    # A config may carry both tables; a base is worth reading from either.
    for table in (values, config.section("rope_parameters")):
        if table is not None and "rope_theta" in table:
            theta = table.number("rope_theta")
            if top is not None and top != theta:
                _log.warning(
                    "%s has rope_theta %g at the top and %g in rope_parameters; rope_parameters win",
                    config.where,
                    top,
                    theta,
                )
            return theta
    if top is not None:
        return top
    _log.warning("%s has no rope_theta; %g is used", config.where, DEFAULT_THETA)
    return DEFAULT_THETA
