"""Patterns say how layers are stored, and the tensors must agree with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.checkpoint import DENSE, LayerFormat, LayerPatterns, open_checkpoint
from deepinfer_core.errors import CheckpointError
from deepinfer_core.plugin_api import TensorSpec, WeightSchemeSpec

Save = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
W4 = LayerFormat("w4a16", 32, True, "deepinfer-plugin-w4a16")
W3 = LayerFormat("w3a16", 64, False, "deepinfer-plugin-w3a16")
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SCHEME = WeightSchemeSpec(
    name="w4a16",
    bits=4,
    tensors=(
        TensorSpec(name="packed", dtype="uint8", per=2),
        TensorSpec(name="scales", dtype="float16", per="group"),
        TensorSpec(name="zeros", dtype="float16", per="group", needs_zeros=True),
    ),
    group_sizes=(32, 64, 128, -1),
    zeros=True,
    factory="nowhere:nothing",
)


def model(attention: LayerFormat, mlp: LayerFormat, head: LayerFormat = DENSE, layers: int = 12) -> dict[str, Any]:
    formats = {f"model.layers.{i}.{p}": attention for i in range(layers) for p in PROJECTIONS}
    formats |= {f"model.layers.{i}.{p}": mlp for i in range(layers) for p in MLP}
    return formats | {"lm_head": head}


def folded(formats: dict[str, LayerFormat]) -> list[str]:
    patterns = LayerPatterns.folded(formats)
    reread = LayerPatterns.from_config(patterns.to_config(), "config.json")
    assert {m: reread.format_of(m) for m in formats} == formats
    return [pattern for pattern, _ in reread.patterns]


def test_layers_that_agree_are_folded_into_one_pattern() -> None:
    assert folded(model(W4, W4)) == ["model.layers.*"]
    assert folded(model(W4, W3)) == ["model.layers.*.self_attn.*", "model.layers.*.mlp.*"]
    assert folded(model(DENSE, W3, head=W4)) == ["model.layers.*.mlp.*", "lm_head"]
    assert folded(model(DENSE, DENSE)) == []


def test_a_layer_of_its_own_stands_before_the_pattern_that_would_match_it() -> None:
    formats = model(W4, W4)
    formats["model.layers.1.mlp.up_proj"] = W3
    formats["model.layers.11.mlp.up_proj"] = DENSE
    assert folded(formats) == ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "model.layers.*"]


def test_projections_that_differ_are_named_one_by_one() -> None:
    formats = model(W4, W3)
    formats |= {f"model.layers.{i}.self_attn.v_proj": W3 for i in range(12)}
    assert sorted(folded(formats)) == [
        "model.layers.*.mlp.*",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.v_proj",
    ]


def test_the_first_matching_pattern_decides_and_an_unmatched_module_is_dense() -> None:
    patterns = LayerPatterns([("model.layers.0.*", W3), ("model.layers.*", W4)])
    assert patterns.format_of("model.layers.0.mlp.up_proj") == W3
    assert patterns.format_of("model.layers.3.mlp.up_proj") == W4
    assert patterns.format_of("lm_head") == DENSE
    assert patterns.format_of("MODEL.layers.3.x") == DENSE


def w4_layer(n: int, k: int, group: int = 32) -> Tensors:
    return {
        "packed": torch.zeros(n, (k + 1) // 2, dtype=torch.uint8),
        "scales": torch.ones(n, -(-k // group), dtype=torch.float16),
        "zeros": torch.ones(n, -(-k // group), dtype=torch.float16),
    }


UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def save_w4(save_hf: Save, tensors: Tensors) -> Save:
    """Returns save(layer tensors, **format changes): the tiny model with one W4 layer."""

    def save(layer: Tensors, **changes: Any) -> Path:
        del tensors[f"{UP}.weight"]
        tensors.update({f"{UP}.{name}": tensor for name, tensor in layer.items()})
        section = LayerPatterns([(UP, W4)]).to_config()
        section["layers"][UP] |= changes
        return save_hf(tensors, quantization_config=section)

    return save


def test_a_quantized_layer_is_read_with_its_format(save_w4: Save) -> None:
    layer = w4_layer(96, 64)
    checkpoint = open_checkpoint(save_w4(layer))
    assert checkpoint.kind == "deepinfer"
    assert checkpoint.layer_format(UP) == W4
    assert checkpoint.layer_format("model.layers.1.mlp.up_proj") == DENSE
    read = checkpoint.layer_tensors(UP)
    assert {n: (t.dtype, t.shape) for n, t in read.items()} == {n: (t.dtype, t.shape) for n, t in layer.items()}
    checkpoint.verify({f"{UP}.weight": (96, 64)}, schemes={"w4a16": SCHEME})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (w4_layer(96, 48), rf"{UP}.packed is uint8 \[96, 24\], but w4a16 .group 32, zeros. for 96 x 64 needs"),
        (w4_layer(96, 64, 64), rf"{UP}.scales is float16 \[96, 1\].*needs float16 \[96, 2\]"),
        (w4_layer(96, 64) | {"zeros": torch.ones(96, 2, dtype=torch.uint8)}, rf"{UP}.zeros is uint8.*needs float16"),
    ],
)
def test_wrong_bits_groups_and_dtypes_are_named_with_layer_and_file(
    save_w4: Save, layer: Tensors, message: str
) -> None:
    checkpoint = open_checkpoint(save_w4(layer))
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.verify({f"{UP}.weight": (96, 64)}, schemes={"w4a16": SCHEME})
    assert "model.safetensors" in str(error.value)


def test_a_missing_part_of_a_quantized_layer_is_named(save_w4: Save) -> None:
    layer = w4_layer(96, 64)
    del layer["zeros"]
    checkpoint = open_checkpoint(save_w4(layer))
    with pytest.raises(CheckpointError, match=rf"missing tensors .*: {UP}.zeros"):
        checkpoint.verify({f"{UP}.weight": (96, 64)}, schemes={"w4a16": SCHEME})


def test_a_quantized_layer_stored_dense_is_missing_its_codes(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, quantization_config=LayerPatterns([("model.layers.*", W4)]).to_config())
    checkpoint = open_checkpoint(directory)
    with pytest.raises(CheckpointError, match=rf"missing tensors .*: {UP}.packed"):
        checkpoint.verify({f"{UP}.weight": (96, 64)}, schemes={"w4a16": SCHEME})


def test_norms_below_a_layer_pattern_stay_dense(save_hf: Save, tensors: Tensors) -> None:
    directory = save_hf(tensors, quantization_config=LayerPatterns([("model.layers.*", W4)]).to_config())
    norm = "model.layers.0.input_layernorm.weight"
    checkpoint = open_checkpoint(directory)
    checkpoint.verify({norm: (64,)}, schemes={"w4a16": SCHEME})
    checkpoint.verify([norm])


def test_packed_tensors_without_a_format_are_never_loaded_as_dense(save_hf: Save, tensors: Tensors) -> None:
    del tensors[f"{UP}.weight"]
    tensors |= {f"{UP}.{name}": tensor for name, tensor in w4_layer(96, 64).items()}
    with pytest.raises(CheckpointError, match=rf"tensor {UP}.packed is packed, but .* gives no format for {UP}"):
        open_checkpoint(save_hf(tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": 4}, "must be an object with a scheme"),
        ({"group_size": "32"}, "group_size must be -1 .whole row., 0 .none. or positive, got '32'"),
        ({"group_size": True}, "group_size must be"),
        ({"zeros": 1}, "zeros must be true or false, got 1"),
        ({"distribution": 3}, "distribution must be a name, got 3"),
    ],
)
def test_a_pattern_entry_of_wrong_type_is_named(save_w4: Save, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"quantization_config.layers\['{UP}'\].*{message}"):
        open_checkpoint(save_w4(w4_layer(96, 64), **changes))


def test_a_layer_without_a_group_is_named_where_its_scheme_needs_one(save_w4: Save) -> None:
    checkpoint = open_checkpoint(save_w4(w4_layer(96, 64), group_size=0))
    with pytest.raises(CheckpointError, match=rf"{UP} is w4a16 with group_size 0"):
        checkpoint.verify({f"{UP}.weight": (96, 64)}, schemes={"w4a16": SCHEME})


def test_a_dense_weight_of_whole_numbers_is_refused_before_it_is_read(save_hf: Save, tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(torch.int8)
    with pytest.raises(CheckpointError, match=rf"{UP}.weight is int8; a dense weight must be floating"):
        open_checkpoint(save_hf(tensors)).verify([f"{UP}.weight"])


def test_a_newer_format_version_asks_for_an_upgrade(save_hf: Save, tensors: Tensors) -> None:
    section = {"quant_method": "deepinfer", "format_version": 2, "layers": {}}
    with pytest.raises(CheckpointError, match=r"format_version 2, this release reads 1; upgrade deepinfer-core"):
        open_checkpoint(save_hf(tensors, quantization_config=section))
