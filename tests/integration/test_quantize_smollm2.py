"""The real GGUF: every 4-bit tensor is carried over as it is (MF-05 on llama's own row order included)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from deepinfer_core.bench.sample_model import sample_gguf
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.checkpoint.gguf_names import hf_name
from deepinfer_core.quantize import quantize
from deepinfer_core.registry.catalog import Catalog, make_scheme
from deepinfer_core.registry.discovery import discover

pytestmark = pytest.mark.slow


def in_model_order(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo the llama converter's pairing, head by head and row by row."""
    head_dim = array.shape[0] // heads
    source = [
        h * head_dim + 2 * (i % (head_dim // 2)) + i // (head_dim // 2) for h in range(heads) for i in range(head_dim)
    ]
    return array[source]


def test_codes_and_scales_of_all_210_layers_are_bit_equal_and_values_within_the_zeros_rounding(tmp_path: Path) -> None:
    catalog = Catalog.from_discovery(discover())
    report = quantize(sample_gguf(), tmp_path / "w4", "w4", catalog=catalog, save_tokenizer=lambda c, d: None)
    layers = [layer for layer in report.layers if layer.scheme == "w4a16"]
    assert len(layers) == 210
    assert all(layer.carried and layer.relative_error == 0 for layer in layers)
    result, scheme = open_checkpoint(tmp_path / "w4"), make_scheme(catalog, "w4a16")
    compared = 0
    for tensor in gguf.GGUFReader(sample_gguf()).tensors:
        if tensor.tensor_type.name != "Q4_1":
            continue
        module = str(hf_name(tensor.name)).removesuffix(".weight")
        heads = {"q_proj": 9, "k_proj": 3}.get(module.rpartition(".")[2])
        blocks = tensor.data.reshape(tensor.data.shape[0], -1, 20)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if heads is not None:
            blocks, expected = in_model_order(blocks, heads), in_model_order(expected, heads)
        n, k = expected.shape
        stored = result.layer_tensors(module)
        codes = scheme.unpack(stored["packed"], k, zeros=True).numpy().reshape(n, -1, 2, 16)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[..., 0]
        minima = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[..., 0].astype(np.float32)
        plain = np.isfinite((-minima / np.where(scales == 0, np.nan, scales.astype(np.float32))).astype(np.float16))
        assert np.array_equal(codes[:, :, 0][plain], (blocks[:, :, 4:] & 15)[plain])
        assert np.array_equal(codes[:, :, 1][plain], (blocks[:, :, 4:] >> 4)[plain])
        assert np.array_equal(stored["scales"].numpy()[plain], scales[plain])
        error = np.abs(scheme.dequantize(stored, k=k, group_size=32).numpy() - expected)
        bound = np.abs(stored["zeros"].float().numpy() * stored["scales"].float().numpy()) * 2.0**-11
        assert (error <= bound.repeat(32, 1) * 1.001 + 1e-6).all(), module
        compared += 1
    assert compared == 210
    embedding = result.tensor("model.embed_tokens.weight")
    assert embedding.dtype == torch.float16
    assert (embedding.float() - open_checkpoint(sample_gguf()).tensor("model.embed_tokens.weight")).abs().max() < 1e-3
