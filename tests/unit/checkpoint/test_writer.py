"""Tensors are written one by one into files that anybody's safetensors reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_core.checkpoint.safetensors_file import read_header
from deepinfer_core.checkpoint.writer import PlannedTensor, TensorWriter

TENSORS = {
    "codes": torch.arange(15, dtype=torch.uint8).reshape(3, 5),  # an odd number of bytes before wider dtypes
    "half": torch.linspace(-2, 2, 6, dtype=torch.float16).reshape(2, 3),
    "brain": torch.linspace(-2, 2, 7).bfloat16(),
    "single": torch.linspace(-1, 1, 9).reshape(3, 3),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
}


def plan(tensors: dict[str, torch.Tensor]) -> list[PlannedTensor]:
    return [PlannedTensor(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def test_a_file_written_in_any_order_equals_what_was_put(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, plan(TENSORS)) as writer:
        for name in reversed(list(TENSORS)):
            writer.put(name, TENSORS[name])
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    read_header(tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_every_element_is_aligned_to_its_size(tmp_path: Path) -> None:
    with TensorWriter(tmp_path, plan(TENSORS)) as writer:
        for name, tensor in TENSORS.items():
            writer.put(name, tensor)
    path = tmp_path / "model.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    stored, _ = read_header(path)
    assert all(stored[name].begin % tensor.element_size() == 0 for name, tensor in TENSORS.items())


def test_strided_tensors_are_written_by_value(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    with TensorWriter(tmp_path, plan({"t": tensor})) as writer:
        writer.put("t", tensor)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], tensor)


def test_large_models_are_split_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    with TensorWriter(tmp_path, plan(tensors), max_shard_bytes=100) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_a_tensor_larger_than_a_shard_gets_a_file_of_its_own(tmp_path: Path) -> None:
    tensors = {"small": torch.ones(2), "large": torch.ones(100), "last": torch.ones(2)}
    with TensorWriter(tmp_path, plan(tensors), max_shard_bytes=64) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, dtype=torch.float16)])
def test_another_shape_or_dtype_than_planned_is_our_own_fault(tmp_path: Path, wrong: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"planned"), TensorWriter(tmp_path, plan({"t": torch.ones(2)})) as writer:
        writer.put("t", wrong)


def test_a_planned_tensor_that_was_not_written_is_noticed(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"planned but not written: \['b'\]"),
        TensorWriter(tmp_path, plan({"a": torch.ones(2), "b": torch.ones(2)})) as writer,
    ):
        writer.put("a", torch.ones(2))
