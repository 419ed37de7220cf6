"""One safetensors file: its header checked against its size before anything is allocated, then read by the library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from attrs import frozen
from safetensors import SafetensorError, safe_open

from deepinfer_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of an element by the format's dtype names."""

TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
"""torch's names of the dtypes that checkpoints of ours and dense ones hold."""

_HEADER_LIMIT = 100_000_000  # the format's own limit


@frozen
class StoredTensor:
    """What a header says of one tensor: dtype by the format's name, shape, first and last byte in the data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A checked safetensors file; tensors are read one at a time through a memory map.

    Attributes:
        path: The file.
        tensors: Name -> what the header says.
        metadata: The header's free text entries.
    """

    def __init__(self, path: Path) -> None:
        """Check the header.

        Raises:
            CheckpointError: The file is cut, has bytes too many, or its header contradicts itself.
        """
        self.path = path
        self.tensors, self.metadata = read_header(path)
        self._handle: Any = None

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in its stored dtype."""
        try:
            if self._handle is None:
                self._handle = safe_open(self.path, framework="pt")
            tensor: torch.Tensor = self._handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def close(self) -> None:
        """Let go of the memory map; tensors already read stay valid."""
        self._handle = None


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return a file's tensors and metadata after checking them against its real size.

    Raises:
        CheckpointError: With the file, what was expected and what is there.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is cut: a safetensors file starts with 8 bytes, the file has {size}")
            length = int.from_bytes(prefix, "little")
            if length > size - 8:
                raise CheckpointError(
                    f"{path} is cut or is no safetensors file: its header should take {length} bytes, "
                    f"so the file at least {length + 8}, but it has {size}"
                )
            if length > _HEADER_LIMIT:
                raise CheckpointError(f"{path}: a header of {length} bytes; the format allows {_HEADER_LIMIT}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error}); the download may be damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object, got {type(header).__name__}")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: the header's __metadata__ must be an object, got {type(metadata).__name__}")
    tensors = {name: _stored_tensor(path, name, entry) for name, entry in header.items()}
    _check_offsets(path, tensors, data_start=8 + length, size=size)
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands in it twice")
    return result


def _stored_tensor(path: Path, name: str, entry: object) -> StoredTensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where}: its header entry must be an object, got {entry!r}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if not _naturals(shape):
        raise CheckpointError(f"{where}: shape must be a list of sizes, got {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets must be two byte positions, got {offsets!r}")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where}: data_offsets are reversed: {begin} > {end}")
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(f"{where}: {dtype} {list(shape)} needs {expected} bytes, its offsets give {end - begin}")
    return StoredTensor(dtype, tuple(shape), begin, end)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_offsets(path: Path, tensors: Mapping[str, StoredTensor], *, data_start: int, size: int) -> None:
    """Tensors must lie back to back and end where the file ends."""
    position = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != position:
            fault = "overlaps the tensor before it" if stored.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {name} begins at byte {stored.begin}, expected {position}: {fault}")
        position = stored.end
    expected = data_start + position
    if size < expected:
        raise CheckpointError(
            f"{path} is cut: its header describes {expected} bytes, the file has {size} ({expected - size} missing); "
            "download it again"
        )
    if size > expected:
        raise CheckpointError(
            f"{path} has trailing bytes: its header describes {expected} bytes, the file has {size} "
            f"({size - expected} too many); download it again"
        )
