"""GGUF's 4-bit blocks become canonical w4a16 with the same codes and scales (SPEC 3)."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from deepinfer_core.checkpoint.gguf_blocks import w4a16_from_q4
from deepinfer_core.errors import CheckpointError

Kind = gguf.GGMLQuantizationType


def block(scale: float, codes: list[int], minimum: float | None = None) -> np.ndarray:
    """One GGUF block: scale, (minimum,) then code j in low nibble j and code j + 16 in high nibble j."""
    head = [scale] if minimum is None else [scale, minimum]
    nibbles = np.array(codes, np.uint8)
    data = nibbles[:16] | (nibbles[16:] << 4)
    return np.concatenate([np.array(head, np.float16).view(np.uint8), data])[None]


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Low nibble = even k, high nibble = odd k."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)


def dequantized(tensors: dict[str, np.ndarray]) -> np.ndarray:
    codes = unpacked(tensors["packed"]).astype(np.float64)
    if "zeros" not in tensors:
        codes = np.where(codes > 7, codes - 16, codes)
    zeros = tensors["zeros"].astype(np.float64).repeat(32, 1) if "zeros" in tensors else 0.0
    return (codes - zeros) * tensors["scales"].astype(np.float64).repeat(32, 1)


def test_q4_0_codes_are_signed_nibbles_in_order_of_k() -> None:
    codes = [(7 * i + 3) % 16 for i in range(32)]
    tensors = w4a16_from_q4(block(0.25, codes), "Q4_0", "x")
    assert tensors.keys() == {"packed", "scales"}
    signed = [c - 8 for c in codes]
    expected = [(signed[2 * i] & 15) | ((signed[2 * i + 1] & 15) << 4) for i in range(16)]
    assert tensors["packed"].tolist() == [expected]
    assert tensors["scales"].dtype == np.float16
    assert tensors["scales"].tolist() == [[0.25]]


def test_q4_1_keeps_codes_and_scale_and_rounds_the_zero_to_fp16() -> None:
    codes = list(range(16)) * 2
    tensors = w4a16_from_q4(block(0.1, codes, -0.33), "Q4_1", "x")
    assert unpacked(tensors["packed"]).tolist() == [codes]
    assert tensors["scales"][0, 0] == np.float16(0.1)
    exact = -float(np.float16(-0.33)) / float(np.float16(0.1))
    assert tensors["zeros"][0, 0] == np.float16(exact)
    assert float(tensors["zeros"][0, 0]) != round(exact)  # fractional, and kept so


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_values_equal_the_gguf_package_within_the_rounding_of_the_zero(kind: gguf.GGMLQuantizationType) -> None:
    rng = np.random.default_rng(5)
    weight = (rng.standard_normal((24, 96)) * rng.uniform(1e-3, 3, (24, 1)) + rng.uniform(-1, 1, (24, 1))).astype("f4")
    raw = gguf.quants.quantize(weight, kind)
    tensors = w4a16_from_q4(raw, kind.name, "x")
    expected = gguf.quants.dequantize(raw, kind).astype(np.float64)
    error = np.abs(dequantized(tensors) - expected)
    if kind is Kind.Q4_0:
        assert error.max() <= 1e-7 * np.abs(expected).max()  # the package multiplies in float32
    else:
        bound = np.abs(tensors["zeros"].astype(np.float64) * tensors["scales"].astype(np.float64)) * 2.0**-11
        assert (error <= bound.repeat(32, 1) + 1e-6 * np.abs(expected).max()).all()


@pytest.mark.parametrize("value", [0.5, -3.0, 65504.0, 6e-8])
def test_a_constant_block_is_stored_as_scale_with_code_one(value: float) -> None:
    tensors = w4a16_from_q4(block(0.0, [0] * 32, value), "Q4_1", "x")
    assert tensors["scales"].tolist() == [[float(np.float16(value))]]
    assert tensors["zeros"].tolist() == [[0.0]]
    assert set(unpacked(tensors["packed"]).ravel().tolist()) == {1}
    assert (dequantized(tensors) == float(np.float16(value))).all()


def test_a_nearly_constant_block_whose_zero_overflows_keeps_its_value() -> None:
    codes = [i % 16 for i in range(32)]
    tensors = w4a16_from_q4(block(6e-8, codes, 1000.0), "Q4_1", "x")
    assert np.isfinite(tensors["zeros"].astype(np.float32)).all()
    assert (dequantized(tensors) == 1000.0).all()


def test_an_all_zero_block_stays_exactly_zero() -> None:
    for tensors in (
        w4a16_from_q4(block(0.0, [8] * 32), "Q4_0", "x"),
        w4a16_from_q4(block(0, [0] * 32, 0), "Q4_1", "x"),
    ):
        assert (dequantized(tensors) == 0).all()
        assert all(np.isfinite(t.astype(np.float32)).all() for t in tensors.values())


def test_an_exception_block_leaves_its_neighbours_alone() -> None:
    codes = [(5 * i) % 16 for i in range(32)]
    normal = block(0.5, codes, -2.0)
    tensors = w4a16_from_q4(np.concatenate([normal, block(0, [0] * 32, 0.75), normal], axis=1), "Q4_1", "x")
    assert tensors["scales"].tolist() == [[0.5, 0.75, 0.5]]
    assert tensors["zeros"].tolist() == [[4.0, 0.0, 4.0]]
    assert unpacked(tensors["packed"]).tolist() == [codes + [1] * 32 + codes]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(CheckpointError, match=r"file: tensor t: a block's scale is not finite"):
        w4a16_from_q4(block(bad, [0] * 32), "Q4_0", "file: tensor t")
    with pytest.raises(CheckpointError, match=r"not finite"):
        w4a16_from_q4(block(1.0, [0] * 32, bad), "Q4_1", "file: tensor t")
