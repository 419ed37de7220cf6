"""The layers of a model by its files alone: config.json is enough, weights are looked at only where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import field, frozen

from deepinfer_core.checkpoint.foreign import refuse_foreign_config
from deepinfer_core.checkpoint.format import QUANT_METHOD, LayerFormat, LayerPatterns
from deepinfer_core.checkpoint.reader import open_checkpoint
from deepinfer_core.config import Config
from deepinfer_core.errors import CheckpointError
from deepinfer_core.model.hf_config import model_spec_from_hf
from deepinfer_core.model.shapes import attention_problem, linear_modules, linear_slots
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import AttentionProblem, Capability, Device, LinearProblem


@frozen(kw_only=True)
class ModelLayers:
    """A model's shape and how each of its layers is stored."""

    spec: ModelSpec
    format_of: Callable[[str], LayerFormat] = field(repr=False)

    def problems(
        self, config: Config, device: Device, capability: Capability | None, act_dtype: str
    ) -> list[tuple[str, LinearProblem]]:
        """Return (layer name, what it asks of a kernel), layer after layer, the head last."""
        return [
            (
                slot.name,
                slot.problem(
                    m_max=config.scheduler.max_batched_tokens, device=device, capability=capability, act_dtype=act_dtype
                ),
            )
            for slot in linear_slots(self.spec, self.format_of)
        ]

    def attention(
        self, config: Config, device: Device, capability: Capability | None, act_dtype: str
    ) -> AttentionProblem:
        """Return what the model asks of an attention backend."""
        kv_dtype = config.attention.kv_dtype
        return attention_problem(
            self.spec,
            page_size=config.cache.page_size,
            act_dtype=act_dtype,
            kv_dtype=act_dtype if kv_dtype == "auto" else kv_dtype,
            device=device,
            capability=capability,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            max_requests=config.scheduler.max_requests,
            max_model_len=config.cache.max_model_len or self.spec.max_length,
        )


def layers_of_model(path: Path) -> ModelLayers:
    """Read a model's shape and formats.

    Args:
        path: A checkpoint directory, with or without its weights, or a GGUF file.

    Raises:
        CheckpointError: Nothing is there, or what is there cannot be read.
        ModelError: The architecture is not supported.
    """
    config_file = path / "config.json"
    if config_file.is_file() and not any(path.glob("*.safetensors*")) and not any(path.glob("*.gguf")):
        return _from_config_alone(config_file)
    checkpoint = open_checkpoint(path)
    try:
        spec = model_spec_from_hf(checkpoint.hf_config, str(checkpoint.config_file))
        formats = {module.name: checkpoint.layer_format(module.name) for module in linear_modules(spec)}
        return ModelLayers(spec=spec, format_of=formats.__getitem__)
    finally:
        checkpoint.close()


def _from_config_alone(file: Path) -> ModelLayers:
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(config).__name__}")
    section = config.get("quantization_config")
    patterns = LayerPatterns(())
    if isinstance(section, dict) and section.get("quant_method") == QUANT_METHOD:
        patterns = LayerPatterns.from_config(section, str(file))
    elif section is not None:
        refuse_foreign_config(file, section)
    return ModelLayers(spec=model_spec_from_hf(config, str(file)), format_of=patterns.format_of)
