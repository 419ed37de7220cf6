"""RMSNorm against its definition in float64."""

import pytest
import torch

from deepinfer_core.layers.norm import RMSNorm

DTYPES = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def right(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_follow_the_definition(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 96, generator=generator).to(dtype), torch.randn(96, generator=generator)
    found = RMSNorm(weight, 1e-5, device="cpu", dtype=dtype)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right(x, weight, 1e-5), rtol=DTYPES[dtype], atol=DTYPES[dtype] / 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1000.0, 60_000.0])
def test_large_inputs_do_not_overflow(dtype, value):
    weight = torch.linspace(0.5, 2, 4096)
    found = RMSNorm(weight, 1e-6, device="cpu", dtype=dtype)(torch.full((1, 4096), value, dtype=dtype))
    torch.testing.assert_close(found[0].float(), weight, rtol=DTYPES[dtype], atol=0)


def test_epsilon_counts_where_inputs_are_small():
    x = torch.full((1, 64), 1e-4)
    found = RMSNorm(torch.ones(64), 1e-5, device="cpu", dtype=torch.float32)(x)
    torch.testing.assert_close(found, right(x, torch.ones(64), 1e-5).float())
    assert found[0, 0].item() == pytest.approx(1e-4 / (1e-8 + 1e-5) ** 0.5, rel=1e-5)


def test_zeros_stay_zeros():
    assert not RMSNorm(torch.ones(64), 1e-6, device="cpu", dtype=torch.float16)(torch.zeros(2, 64).half()).any()


def test_a_weight_per_head_norms_each_head_alone():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(3, 8, generator=generator), torch.randn(4, 5, 8, generator=generator)[:, :3]
    found = RMSNorm(weight, 1e-6, device="cpu", dtype=torch.float32)(x)
    for head in range(3):
        torch.testing.assert_close(found[:, head], right(x[:, head], weight[head], 1e-6).float())


def test_no_rows_give_no_rows():
    assert RMSNorm(torch.ones(64), 1e-6, device="cpu", dtype=torch.float32)(torch.zeros(0, 64)).shape == (0, 64)
