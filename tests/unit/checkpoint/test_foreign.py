"""What is not read is refused by name: never run, never taken for fp16 (SV-10, MF-04)."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.errors import CheckpointError

Save = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_not_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(pickle.dumps(_Touch(tmp_path / "touched")))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"{name} are Python pickles.*safetensors and GGUF only"):
            open_checkpoint(path)
    assert not (tmp_path / "touched").exists()


def test_safetensors_beside_a_pickle_are_read_and_the_pickle_is_not(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(directory / "touched")))
    assert open_checkpoint(directory).names() == tensors.keys()
    assert not (directory / "touched").exists()


def test_code_that_a_config_names_is_ignored_with_the_reason(
    save_hf: Save, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_hf(tensors, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (directory / "modeling.py").write_text(f"open({str(directory / 'touched')!r}, 'w')")
    with caplog.at_level(logging.WARNING, "deepinfer"):
        checkpoint = open_checkpoint(directory)
    assert "auto_map" in caplog.text
    assert "never run" in caplog.text
    assert "auto_map" not in checkpoint.hf_config
    assert not (directory / "touched").exists()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantized by GPTQ with 4 bits"),
        ({"quant_method": "gptq", "bits": 5}, "quantized by GPTQ with 5 bits"),
        ({"quant_method": "awq", "bits": 4}, "quantized by AWQ with 4 bits"),
        ({"quant_method": "compressed-tensors"}, "quantized by compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized by bitsandbytes"),
        ({"load_in_8bit": True}, "quantized by bitsandbytes"),
        ({"quant_method": "zzz"}, "quantized by 'zzz'"),
        ({"bits": 4, "group_size": 128}, "quantized by GPTQ with 4 bits"),
    ],
)
def test_foreign_quantization_configs_are_refused_by_name(
    save_hf: Save, tensors: Tensors, section: dict[str, Any], message: str
) -> None:
    directory = save_hf(tensors, quantization_config=section)
    with pytest.raises(CheckpointError, match=rf"config.json: the weights are {message}.*deepinfer quantize SRC DST"):
        open_checkpoint(directory)


def test_a_quantize_config_in_a_file_of_its_own_is_seen(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors)
    (directory / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 128, "desc_act": False}))
    with pytest.raises(CheckpointError, match=r"quantize_config.json: the weights are quantized by GPTQ with 3 bits"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("suffix", "method"),
    [
        ("qweight", "GPTQ or AWQ"),
        ("weight_packed", "compressed-tensors"),
        ("weight.absmax", "bitsandbytes"),
        ("weight_scale_inv", "FP8 or INT8"),
    ],
)
def test_foreign_tensors_without_any_config_are_refused_by_name(
    save_hf: Save, tensors: Tensors, suffix: str, method: str
) -> None:
    module = "model.layers.0.mlp.up_proj"
    tensors[f"{module}.{suffix}"] = torch.zeros(8, 12, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=rf"tensor {module}.{suffix} belongs to a model quantized by {method}"):
        open_checkpoint(save_hf(tensors))


def test_integer_weights_are_never_dense_weights(save_hf: Save, tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
    checkpoint = open_checkpoint(save_hf(tensors))
    with pytest.raises(CheckpointError, match=r"up_proj.weight is int8; a dense weight must be floating"):
        checkpoint.layer_tensors("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "is an empty directory"),
        (lambda d: (d / "config.json").write_text("{}"), "holds no weights: no .safetensors and no .gguf"),
        (lambda d: [(d / n).touch() for n in ("a.gguf", "b.gguf")], "holds 2 GGUF files; name the one.*a.gguf, b.gguf"),
    ],
)
def test_a_directory_without_a_model_is_explained(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_paths_that_are_no_model_are_explained(tmp_path: Path, save_hf: Save, tensors: Tensors) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    directory = save_hf(tensors)
    with pytest.raises(CheckpointError, match=r"give the directory"):
        open_checkpoint(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"neither a model directory nor a .gguf"):
        open_checkpoint(directory / "config.json")
    (directory / "config.json").write_text("{nonsense")
    with pytest.raises(CheckpointError, match=r"config.json is not readable JSON"):
        open_checkpoint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        open_checkpoint(directory)


def test_the_left_over_of_a_killed_conversion_never_loads(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, name="model.partial")
    with pytest.raises(CheckpointError, match=r"unfinished output of a conversion"):
        open_checkpoint(directory)
