"""One GGUF file: keys and tensor directory read with every size checked against the file, tensors by memory map.

The ``gguf`` package's reader makes an array object for every string of the vocabulary (seconds) and trusts the counts
in a cut file; this one reads the same bytes in milliseconds and names what is wrong. Values are still that package's:
type names, block sizes and `dequantize`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from deepinfer_core.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@frozen
class GgufTensor:
    """One tensor: GGML type name, shape with the row length last (as in torch), first byte in the file, bytes."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """A checked GGUF file.

    Attributes:
        path: The file.
        fields: Key -> value: numbers, bools, strings, and lists of these.
        tensors: GGUF name -> directory entry.
    """

    def __init__(self, path: Path) -> None:
        """Read keys and directory.

        Raises:
            CheckpointError: The file is cut, has bytes too many, or holds what this release cannot read.
        """
        self.path = path
        try:
            self._size = path.stat().st_size
            if self._size < 24:
                raise CheckpointError(f"{path} is cut: a GGUF file has at least 24 bytes, this one has {self._size}")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        cursor = _Cursor(path, self._map, self._size)
        if self._map[:4] != MAGIC:
            raise CheckpointError(f"{path} is no GGUF file: it starts with {self._map[:4]!r} instead of {MAGIC!r}")
        cursor.position = 4
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{path}: GGUF version {version} (or big-endian); versions 2 and 3 are read")
        tensor_count, field_count = cursor.number("<Q"), cursor.number("<Q")
        self.fields: dict[str, Any] = {}
        for _ in range(cursor.counted(field_count, 13, "keys")):  # a key takes at least 8 + 4 + 1 bytes
            key = cursor.string()
            self.fields[key] = cursor.value(key)
        self.tensors = self._read_directory(cursor, tensor_count)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes as a read-only view of the file, one row of the tensor a row."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(math.prod(tensor.shape[:-1]), -1) if tensor.nbytes else flat.reshape(0, 0)

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor's values: float32, or float16 where it is stored so.

        Raises:
            CheckpointError: The installed ``gguf`` cannot dequantize its type.
        """
        tensor = self.tensors[name]
        raw = self.raw(name)
        if tensor.type in ("F32", "F16"):
            return raw.reshape(-1).view("<f4" if tensor.type == "F32" else "<f2").reshape(tensor.shape).copy()
        try:
            values: npt.NDArray[Any] = dequantize(raw, GGMLQuantizationType[tensor.type])
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {tensor.type}, which gguf cannot dequantize: {error}"
            ) from error
        return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)

    def close(self) -> None:
        """Let go of the memory map, unless arrays still look into it."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def _read_directory(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
        for _ in range(cursor.counted(count, 24, "tensors")):
            name = cursor.string()
            if name in entries:
                raise CheckpointError(f"{self.path}: tensor {name} stands in the directory twice")
            dims = cursor.number("<I")
            if not 1 <= dims <= _MAX_DIMS:
                raise CheckpointError(f"{self.path}: tensor {name} has {dims} dimensions; GGUF allows 1 to {_MAX_DIMS}")
            shape = tuple(reversed([cursor.number("<Q") for _ in range(dims)]))
            code = cursor.number("<I")
            try:
                kind = GGMLQuantizationType(code)
            except ValueError:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has type number {code}, unknown to the installed gguf package; "
                    "upgrade gguf"
                ) from None
            entries[name] = (kind, shape, cursor.number("<Q"))
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        tensors = {name: self._entry(name, *entry, start=start, alignment=alignment) for name, entry in entries.items()}
        self._check_extent(tensors, start, alignment)
        return tensors

    def _entry(
        self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int, *, start: int, alignment: int
    ) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name}: rows of {shape[-1]} are no multiple of {block}")
        if offset % alignment:
            raise CheckpointError(f"{self.path}: tensor {name} at byte {offset} is not aligned to {alignment}")
        return GgufTensor(kind.name, shape, start + offset, math.prod(shape) // block * block_bytes)

    def _check_extent(self, tensors: dict[str, GgufTensor], start: int, alignment: int) -> None:
        """No two tensors overlap, and the file ends where the last one does (or its padding)."""
        position, before = start, "the header"
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < position:
                raise CheckpointError(f"{self.path}: tensor {name} begins at byte {tensor.offset}, inside {before}")
            position, before = tensor.offset + tensor.nbytes, name
        if self._size < position:
            raise CheckpointError(
                f"{self.path} is cut: its directory describes {position} bytes, the file has {self._size} "
                f"({position - self._size} missing); download it again"
            )
        if self._size > -(-position // alignment) * alignment:
            raise CheckpointError(
                f"{self.path} has trailing bytes: its directory describes {position} bytes, the file has {self._size} "
                f"({self._size - position} too many); download it again"
            )


class _Cursor:
    """Reads little-endian values one after another and refuses to run past the end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.position = path, data, size, 0

    def take(self, nbytes: int) -> int:
        """Return the position and step over ``nbytes``."""
        begin = self.position
        if nbytes > self.size - begin:
            raise CheckpointError(
                f"{self.path} is cut: its header needs at least {begin + nbytes} bytes, the file has {self.size}"
            )
        self.position = begin + nbytes
        return begin

    def number(self, form: str) -> int:
        """Return one integer of a struct format."""
        (value,) = struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))
        return int(value)

    def counted(self, count: int, least: int, what: str) -> int:
        """Return a count after checking that so many entries of ``least`` bytes fit into the rest of the file."""
        if count * least > self.size - self.position:
            raise CheckpointError(
                f"{self.path} is cut or damaged: its header speaks of {count} {what}, at least "
                f"{self.position + count * least} bytes; the file has {self.size}"
            )
        return count

    def string(self) -> str:
        """Return one string; bytes that are no UTF-8 (seen in vocabularies) become replacement characters."""
        length = self.number("<Q")
        begin = self.take(length)
        return self.data[begin : begin + length].decode("utf-8", errors="replace")

    def value(self, key: str) -> Any:
        """Return the value of a key, whatever its type."""
        kind = self.kind(key)
        return self.array(key) if kind == GGUFValueType.ARRAY else self.single(kind)

    def kind(self, key: str) -> GGUFValueType:
        """Return the value type that is written next."""
        code = self.number("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise CheckpointError(f"{self.path}: key {key} has value type {code}, which GGUF does not define") from None

    def single(self, kind: GGUFValueType) -> Any:
        """Return one value that is no array."""
        if kind == GGUFValueType.STRING:
            return self.string()
        dtype = np.dtype(_SCALARS[kind])
        value = np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize))[0]
        # the shortest decimal of a float32: 1e-05, which the converter was given, instead of 9.999999747e-06
        return float(str(value)) if kind == GGUFValueType.FLOAT32 else value.item()

    def array(self, key: str) -> list[Any]:
        """Return a list; numbers are read at once."""
        kind = self.kind(key)
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: key {key} is an array of arrays, which no model file needs")
        count = self.number("<Q")
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(self.counted(count, 8, f"strings of {key}"))]
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()
        return values
