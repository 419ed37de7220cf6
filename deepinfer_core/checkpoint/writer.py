"""Writes safetensors files tensor by tensor: the headers are known beforehand, so nothing is gathered in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from attrs import define, field, frozen

from deepinfer_core.checkpoint.safetensors_file import DTYPE_BYTES, TORCH_DTYPES
from deepinfer_core.checkpoint.safetensors_model import INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 4 << 30
"""Largest weight file unless one tensor alone is larger; below what FAT32 sticks and some uploads refuse."""

_CODES = {name: code for code, name in TORCH_DTYPES.items()}


@frozen
class PlannedTensor:
    """A tensor that will be written: name, torch dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[_CODES[self.dtype]]


@define
class _Shard:
    path: Path
    tensors: list[PlannedTensor] = field(factory=list)
    offsets: dict[str, int] = field(factory=dict)
    file: IO[bytes] | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class TensorWriter:
    """Writes the planned tensors, in any order, into one file or several with an index.

    Use it as a context manager; leaving it checks that everything planned was written.
    """

    def __init__(self, directory: Path, plan: Sequence[PlannedTensor], *, max_shard_bytes: int = MAX_SHARD_BYTES):
        """Assign tensors to files in the plan's order; no file is made yet.

        Args:
            directory: Existing directory.
            plan: All tensors.
            max_shard_bytes: A new file is begun before this is passed.
        """
        self.directory = directory
        self._planned = {t.name: t for t in plan}
        assert len(self._planned) == len(plan), "a tensor is planned twice"
        self._shards = _assign(directory, plan, max_shard_bytes)
        self._shard_of = {t.name: shard for shard in self._shards for t in shard.tensors}
        self._written: set[str] = set()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self._planned.values())

    def __enter__(self) -> TensorWriter:
        for shard in self._shards:
            _begin(shard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._shards:
            if shard.file is not None:
                shard.file.close()
        if kind is None:
            missing = self._planned.keys() - self._written
            assert not missing, f"planned but not written: {sorted(missing)[:4]}"
            if len(self._shards) > 1:
                self._write_index()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor at its place; dtype and shape must be as planned."""
        planned, shard = self._planned[name], self._shard_of[name]
        found = PlannedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert found == planned, f"planned {planned}, got {found}"
        assert name not in self._written, f"{name} is written twice"
        assert shard.file is not None, "put() outside of the with block"
        shard.file.seek(shard.offsets[name])
        if tensor.numel():
            shard.file.write(_bytes_of(tensor))
        self._written.add(name)

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {name: shard.path.name for name, shard in sorted(self._shard_of.items())},
        }
        (self.directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _assign(directory: Path, plan: Sequence[PlannedTensor], limit: int) -> list[_Shard]:
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in plan:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [_Shard(directory / SINGLE_NAME, groups[0])]
    return [
        _Shard(directory / f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, start=1)
    ]


def _begin(shard: _Shard) -> None:
    """Write the header and fix each tensor's place: wide dtypes first, so that every element is aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in sorted(shard.tensors, key=lambda t: -DTYPE_BYTES[_CODES[t.dtype]]):
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        shard.offsets[tensor.name] = position
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    shard.offsets = {name: start + offset for name, offset in shard.offsets.items()}
    shard.file = shard.path.open("wb")
    shard.file.write(len(text).to_bytes(8, "little") + text)
