"""A GGUF file is checked against its size before anything is read (MF-02)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.checkpoint.gguf_file import GgufFile
from deepinfer_core.errors import CheckpointError

Save = Callable[..., Path]
Tensors = dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
Kind = gguf.GGMLQuantizationType


def test_keys_and_values_equal_what_the_gguf_package_reads(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors, keys={"rope.freq_base": 1e6, "tokenizer.ggml.eos_token_id": 7})
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key] == pytest.approx(field.contents()), key
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = ours.values(tensor.name)
        assert values.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(values.astype(np.float32), expected.astype(np.float32)), tensor.name


def test_arrays_strings_and_small_numbers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["a", "", "é漢"])
    writer.add_array("numbers", [3, -4, 5])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_bool("yes", True)
    writer.add_int8("small", -3)
    writer.add_uint64("large", 1 << 40)
    writer.add_float32("epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = GgufFile(path).fields
    assert fields["words"] == ["a", "", "é漢"]
    assert fields["numbers"] == [3, -4, 5]
    assert fields["floats"] == [0.5, 1.5]
    assert (fields["yes"], fields["small"], fields["large"]) == (True, -3, 1 << 40)
    assert fields["epsilon"] == 1e-5  # the shortest decimal, as the converter was given


def test_every_cut_is_named_with_the_real_size(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors)
    content = path.read_bytes()
    padding = 31  # the file's own padding behind the last tensor may be missing
    lengths = [*range(0, 1500, 37), len(content) // 2, len(content) - padding - 1]
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError) as error:
            GgufFile(path)
        text = str(error.value)
        assert str(path) in text, length
        assert "cut" in text, length
        assert str(length) in text, length


def test_a_cut_in_the_weights_names_the_expected_size(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.raises(CheckpointError, match=rf"describes \d+ bytes, the file has {size // 2} \(\d+ missing\)"):
        open_checkpoint(path)


def test_trailing_bytes_are_named(save_gguf: Save, gguf_tensors: Tensors) -> None:
    path = save_gguf(gguf_tensors)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\0" * 4096)
    with pytest.raises(CheckpointError, match=rf"trailing bytes.*the file has {size + 4096}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("position", "what"), [(8, f"{1 << 60} tensors"), (16, f"{1 << 60} keys"), (24, "needs at least")]
)
def test_huge_counts_and_lengths_allocate_nothing(
    save_gguf: Save, gguf_tensors: Tensors, position: int, what: str
) -> None:
    path = save_gguf(gguf_tensors)
    content = bytearray(path.read_bytes())
    content[position : position + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=what):
        GgufFile(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF\x03", b"GGML\x03", "is no GGUF file: it starts with b'GGML'"),
        (b"GGUF\x03", b"GGUF\x09", "GGUF version 9"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", r"version 50331648 \(or big-endian\)"),
        (struct.pack("<I", Kind.Q8_0) + b"\0" * 8, struct.pack("<I", 99) + b"\0" * 8, "type number 99, unknown"),
        (b"output_norm.weight\x01\0\0\0\x40", b"output_norm.weight\x09\0\0\0\x40", "has 9 dimensions"),
        (b"attn_q.weight\x02\0\0\0\x40", b"attn_q.weight\x02\0\0\0\x41", "rows of 65 are no multiple of 32"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", "attn_q.weight stands in the directory twice"),
    ],
)
def test_a_damaged_directory_is_explained(
    save_gguf: Save, gguf_tensors: Tensors, old: bytes, new: bytes, message: str
) -> None:
    path = save_gguf(gguf_tensors)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_overlapping_tensors_are_refused(save_gguf: Save) -> None:
    values = np.zeros((4, 32), np.float32)
    path = save_gguf({"first": (values, Kind.F32), "second": (values, Kind.F32)})
    content = path.read_bytes()
    offset = content.index(b"second") + 6 + 4 + 16 + 4
    assert content[offset : offset + 8] == struct.pack("<Q", 512)
    path.write_bytes(content[:offset] + struct.pack("<Q", 256) + content[offset + 8 :])
    with pytest.raises(CheckpointError, match=r"tensor second begins at byte \d+, inside first"):
        GgufFile(path)
