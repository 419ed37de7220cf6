"""A GGUF model as a checkpoint: Hugging Face names and row order, 4-bit blocks as ``w4a16``, the rest dense."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deepinfer_core.checkpoint.base import EMBEDDING, HEAD, Checkpoint, SourceGroups
from deepinfer_core.checkpoint.format import DENSE, LayerFormat
from deepinfer_core.checkpoint.gguf_blocks import GROUP, w4a16_from_q4
from deepinfer_core.checkpoint.gguf_config import TensorFacts, generation_config_from_gguf, hf_config_from_gguf
from deepinfer_core.checkpoint.gguf_file import GgufFile
from deepinfer_core.checkpoint.gguf_names import ROPE_FACTORS, hf_name, rope_row_order
from deepinfer_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("deepinfer")

_W4_DISTRIBUTION = "deepinfer-plugin-w4a16"
_CARRIED = {
    "Q4_0": LayerFormat("w4a16", GROUP, False, _W4_DISTRIBUTION),
    "Q4_1": LayerFormat("w4a16", GROUP, True, _W4_DISTRIBUTION),
}
_TORCH_TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_BLOCKS = {
    "Q8_0": SourceGroups(32), "Q5_0": SourceGroups(32), "IQ4_NL": SourceGroups(32), "MXFP4": SourceGroups(32),
    "Q5_1": SourceGroups(32, True), "Q4_K": SourceGroups(32, True), "Q5_K": SourceGroups(32, True),
    "Q6_K": SourceGroups(16), "Q3_K": SourceGroups(16), "Q2_K": SourceGroups(16, True),
}  # fmt: skip
"""Groups that share a scale in types that are dequantized, so that a recipe's ``auto`` can keep them."""


class GgufCheckpoint(Checkpoint):
    """Reads a GGUF file of the llama, qwen2 or qwen3 architecture."""

    def __init__(self, path: Path) -> None:
        """Read keys and directory, and build the config.

        Raises:
            CheckpointError: The file is cut, part of a split, of another architecture, or lacks a key.
        """
        self.path, self.kind = path, "gguf"
        self.tokenizer_path, self.tokenizer_gguf = path.parent, path.name
        self._file = GgufFile(path)
        fields = self._file.fields
        if fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {fields['split.count']} parts; join them with llama-gguf-split --merge first"
            )
        self._by_dense_name = self._map_names()
        self.hf_config = hf_config_from_gguf(fields, self._facts(), str(path))
        self.generation_config = generation_config_from_gguf(fields)
        self._reorders_rows = fields["general.architecture"] == "llama"
        self._names = frozenset(stored for dense in self._by_dense_name for stored in self._canonical_names(dense))

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's keys as they are, the vocabulary among them."""
        return self._file.fields

    def stored_names(self) -> frozenset[str]:
        """Return Hugging Face names; 4-bit layers have ``packed``, ``scales`` and perhaps ``zeros``."""
        return self._names

    def layer_format(self, module: str) -> LayerFormat:
        """Return ``w4a16`` for Q4_0 and Q4_1 layers, dense for all others; the embedding is always dense."""
        name = f"{module}.weight"
        if name == EMBEDDING or name not in self._by_dense_name:
            return DENSE
        return _CARRIED.get(self._entry_type(name), DENSE)

    def file_of(self, name: str) -> Path:
        """Return the GGUF file."""
        return self.path

    def close(self) -> None:
        """Let go of the memory map."""
        self._file.close()

    def source_groups(self, module: str) -> SourceGroups:
        """Return the block width of the layer's GGUF type, and whether its blocks have a minimum."""
        form = self.layer_format(module)
        name = f"{module}.weight"
        if not form.dense or name not in self._by_dense_name:
            return super().source_groups(module)
        return _BLOCKS.get(self._entry_type(name), SourceGroups())

    def written_dtype(self, name: str) -> str:
        """Return float16 for what was dequantized from blocks (their scales are FP16 too), else the stored dtype."""
        dense, _ = self._dense_name(self._resolve(name))
        packed = self._entry_type(dense) not in _TORCH_TYPES
        return "float16" if packed else self.dtype(name)

    def _map_names(self) -> dict[str, str]:
        mapped: dict[str, str] = {}
        unknown = []
        for name in self._file.tensors:
            dense = hf_name(name)
            if dense is not None:
                mapped[dense] = name
            elif name != ROPE_FACTORS:
                unknown.append(name)
        if unknown:
            logger.warning("%s: tensors that no supported model has: %s", self.path, ", ".join(sorted(unknown)[:8]))
        if EMBEDDING not in mapped:
            raise CheckpointError(f"{self.path} has no token_embd.weight; it holds no language model")
        return mapped

    def _facts(self) -> TensorFacts:
        return TensorFacts(
            vocab_size=self._file.tensors[self._by_dense_name[EMBEDDING]].shape[0],
            has_head=HEAD in self._by_dense_name,
            has_qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._by_dense_name,
            rope_factors=self._file.values(ROPE_FACTORS) if ROPE_FACTORS in self._file.tensors else None,
        )

    def _entry_type(self, dense_name: str) -> str:
        return self._file.tensors[self._by_dense_name[dense_name]].type

    def _canonical_names(self, dense_name: str) -> tuple[str, ...]:
        module, _, kind = dense_name.rpartition(".")
        form = self.layer_format(module) if kind == "weight" else DENSE
        if form.dense:
            return (dense_name,)
        return tuple(f"{module}.{part}" for part in ("packed", "scales", *(("zeros",) if form.zeros else ())))

    def _dense_name(self, name: str) -> tuple[str, str]:
        """Split a stored name into the dense name that the file maps and the part: ``weight``, ``bias``, ``packed``."""
        module, _, part = name.rpartition(".")
        return (name, part) if part in ("weight", "bias") else (f"{module}.weight", part)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        dense, part = self._dense_name(name)
        shape = self._file.tensors[self._by_dense_name[dense]].shape
        if part in ("weight", "bias"):
            return shape
        return (shape[0], shape[1] // (2 if part == "packed" else GROUP))

    def _stored_dtype(self, name: str) -> str:
        dense, part = self._dense_name(name)
        if part in ("weight", "bias"):
            return _TORCH_TYPES.get(self._entry_type(dense), "float32")
        return "uint8" if part == "packed" else "float16"

    def _read(self, name: str) -> torch.Tensor:
        dense, part = self._dense_name(name)
        if part not in ("weight", "bias"):
            return self._read_codes(dense)[part]
        values = _to_torch(self._in_model_order(dense, self._file.values(self._by_dense_name[dense])))
        return values.bfloat16() if self._entry_type(dense) == "BF16" else values

    def layer_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Return a layer's canonical tensors; the parts of a 4-bit layer come from one pass over its blocks."""
        if self.layer_format(module).dense:
            return super().layer_tensors(module)
        return self._read_codes(f"{module}.weight")

    def _read_codes(self, dense: str) -> dict[str, torch.Tensor]:
        stored = self._by_dense_name[dense]
        arrays = w4a16_from_q4(self._file.raw(stored), self._entry_type(dense), f"{self.path}: tensor {stored}")
        return {part: _to_torch(self._in_model_order(dense, array)) for part, array in arrays.items()}

    def _in_model_order(self, dense: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo the llama converter's order of q and k rows, of values and of codes alike."""
        if not self._reorders_rows:
            return array
        heads, kv_heads = self.hf_config["num_attention_heads"], self.hf_config["num_key_value_heads"]
        order = rope_row_order(dense, array.shape[0], heads=heads, kv_heads=kv_heads)
        return array if order is None else np.ascontiguousarray(array[order])


def _to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
