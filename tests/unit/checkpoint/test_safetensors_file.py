"""A safetensors file is checked against its size before anything is read (MF-02)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_core.checkpoint.safetensors_file import SafetensorsFile, read_header
from deepinfer_core.errors import CheckpointError


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    save_file({"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.float16)}, path, {"format": "pt"})
    return path


def with_header(path: Path, header: object, data: bytes = b"\0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_values_shapes_and_dtypes_come_back(good: Path) -> None:
    file = SafetensorsFile(good)
    assert {n: (t.dtype, t.shape) for n, t in file.tensors.items()} == {"a": ("F32", (3, 4)), "b": ("F16", (5,))}
    assert file.metadata == {"format": "pt"}
    a = file.read("a")
    file.close()
    assert torch.equal(a, torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("cut", [1, 29, 57])
def test_a_cut_file_is_named_with_expected_and_real_size(good: Path, cut: int) -> None:
    size = good.stat().st_size
    good.write_bytes(good.read_bytes()[:-cut])
    with pytest.raises(CheckpointError) as error:
        read_header(good)
    assert all(str(part) in str(error.value) for part in (good, size, size - cut, "cut"))


def test_half_a_file_and_eight_bytes_are_named_as_cut(good: Path) -> None:
    content = good.read_bytes()
    good.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"good.safetensors is cut.* {len(content) // 2}"):
        read_header(good)
    good.write_bytes(content[:8])
    with pytest.raises(CheckpointError, match=r"is cut or is no safetensors file.* 8"):
        read_header(good)
    good.write_bytes(content[:5])
    with pytest.raises(CheckpointError, match=r"starts with 8 bytes, the file has 5"):
        read_header(good)


def test_a_huge_header_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}" * 20)
    with pytest.raises(CheckpointError, match=f"{1 << 60} bytes.*it has 48"):
        read_header(path)


def test_trailing_bytes_are_named_with_expected_and_real_size(good: Path) -> None:
    size = good.stat().st_size
    good.write_bytes(good.read_bytes() + b"\0" * 4096)
    with pytest.raises(CheckpointError, match=rf"trailing bytes.*{size} bytes, the file has {size + 4096} \(4096"):
        read_header(good)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 16)}, "tensor b begins at byte 4, expected 8: overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, "tensor b begins at byte 12, expected 8: leaves a hole"),
        ({"a": entry(16, 0, [4])}, "tensor a: data_offsets are reversed: 16 > 0"),
        ({"a": entry(0, 16, [4], "F99")}, "tensor a: unknown dtype 'F99'; known: .*BF16"),
        ({"a": entry(0, 16, [5])}, r"tensor a: F32 \[5\] needs 20 bytes, its offsets give 16"),
        ({"a": entry(0, 16, [-4])}, "tensor a: shape must be a list of sizes"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "tensor a: data_offsets must be two byte positions, got None"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, "data_offsets must be two"),
        ({"a": entry(0, 16, [1 << 40, 1 << 40])}, "needs 4835703278458516698824704 bytes"),
        ({"a": "x"}, "tensor a: its header entry must be an object"),
        (["a"], "the header must be a JSON object, got list"),
        (b"{nonsense", "the header is not valid JSON"),
        (b"\xff\xfe{}", "the header is not valid JSON"),
        (b'{"a": {}, "a": {}}', "stands in it twice"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, header: object, message: str) -> None:
    path = with_header(tmp_path / "bad.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_empty_tensors_and_scalars_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "edge.safetensors"
    save_file({"empty": torch.empty(0, 4), "scalar": torch.tensor(3.0)}, path)
    file = SafetensorsFile(path)
    assert file.read("empty").shape == (0, 4)
    assert float(file.read("scalar")) == 3.0
