"""A directory with config.json and safetensors files: Hugging Face's dense form, or a deepinfer checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_core.checkpoint.base import Checkpoint, Kind
from deepinfer_core.checkpoint.foreign import refuse_foreign_config, refuse_foreign_tensors
from deepinfer_core.checkpoint.format import LayerFormat, LayerPatterns
from deepinfer_core.checkpoint.safetensors_file import TORCH_DTYPES, SafetensorsFile
from deepinfer_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("deepinfer")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FOREIGN_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_PACKED_SUFFIXES = (".packed", ".scales", ".zeros")


class SafetensorsCheckpoint(Checkpoint):
    """Reads both kinds; ``quantization_config`` in config.json tells them apart."""

    def __init__(self, path: Path) -> None:
        """Read config and headers, and check that index and files agree.

        Raises:
            CheckpointError: Something is missing, cut, contradictory, or quantized in a way not read here.
        """
        self.path = path
        self.hf_config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self.tokenizer_path, self.tokenizer_gguf = path, None
        if self.hf_config.pop("auto_map", None) is not None:
            logger.warning("%s: auto_map in config.json is ignored: code of a model directory is never run", path)
        self.kind: Kind = "hf"
        self.patterns = LayerPatterns(())
        self._read_quantization()
        self._shards = _open_shards(path)
        self._file_of = {name: shard for shard in self._shards for name in shard.tensors}
        self._names = frozenset(self._file_of)
        self._check_names()

    def stored_names(self) -> frozenset[str]:
        """Return the names of all tensors in the files."""
        return self._names

    def layer_format(self, module: str) -> LayerFormat:
        """Return the format that the first matching pattern gives; without patterns all layers are dense."""
        return self.patterns.format_of(module)

    def file_of(self, name: str) -> Path:
        """Return the shard that holds a tensor."""
        return self._file_of[name].path

    def close(self) -> None:
        """Let go of the memory maps."""
        for shard in self._shards:
            shard.close()

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].tensors[name].shape

    def _stored_dtype(self, name: str) -> str:
        dtype = self._file_of[name].tensors[name].dtype
        return TORCH_DTYPES.get(dtype, dtype)

    def _read(self, name: str) -> torch.Tensor:
        return self._file_of[name].read(name)

    def _read_quantization(self) -> None:
        config_file = self.path / "config.json"
        section = self.hf_config.get("quantization_config") or self.hf_config.get("compression_config")
        if section is not None and not isinstance(section, dict):
            raise CheckpointError(f"{config_file}: quantization_config must be an object, got {section!r}")
        if section:
            refuse_foreign_config(config_file, section)
            self.kind = "deepinfer"
            self.patterns = LayerPatterns.from_config(section, str(config_file))
            return
        for name in _FOREIGN_CONFIGS:
            if (self.path / name).is_file():
                refuse_foreign_config(self.path / name, read_json(self.path / name))

    def _check_names(self) -> None:
        """Packed tensors and patterns must speak of the same layers."""
        refuse_foreign_tensors(self.path, self._names)
        for name in sorted(self._names):
            module, _, suffix = name.rpartition(".")
            packed = f".{suffix}" in _PACKED_SUFFIXES
            if packed and self.layer_format(module).dense:
                raise CheckpointError(
                    f"{self.file_of(name)}: tensor {name} is packed, but config.json's quantization_config gives no "
                    f"format for {module}; the config belongs to another model or was edited"
                )
            if suffix == "weight" and f"{module}.packed" in self._names:
                raise CheckpointError(f"{self.file_of(name)}: {module} has both a dense weight and packed codes")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: The file is missing, or is not one JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _open_shards(path: Path) -> list[SafetensorsFile]:
    """Open and check all weight files that belong to the model; as in transformers, a single file comes first."""
    single, index_file = path / SINGLE_NAME, path / INDEX_NAME
    if single.is_file():
        return [SafetensorsFile(single)]
    if not index_file.is_file():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        found = sorted(path.glob("*.safetensors"))
        if len(indexes) != 1 and len(found) != 1:
            raise CheckpointError(
                f"{path} holds several safetensors files but neither {SINGLE_NAME} nor {INDEX_NAME}: "
                f"{', '.join(f.name for f in [*indexes, *found][:6])}"
            )
        if not indexes:
            return [SafetensorsFile(found[0])]
        index_file = indexes[0]
    return _open_indexed(path, index_file)


def _open_indexed(path: Path, index_file: Path) -> list[SafetensorsFile]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: weight_map must map tensor names to files")
    shard_names = sorted({str(name) for name in weight_map.values()})
    for name in shard_names:
        if Path(name).name != name:  # a path could lead out of the model directory
            raise CheckpointError(f"{index_file}: {name!r} must be a file name in the same directory")
    absent = [name for name in shard_names if not (path / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{path}: {len(absent)} of {len(shard_names)} weight files are missing: {', '.join(absent[:6])}; "
            f"{index_file.name} lists them, download them again"
        )
    shards = {name: SafetensorsFile(path / name) for name in shard_names}
    lost = sorted(t for t, name in weight_map.items() if t not in shards[str(name)].tensors)
    if lost:
        raise CheckpointError(
            f"{index_file} says that {lost[0]} is in {weight_map[lost[0]]}, but it is not"
            + (f" (and {len(lost) - 1} more)" if len(lost) > 1 else "")
        )
    seen: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in shard.tensors:
            if tensor in seen:
                raise CheckpointError(f"{path}: tensor {tensor} stands in both {seen[tensor]} and {name}")
            seen[tensor] = name
    unlisted = sorted(seen.keys() - weight_map.keys())
    if unlisted:
        logger.warning("%s does not list tensors that its files hold: %s", index_file, ", ".join(unlisted[:8]))
    return list(shards.values())
