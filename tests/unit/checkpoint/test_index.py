"""A model in several files is complete, or refused before anything is loaded (MF-01)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.errors import CheckpointError

Save = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def required(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_all_tensors_come_back_from_one_file_or_several(save_hf: Save, tensors: Tensors, shards: int) -> None:
    checkpoint = open_checkpoint(save_hf(tensors, shards))
    assert checkpoint.kind == "hf"
    assert checkpoint.names() == tensors.keys()
    checkpoint.verify(required(tensors))
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == "float16"
        assert torch.equal(checkpoint.tensor(name), tensor)
    module = "model.layers.0.mlp.up_proj"
    assert checkpoint.layer_format(module).dense
    assert torch.equal(checkpoint.layer_tensors(module)["weight"], tensors[f"{module}.weight"])


def test_a_missing_shard_is_named(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, 3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 weight files are missing: model-00002-of-00003.safetensors"):
        open_checkpoint(directory)


def test_a_cut_shard_is_named(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, 3)
    shard = directory / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors is cut"):
        open_checkpoint(directory)


def test_an_index_entry_that_no_shard_has_is_named(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, 2)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"says that model.ghost.weight is in model-00001-of-00002.safetensors"):
        open_checkpoint(directory)


def test_a_tensor_that_the_index_does_not_list_is_a_warning(
    save_hf: Save, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_hf(tensors, 2)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, "deepinfer"):
        checkpoint = open_checkpoint(directory)
    assert "model.norm.weight" in caplog.text
    assert checkpoint.has("model.norm.weight")


@pytest.mark.parametrize("escape", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors"])
def test_an_index_cannot_lead_out_of_the_directory(save_hf: Save, tensors: Tensors, escape: str) -> None:
    directory = save_hf(tensors, 2)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": escape}}))
    with pytest.raises(CheckpointError, match=r"must be a file name in the same directory"):
        open_checkpoint(directory)


def test_a_tensor_in_two_shards_is_refused(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, 2)
    save_file(tensors, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"stands in both model-00001-of-00002.* and model-00002-of-00002"):
        open_checkpoint(directory)


def test_a_missing_tensor_is_listed_before_anything_is_read(save_hf: Save, tensors: Tensors) -> None:
    wanted = required(tensors)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    checkpoint = open_checkpoint(save_hf(tensors))
    with pytest.raises(CheckpointError, match=r"missing tensors \(2\)") as error:
        checkpoint.verify(wanted)
    assert "model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "model.norm.weight" in str(error.value)


def test_a_shape_that_the_config_does_not_ask_for_is_named(save_hf: Save, tensors: Tensors) -> None:
    wanted = required(tensors) | {"model.norm.weight": (65,)}
    checkpoint = open_checkpoint(save_hf(tensors))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[64\], the config asks for \[65\]"):
        checkpoint.verify(wanted)


def test_unknown_extra_tensors_are_one_warning_with_their_names(
    save_hf: Save, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = required(tensors)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # old files hold it; it is no surprise
    tensors["vision.patch.weight"] = torch.ones(2, 2)
    with caplog.at_level(logging.WARNING, "deepinfer"):
        open_checkpoint(save_hf(tensors)).verify(wanted)
    (record,) = caplog.records
    assert "vision.patch.weight" in record.getMessage()
    assert "inv_freq" not in record.getMessage()


def test_a_tensor_asked_for_by_a_wrong_name_is_answered_with_the_nearest(save_hf: Save, tensors: Tensors) -> None:
    checkpoint = open_checkpoint(save_hf(tensors))
    with pytest.raises(CheckpointError, match=r"no tensor model.norm.wieght; did you mean 'model.norm.weight'"):
        checkpoint.tensor("model.norm.wieght")
