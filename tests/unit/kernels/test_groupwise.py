import pytest
import torch

from deepinfer_core.errors import CheckpointError
from deepinfer_core.kernels.groupwise import code_range, dequantize_groups, quantize_groups

BITS = (3, 4)
GROUPS = (32, 64, 128, -1)


def normal(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def values(weight: torch.Tensor, bits: int, group: int, zeros: bool, method: str) -> torch.Tensor:
    codes, scales, zero = quantize_groups(weight, bits=bits, group_size=group, zeros=zeros, method=method)
    lo, hi = code_range(bits, zeros=zeros)
    assert codes.dtype == torch.int8
    assert int(codes.min()) >= lo
    assert int(codes.max()) <= hi
    assert bool(scales.isfinite().all())
    assert bool((scales != 0).all())
    assert zero is None or bool(zero.isfinite().all())
    return dequantize_groups(codes, scales, zero, group_size=group)


def wide_scales(weight: torch.Tensor, bits: int, group: int, zeros: bool) -> torch.Tensor:
    _, scales, _ = quantize_groups(weight, bits=bits, group_size=group, zeros=zeros, method="rtn")
    width = weight.shape[1] if group == -1 else group
    return scales.float().abs().repeat_interleave(width, 1)[:, : weight.shape[1]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("n", "k"), [(64, 160), (4, 4336), (3, 128), (5, 37), (1, 1)])
def test_rounding_to_nearest_errs_by_half_a_step_at_most(bits: int, zeros: bool, group: int, n: int, k: int) -> None:
    weight = normal(n, k)
    off = (values(weight, bits, group, zeros, "rtn") - weight).abs()
    # A little more: the largest value may lie just outside of the range once the scale is rounded to FP16.
    assert bool((off <= wide_scales(weight, bits, group, zeros) * 0.505).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_the_search_is_never_worse_and_mostly_better(bits: int, zeros: bool, group: int) -> None:
    weight = normal(64, 384)
    importance = weight.abs() if bits == 3 and not zeros else torch.ones_like(weight)
    near = (values(weight, bits, group, zeros, "rtn") - weight).square() * importance
    best = (values(weight, bits, group, zeros, "search") - weight).square() * importance
    width = 384 if group == -1 else group
    by_group = [error.view(64, -1, width).sum(2) for error in (near, best)]
    assert bool((by_group[1] <= by_group[0] * (1 + 1e-5)).all())
    assert float(best.sum()) < 0.9 * float(near.sum())


def test_three_bits_without_zeros_keep_large_values_rather_than_small_ones() -> None:
    weight = normal(256, 64)
    large = weight.abs() > 2 * weight.std()
    weighted = (values(weight, 3, 32, False, "search") - weight).square()
    plain = (values(weight, 3, 32, True, "search") - weight).square()
    assert float(weighted[large].mean()) < float(weighted[~large].mean())
    assert float(plain[large].mean()) > float(plain[~large].mean())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("zeros", [False, True])
def test_blank_rows_stay_exactly_zero_and_their_neighbours_as_they_are(bits: int, method: str, zeros: bool) -> None:
    weight = normal(24, 96)
    blank = weight.clone()
    blank[10:20] = 0.0
    blank[3] = -0.0
    found = values(blank, bits, 32, zeros, method)
    assert not found[10:20].any()
    assert not found[3].any()
    others = [*range(3), *range(4, 10), *range(20, 24)]
    assert torch.equal(found[others], values(weight, bits, 32, zeros, method)[others])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("size", [1e-12, 2.0**-24, 3e-7, 1e-4, 60000.0])
def test_tiny_and_huge_values_give_finite_scales(bits: int, method: str, zeros: bool, size: float) -> None:
    weight = normal(4, 64) * 20 * size
    weight.clamp_(-65504, 65504)
    found = values(weight, bits, 32, zeros, method)
    step = wide_scales(weight, bits, 32, zeros)
    assert bool(found.isfinite().all())
    # FP16's smallest numbers are a whole step apart: a scale may be off by half of one for each of 15 codes.
    assert bool(((found - weight).abs() <= 8 * step).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("value", [1.0, -0.37, 300.0, 2.0**-20])
def test_a_constant_group_with_zeros_is_its_value(bits: int, method: str, value: float) -> None:
    weight = torch.full((2, 64), value)
    codes, scales, zero = quantize_groups(weight, bits=bits, group_size=32, zeros=True, method=method)
    assert zero is not None
    assert not zero.any()
    assert bool((codes == 1).all())
    assert torch.equal(scales, torch.full((2, 2), value, dtype=torch.float16))


@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e-2])
def test_a_nearly_constant_group_keeps_its_value(method: str, spread: float) -> None:
    weight = 1 + spread * normal(8, 64) * 20
    found = values(weight, 4, 32, True, method)
    assert bool(((found - weight).abs() <= 2**-11 + spread / 4).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_what_fp16_cannot_hold_is_refused_with_its_row(bad: float) -> None:
    weight = normal(3000, 96)
    weight[2990, 5] = bad
    with pytest.raises(CheckpointError, match="row 2990"):
        quantize_groups(weight, bits=4, group_size=32, zeros=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [64, 70])
def test_dequantize_rounds_once_into_any_dtype(dtype: torch.dtype, k: int) -> None:
    codes = torch.arange(3 * k).remainder(16).view(3, k)
    scales = torch.tensor([[0.1, 0.2, 0.3]] * 3).half()[:, : -(-k // 32)]
    zeros = torch.tensor([[7.3, 0.5, 15.9]] * 3).half()[:, : -(-k // 32)]
    wide = [t.double().repeat_interleave(32, 1)[:, :k] for t in (scales, zeros)]
    expected = ((codes.double() - wide[1]) * wide[0]).float()
    out = torch.full((3, k), float("nan"), dtype=dtype)
    assert torch.equal(dequantize_groups(codes, scales, zeros, group_size=32, out=out), expected.to(dtype))
    assert torch.equal(dequantize_groups(codes, scales, zeros, group_size=32, dtype=dtype), expected.to(dtype))


def test_dequantize_leaves_float_codes_alone() -> None:
    codes = torch.ones(2, 32)
    dequantize_groups(codes, torch.full((2, 1), 2.0), None, group_size=32)
    assert bool((codes == 1).all())


def test_a_strided_and_a_half_weight_quantize_like_a_plain_one() -> None:
    wide = normal(16, 256).half()
    view = wide[:, :128]
    first = quantize_groups(view, bits=3, group_size=64, zeros=True)
    second = quantize_groups(view.contiguous().float(), bits=3, group_size=64, zeros=True)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
