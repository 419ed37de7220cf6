"""Norm and gated activation on a card against their definitions; resources without one."""

from pathlib import Path

import pytest
import torch

from deepinfer_core.kernels.fused_norm import norm_defines, rms_norm
from deepinfer_core.kernels.nvrtc import CudaSource, compile_source
from deepinfer_core.kernels.silu_mul import silu_mul
from deepinfer_core.testing.resources import CAPABILITIES, assert_resources

CSRC = Path(__file__).parents[3] / "deepinfer_core" / "kernels" / "csrc"
LIMIT = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_they_compile_without_spills(dtype, capability):
    for width in (576, 8192, 18_944, 77):
        compiled = compile_source(CudaSource.make(CSRC / "rms_norm.cu", norm_defines(width, dtype)), capability)
        assert_resources(compiled, "rms_norm", threads=512, dynamic_shared=0, capability=capability)
    for vec in (1, 8):
        defines = {"BF16": int(dtype == torch.bfloat16), "VEC": vec}
        compiled = compile_source(CudaSource.make(CSRC / "silu_mul.cu", defines), capability)
        assert_resources(compiled, "silu_mul", threads=256, dynamic_shared=0, capability=capability)


def definition(x, weight, eps):
    x = x.double()
    return (x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("width", [8, 77, 576, 2048, 3584, 8192, 18_944])
@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_norm_and_add_follow_the_definition(rows, width, dtype):
    torch.manual_seed(rows + width)
    x, delta = torch.randn(2, rows, width, device="cuda").to(dtype)
    weight = torch.randn(width, device="cuda").to(dtype)
    limit = LIMIT[dtype]
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).float(), definition(x, weight, 1e-5), rtol=limit, atol=limit)
    total = (x.float() + delta.float()).to(dtype)
    found = rms_norm(x, weight, 1e-5, delta)
    assert torch.equal(x, total)
    torch.testing.assert_close(found.float(), definition(total, weight, 1e-5), rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [1000.0, 60_000.0])
def test_large_rows_stay_finite(value):
    weight = torch.linspace(0.5, 2, 4096, device="cuda").half()
    x = torch.full((1, 4096), value, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6)[0].float(), weight.float(), rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_strided_rows_are_read_as_their_copy():
    for width, skip in ((96, 0), (96, 1)):
        wide = torch.randn(6, 2 * width + skip, device="cuda").half()
        x, weight = wide[:, skip : skip + width], torch.randn(width, device="cuda").half()
        assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))
        assert torch.equal(silu_mul(x, x), silu_mul(x.contiguous(), x.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 11_008), (3, 77), (17, 1536), (200, 5632)])
def test_silu_times_up(rows, width, dtype):
    torch.manual_seed(rows)
    both = (torch.randn(rows, 2 * width, device="cuda") * 4).to(dtype)
    gate, up = both[:, :width], both[:, width:]
    right = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_mul(gate, up).double(), right, rtol=LIMIT[dtype], atol=LIMIT[dtype])
