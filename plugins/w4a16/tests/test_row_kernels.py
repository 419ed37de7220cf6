"""The first system's kernels over canonical rows: resources without a card, values on one."""

import pytest
import torch
from deepinfer_w4a16 import row_kernels
from deepinfer_w4a16.scheme import W4A16

from deepinfer_core.kernels.nvrtc import CudaSource, compile_source
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_core.testing.resources import CAPABILITIES, assert_resources


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(
    ("source", "entry", "defines"),
    [
        ("rows_gemv.cu", "gemv", {"ROWS": 1}),
        ("rows_gemv.cu", "gemv", {"ROWS": 8}),
        ("rows_tiled_gemm.cu", "tiled_gemm", {}),
    ],
)
def test_compiles_without_spills_and_two_blocks_fit_the_first_target(source, entry, defines, capability):
    compiled = compile_source(CudaSource.make(row_kernels.CSRC / source, defines), capability)
    assert_resources(compiled, entry, threads=256, dynamic_shared=0, capability=capability)


def product(kernel_of, m, n, k, group, zeros, *, residual=False):
    torch.manual_seed(n + k + m)
    scheme = W4A16()
    stored = scheme.quantize(torch.randn(n, k, device="cuda") * 0.02, group_size=group, zeros=zeros, method="rtn")
    problem = LinearProblem(
        n=n,
        k=k,
        m_max=max(m, 1),
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        scheme="w4a16",
        group_size=group,
        zeros=zeros,
    )
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    extra = torch.randn(m, n, device="cuda", dtype=torch.float16) if residual else None
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
    kernel_of(problem)(x, stored, out, residual=extra)
    expected = x.float() @ scheme.dequantize(stored, k=k, group_size=group).t()
    if extra is not None:
        expected += extra.float()
    return out.float(), expected


@pytest.mark.gpu
def test_w4a16_tiled_prefill_matches_dequantized_reference():
    out, expected = product(row_kernels.tiled_gemm, 37, 200, 544, 128, zeros=False)
    assert (out - expected).norm() / expected.norm() < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (77, 333), (1, 8), (130, 36)])
@pytest.mark.parametrize("form", ["gemv", "batch_tile_gemv", "tiled_gemm"])
def test_every_form_matches_the_reference_at_odd_shapes(form, n, k, group, zeros):
    for m in (1, 2, 7, 8, 9, 33):
        out, expected = product(getattr(row_kernels, form), m, n, k, group, zeros, residual=m == 2)
        assert (out - expected).norm() / expected.norm() < 2e-3, (form, m)


@pytest.mark.gpu
def test_no_rows_launch_nothing():
    out, _ = product(row_kernels.tiled_gemm, 0, 64, 64, 32, zeros=False)
    assert out.shape == (0, 64)
