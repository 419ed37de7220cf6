import pytest
import torch
from deepinfer_fp16.half_cpu import HalfCpuLayout, HalfCpuMatmul
from deepinfer_fp16.half_cpu_fit import misfit
from deepinfer_fp16.rows_layout import DenseRows
from deepinfer_fp16.scheme import Dense

from deepinfer_core.errors import ConfigError
from deepinfer_core.plugin_api import LinearProblem


def problem(n: int = 3, k: int = 4, dtype: str = "bfloat16") -> LinearProblem:
    return LinearProblem(n=n, k=k, m_max=4, device="cpu", act_dtype=dtype, scheme="fp16")


def test_quantize_keeps_the_weight_itself() -> None:
    weight = torch.randn(3, 4, dtype=torch.bfloat16)
    assert Dense().quantize(weight, group_size=0, zeros=False)["weight"] is weight


@pytest.mark.parametrize(("group", "zeros"), [(32, False), (0, True)])
def test_groups_and_zeros_are_refused(group: int, zeros: bool) -> None:
    with pytest.raises(ConfigError, match="neither groups nor zeros"):
        Dense().quantize(torch.ones(1, 1), group_size=group, zeros=zeros)


def test_a_tied_head_shares_the_embedding_where_dtypes_agree() -> None:
    embedding = torch.randn(5, 4, dtype=torch.bfloat16)
    packed = DenseRows().pack(problem(5), {"weight": embedding})
    assert packed["weight"].data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp16_rows_hold_every_float_dtype_to_eleven_bits(dtype: torch.dtype) -> None:
    exponents = torch.arange(-14, 15).repeat_interleave(8).view(-1, 8).float()
    weight = (torch.randn(29, 8, generator=torch.Generator().manual_seed(0)) * torch.exp2(exponents)).to(dtype)
    weight[3] = 0
    layout = HalfCpuLayout()
    back = layout.unpack(problem(29, 8), layout.pack(problem(29, 8), {"weight": weight}))["weight"]
    limit = 0 if dtype is torch.float16 else 2.0**-11
    assert bool(((back - weight.float()).abs() <= limit * weight.float().abs()).all())


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 3e4, 1e30])
def test_bf16_ranges_beyond_fp16_pass_through_the_half_product(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 64, generator=generator).bfloat16() / 64
    x = (torch.randn(3, 64, generator=generator) * size).bfloat16()
    x[1] = 0
    shape = problem(16, 64)
    out = torch.full((3, 16), float("nan")).bfloat16()
    HalfCpuMatmul(shape)(x, HalfCpuLayout().pack(shape, {"weight": weight}), out)
    expected = x.double() @ weight.double().t()
    assert float((out.double() - expected).norm() / expected.norm()) < 4e-3
    assert not out[1].any()


def test_a_nan_stays_a_nan() -> None:
    shape = problem(4, 8)
    x = torch.ones(2, 8).bfloat16()
    x[1, 3] = float("nan")
    out = torch.zeros(2, 4).bfloat16()
    HalfCpuMatmul(shape)(x, HalfCpuLayout().pack(shape, {"weight": torch.ones(4, 8)}), out)
    assert bool((out[0] == 8).all())
    assert bool(out[1].isnan().all())


def test_only_large_layers_are_held_as_fp16() -> None:
    assert misfit(problem(49152, 576)) is None
    reason = misfit(problem(1536, 576))
    assert reason is not None
    assert "1536 x 576" in reason
