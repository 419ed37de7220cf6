"""The tensor-core kernels' own sources, run on a CPU: what they compute, and that sums leave counters at zero."""

import pytest
import torch
from deepinfer_w3a16 import mma_kernels as w3
from deepinfer_w3a16.scheme import W3A16
from deepinfer_w4a16 import mma_kernels as w4
from deepinfer_w4a16.scheme import W4A16

from deepinfer_core.kernels import mma_linear
from deepinfer_core.kernels.mma_layout import MmaRecords
from deepinfer_core.kernels.mma_plan import (
    SHARED_LIMIT,
    TICKET_BYTES,
    Shape,
    StreamCut,
    cluster_plan,
    stream_plan,
    tile_plan,
)
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_core.testing.cuda_on_cpu import launch, needs_compiler

SCHEMES = {4: (W4A16, w4.CSRC), 3: (W3A16, w3.CSRC)}
pytestmark = needs_compiler


def run(planner, bits, m, n, k, *, group=128, zeros=False, bf16=False, sms=132, extras=False):
    scheme, csrc = SCHEMES[bits][0](), SCHEMES[bits][1]
    dtype = torch.bfloat16 if bf16 else torch.float16
    seed = torch.Generator().manual_seed(n * 7 + k + m)
    draw = lambda *size: torch.randn(*size, generator=seed)
    stored = scheme.quantize(draw(n, k) * 0.02, group_size=group, zeros=zeros, method="rtn")
    problem = LinearProblem(
        n=n, k=k, m_max=64, device="cpu", scheme=f"w{bits}a16", group_size=group, zeros=zeros, act_dtype=str(dtype)[6:]
    )
    weights = MmaRecords(scheme, bits).pack(problem, stored)
    shape = Shape(
        bits=bits, n=n, k=k, group_size=group, zeros=zeros, bf16=bf16, sms=sms, shared_limit=SHARED_LIMIT[9, 0]
    )
    plan = planner(shape, m)
    x, out = draw(m, k).to(dtype), torch.full((m, n), float("nan"), dtype=dtype)
    bias, residual = (draw(n).to(dtype), draw(m, n).to(dtype)) if extras else (None, None)
    workspace = torch.zeros(TICKET_BYTES + plan.partial_bytes, dtype=torch.uint8)
    stream = plan.kind == "mma_stream"
    args = (mma_linear._StreamArgs if stream else mma_linear._TileArgs)(
        codes=weights["codes"].data_ptr(),
        groups=weights["groups"].data_ptr(),
        x=x.data_ptr(),
        y=out.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        part=workspace.data_ptr() + TICKET_BYTES,
        ticket=workspace.data_ptr(),
        **dict(zip(("m", "n", "k", "ldx", "tiles16", "units"), (m, n, k, k, shape.tiles, shape.units), strict=True)),
        **dict(zip(("cut0", "cut1"), plan.cut, strict=True)),
    )
    for early in (0, 1) if stream else (0,):
        out.fill_(float("nan"))
        if stream:
            args.early = early
        launch(
            csrc / f"{plan.kind}.cu",
            plan.kind,
            args,
            "StreamArgs" if stream else "TileArgs",
            dict(plan.defines),
            plan.grid,
            plan.threads,
            plan.shared_bytes,
            cluster=plan.cluster,
        )
        assert not workspace[:TICKET_BYTES].any()
        expected = x.float() @ scheme.dequantize(stored, k=k, group_size=group).t()
        if extras:
            expected = expected + bias.float() + residual.float()
        assert (out.float() - expected).norm() <= (1e-2 if bf16 else 2e-3) * expected.norm()
    return plan


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 77, 333), (3, 200, 1000), (9, 40, 700), (20, 33, 260)])
def test_the_stream_kernel(bits, m, n, k):
    run(stream_plan, bits, m, n, k, extras=True)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("m", "zeros", "group"), [(1, False, 128), (5, True, 32), (20, False, 64)])
def test_slices_that_meet_in_a_cluster(bits, m, zeros, group):
    assert run(cluster_plan, bits, m, 77, 4500, zeros=zeros, group=group, extras=True).cluster > 1


@pytest.mark.parametrize("bits", [4, 3])
def test_clusters_of_pairs_and_of_several_tiles_a_block(bits):
    cut = StreamCut(row_tiles=1, pair=2, warps=8, depth=4, slices=2, cluster=True, resident=2)
    assert run(lambda shape, m: cut.plan(shape, m), bits, 2, 200, 700, sms=6).cut[0] > 1


@pytest.mark.parametrize("bits", [4, 3])
def test_slices_that_meet_in_global_memory(bits):
    cut = StreamCut(row_tiles=1, pair=1, warps=8, depth=3, slices=3)
    assert run(lambda shape, m: cut.plan(shape, m), bits, 2, 100, 700, sms=6).grid[1] == 3


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(9, 77, 333), (17, 200, 1000), (30, 33, 2100)])
def test_the_tile_kernel(bits, m, n, k):
    run(tile_plan, bits, m, n, k, extras=True)


def test_bf16_activations():
    for planner, m in ((stream_plan, 3), (tile_plan, 9), (cluster_plan, 3)):
        run(planner, 4, m, 77, 4500 if planner is cluster_plan else 300, bf16=True)
