"""The layout over torch's int4 CPU matmul: what it rounds, how it pads, where rows lie, and when it refuses."""

from __future__ import annotations

import pytest
import torch

from deepinfer_core.kernels import int4_cpu, int4_cpu_fit
from deepinfer_core.kernels.groupwise import GroupwiseScheme
from deepinfer_core.kernels.int4_cpu import Int4CpuLayout, Int4CpuMatmul, block_rows, padded_shape
from deepinfer_core.plugin_api import LinearProblem


class Bytes(GroupwiseScheme):
    """A scheme of some bits that keeps a code a byte: what is tested is the layout."""

    unit = (1, 1)

    def __init__(self, bits: int) -> None:
        self.name, self.bits = f"w{bits}", bits

    def pack(self, codes: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        return codes.to(torch.int8).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, k: int, *, zeros: bool) -> torch.Tensor:
        return packed.view(torch.int8)


def problem(n: int, k: int, group: int, zeros: bool = False) -> LinearProblem:
    return LinearProblem(
        n=n, k=k, m_max=64, device="cpu", act_dtype="bfloat16", scheme="any", group_size=group, zeros=zeros
    )


def values(layout: Int4CpuLayout, shape: LinearProblem, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.full((shape.n, shape.k), float("nan"))
    layout.dequantize_rows(shape, packed, 0, shape.n, out)
    return out


@pytest.mark.parametrize(
    ("group", "k", "expected"),
    [
        (32, 33, (64, 32)), (128, 160, (256, 128)), (64, 64, (64, 64)),
        (-1, 512, (512, 256)), (-1, 384, (384, 128)), (-1, 192, (192, 64)), (-1, 160, (160, 32)), (-1, 33, (64, 32)),
    ],
)  # fmt: skip
def test_k_is_padded_to_groups_that_torch_takes(group: int, k: int, expected: tuple[int, int]) -> None:
    n, padded_k, torch_group = padded_shape(problem(5, k, group))
    assert (padded_k, torch_group) == expected
    assert n == block_rows()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_every_code_comes_back_in_every_row_of_a_block(bits: int, zeros: bool) -> None:
    n, k = 2 * block_rows() + 3, 32
    scheme, shape = Bytes(bits), problem(n, k, 32, zeros)
    lo = 0 if zeros else -(1 << (bits - 1))
    codes = (torch.arange(n * k).view(n, k) * 7 + torch.arange(n).view(n, 1)).remainder(1 << bits) + lo
    tensors = {"packed": scheme.pack(codes, zeros=zeros), "scales": torch.ones(n, 1).half()}
    if zeros:
        tensors["zeros"] = torch.full((n, 1), 5.0).half()
    layout = Int4CpuLayout(scheme)
    expected = codes.float() - (5 if zeros else 0)
    assert torch.equal(values(layout, shape, layout.pack(shape, tensors)), expected)
    back = layout.unpack(shape, layout.pack(shape, tensors))
    assert torch.equal(scheme.dequantize(back, k=k, group_size=32), expected)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("mean", [0.0, 1.0, -3.0])
def test_values_are_off_by_the_rounding_of_scale_and_offset_alone(bits: int, mean: float) -> None:
    scheme, shape = Bytes(bits), problem(40, 200, 64, zeros=True)
    weight = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) + mean
    tensors = scheme.quantize(weight, group_size=64, zeros=True, method="rtn")
    layout = Int4CpuLayout(scheme)
    exact = scheme.dequantize(tensors, k=200, group_size=64)
    off = (values(layout, shape, layout.pack(shape, tensors)) - exact).abs()
    for part in range(0, 200, 64):
        largest = exact[:, part : part + 64].abs().amax(1, keepdim=True)
        assert bool((off[:, part : part + 64] <= 2.0**-7 * largest).all())


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("value", [0.7, -0.3, 3e-5])
def test_a_constant_group_is_as_good_as_exact(bits: int, value: float) -> None:
    scheme, shape = Bytes(bits), problem(3, 70, 32, zeros=True)
    tensors = scheme.quantize(torch.full((3, 70), value), group_size=32, zeros=True, method="rtn")
    layout = Int4CpuLayout(scheme)
    found = values(layout, shape, layout.pack(shape, tensors))
    assert bool(((found - value).abs() <= 2.0**-10 * abs(value)).all())


@pytest.mark.parametrize("zeros", [False, True])
def test_blank_rows_stay_exactly_zero(zeros: bool) -> None:
    scheme, shape = Bytes(4), problem(4, 64, 32, zeros)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weight[1], weight[2] = 0.0, -0.0
    tensors = scheme.quantize(weight, group_size=32, zeros=zeros, method="search")
    layout = Int4CpuLayout(scheme)
    x, out = torch.randn(2, 64).bfloat16(), torch.full((2, 4), float("nan")).bfloat16()
    Int4CpuMatmul(shape)(x, layout.pack(shape, tensors), out)
    assert not out[:, 1:3].any()
    assert bool(out.isfinite().all())


def test_what_is_padded_along_k_is_never_read_from_x() -> None:
    scheme, shape = Bytes(4), problem(2, 40, 32, zeros=True)
    tensors = scheme.quantize(torch.rand(2, 40) + 1, group_size=32, zeros=True, method="rtn")
    layout = Int4CpuLayout(scheme)
    wide = torch.full((3, 64), float("nan")).bfloat16()
    wide[:, :40] = 1
    out = torch.zeros(3, 2).bfloat16()
    Int4CpuMatmul(shape)(wide[:, :40], layout.pack(shape, tensors), out)
    expected = scheme.dequantize(tensors, k=40, group_size=32).sum(1)
    assert bool(((out.float() - expected).abs() <= 1e-2 * expected).all())


def test_an_unknown_order_of_torch_s_bytes_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def shuffled(nibbles: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(nibbles.shape[0], generator=torch.Generator().manual_seed(0))
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles[order].contiguous(), 1)  # type: ignore[no-any-return]

    monkeypatch.setattr(int4_cpu, "_convert", shuffled)
    with pytest.raises(int4_cpu.KernelError, match=r"orders int4 weights.*kernels = "):
        int4_cpu._block.__wrapped__()


@pytest.mark.parametrize(
    ("installed", "fits"), [("2.5.1", False), ("2.5.1+cu121", False), ("2.6.0", True), ("2.13.0", True), ("3.0", True)]
)
def test_torch_before_its_int4_cpu_matmul_is_a_reason(
    installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_cpu_fit, "version", lambda name: installed)
    reason = int4_cpu_fit.misfit(problem(64, 64, 32))
    assert reason is None if fits else reason == f"needs torch 2.6 or newer, installed is {installed}"


def test_a_torch_without_metadata_is_taken_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise int4_cpu_fit.PackageNotFoundError(name)

    monkeypatch.setattr(int4_cpu_fit, "version", absent)
    assert int4_cpu_fit.misfit(problem(64, 64, 32)) is None
