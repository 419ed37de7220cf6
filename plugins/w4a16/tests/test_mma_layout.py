"""Layout `w4a16.mma16.v1`: lossless for any shape, and its kernels' resources on every card."""

import pytest
import torch
from deepinfer_w4a16 import mma_kernels
from deepinfer_w4a16.mma_layout import mma_layout
from deepinfer_w4a16.scheme import W4A16

from deepinfer_core.kernels.mma_plan import SHARED_LIMIT, TICKET_BYTES, Shape, cluster_plan, stream_plan, tile_plan
from deepinfer_core.kernels.nvrtc import CudaSource, compile_source
from deepinfer_core.plugin_api import LinearProblem
from deepinfer_core.testing.resources import CAPABILITIES, assert_resources

SHAPES = [(1, 1), (16, 128), (5, 7), (33, 200), (48, 4336 % 512), (17, 160), (40, 384)]


def problem_of(n, k, group, zeros, device="cpu", **more):
    return LinearProblem(n=n, k=k, m_max=64, device=device, scheme="w4a16", group_size=group, zeros=zeros, **more)


def stored_weights(n, k, group, zeros, device="cpu"):
    torch.manual_seed(n * 1000 + k)
    weight = torch.randn(n, k, device=device) * 0.02
    return W4A16().quantize(weight, group_size=group, zeros=zeros, method="rtn")


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_round_trip_is_lossless_and_values_are_the_scheme_s(n, k, group, zeros):
    layout, stored, problem = mma_layout(), stored_weights(n, k, group, zeros), problem_of(n, k, group, zeros)
    packed = layout.pack(problem, stored)
    assert sum(t.numel() * t.element_size() for t in packed.values()) == layout.nbytes(problem)
    back = layout.unpack(problem, packed)
    assert back.keys() == stored.keys()
    for name in stored:
        assert torch.equal(back[name], stored[name]), name
    expected = W4A16().dequantize(stored, k=k, group_size=group)
    for n0, n1 in ((0, n), (n // 3, n), (n - 1, n), (n // 2, n // 2)):
        out = torch.full((n1 - n0, k), float("nan"))
        layout.dequantize_rows(problem, packed, n0, n1, out)
        torch.testing.assert_close(out, expected[n0:n1], rtol=0, atol=0)


@pytest.mark.parametrize("widths", [(32, 16, 16), (20, 7, 33)])
def test_merged_layers_are_the_same_as_one(widths):
    layout, k = mma_layout(), 160
    stored = [stored_weights(n, k, 64, True) for n in widths]
    problems = [problem_of(n, k, 64, True) for n in widths]
    joined = layout.concat_n(problems, [layout.pack(p, s) for p, s in zip(problems, stored, strict=True)])
    whole = layout.unpack(problem_of(sum(widths), k, 64, True), joined)
    for name in stored[0]:
        assert torch.equal(whole[name], torch.cat([s[name] for s in stored])), name


CASES = ((False, False, 128), (True, False, 32), (False, True, 64))  # zeros, BF16, group
VARIANTS = [
    (planner, m, *case, capability)
    for planner, ms in ((stream_plan, (1, 9, 30)), (tile_plan, (16, 30, 64)), (cluster_plan, (1, 30)))
    for m in ms
    for case in CASES
    for capability in CAPABILITIES
    # the heavy cases on the two cards with figures of their own, the plain one everywhere: a compilation takes a second
    if (planner is not cluster_plan or capability == (9, 0))
    if (planner is not tile_plan or not case[0]) and (case == CASES[0] or capability in ((8, 6), (9, 0)))
]


@pytest.mark.parametrize(("planner", "m", "zeros", "bf16", "group", "capability"), VARIANTS)
def test_planned_variants_compile_without_spills_and_fit(planner, m, zeros, bf16, group, capability):
    seen = set()
    for n, k in ((37888, 3584), (5632, 2048), *([(3584, 18944)] if planner is cluster_plan else [])):
        shape = Shape(
            bits=4,
            n=n,
            k=k,
            group_size=group,
            zeros=zeros,
            bf16=bf16,
            sms=132 if capability == (9, 0) else 16,
            shared_limit=SHARED_LIMIT[capability],
        )
        plan = planner(shape, m)
        if plan.defines in seen:
            continue
        seen.add(plan.defines)
        assert plan.shared_bytes + 1024 <= SHARED_LIMIT[capability]
        source = CudaSource.make(mma_kernels.CSRC / f"{plan.kind}.cu", dict(plan.defines))
        compiled = compile_source(source, capability)
        assert_resources(
            compiled, plan.kind, threads=plan.threads, dynamic_shared=plan.shared_bytes, capability=capability
        )


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_decoder_compiles_without_spills(capability):
    for defines in ({}, {"GROUP": 32, "ZEROS": 1, "BF16": 1}):
        compiled = compile_source(CudaSource.make(mma_kernels.CSRC / "mma_dequantize.cu", defines), capability)
        assert_resources(compiled, "mma_dequantize", threads=128, dynamic_shared=0, capability=capability)


KERNELS = {
    "mma": (mma_kernels.mma, mma_kernels.mma_workspace),
    "stream": (mma_kernels.mma_stream, mma_kernels.mma_stream_workspace),
    "tile": (mma_kernels.mma_tile, mma_kernels.mma_tile_workspace),
    "cluster": (mma_kernels.mma_cluster, mma_kernels.mma_cluster_workspace),
    "decode": (mma_kernels.mma_decode_matmul, mma_kernels.mma_decode_workspace),
}


def run(kind, m, n, k, group, zeros, dtype=torch.float16, *, x=None, extras=False):
    if kind == "cluster" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("clusters are a matter of 9.0")
    make, bytes_of = KERNELS[kind]
    stored = stored_weights(n, k, group, zeros, "cuda")
    problem = problem_of(
        n, k, group, zeros, "cuda", capability=torch.cuda.get_device_capability(), act_dtype=str(dtype)[6:]
    )
    weights = mma_layout().pack(problem, stored)
    if x is None:
        x = torch.randn(m, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype) if extras else None
    residual = torch.randn(m, n, device="cuda", dtype=dtype) if extras else None
    workspace = torch.zeros(bytes_of(problem, max(m, 1)), dtype=torch.uint8, device="cuda")
    kernel = make(problem)
    outs = []
    for _ in range(2):
        out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        kernel(x, weights, out, bias=bias, residual=residual, workspace=workspace)
        outs.append(out)
    assert torch.equal(outs[0], outs[1]), "the same launch must give the same bits"
    assert not workspace[:TICKET_BYTES].any(), "arrival counters must be left at zero"
    expected = x.float() @ W4A16().dequantize(stored, k=k, group_size=group).t()
    if extras:
        expected = expected + bias.float() + residual.float()
    return outs[0].float(), expected


def assert_close(out, expected, bound):
    if out.numel():
        assert (out - expected).norm() <= bound * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KERNELS))
@pytest.mark.parametrize("m", [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 600])
def test_every_row_count_agrees_with_float32(kind, m):
    assert_close(*run(kind, m, 200, 4500 if kind == "cluster" else 1000, 128, False), 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KERNELS))
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (77, 333), (1, 8), (2080, 4336), (77, 4500)])
def test_every_group_zero_dtype_and_odd_shape_agrees_with_float32(kind, zeros, group, dtype, n, k):
    if kind == "tile" and zeros:
        pytest.skip("the tile kernel serves symmetric codes")
    bound = 2e-3 if dtype is torch.float16 else 1e-2
    for m in (3, 20):
        assert_close(*run(kind, m, n, k, group, zeros, dtype, extras=True), bound)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KERNELS))
def test_strided_and_unaligned_rows_are_read_where_they_are(kind):
    big = torch.randn(9, 2 * 512 + 3, device="cuda", dtype=torch.float16)
    for x in (big[:, :512], big[:, 1:513], big[2:3, 5:517]):
        assert_close(*run(kind, x.shape[0], 96, 512, 128, False, x=x), 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mma", "stream", "tile", "cluster"])
def test_sums_beyond_half_precision_cancel_exactly(kind):
    if kind == "cluster" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("clusters are a matter of 9.0")
    n, k = 16, 8192
    code = 7
    signs = torch.ones(n, k, dtype=torch.int8, device="cuda") * code
    signs[:, k // 2 :] = -code
    scale = 0.25  # a power of two: every FP32 sum is exact
    stored = {
        "packed": W4A16().pack(signs, zeros=False),
        "scales": torch.full((n, k // 128), scale, device="cuda", dtype=torch.float16),
    }
    problem = problem_of(n, k, 128, False, "cuda", capability=torch.cuda.get_device_capability())
    make, bytes_of = KERNELS[kind]
    workspace = torch.zeros(bytes_of(problem, 4), dtype=torch.uint8, device="cuda")
    x = torch.full((4, k), 16.0, device="cuda", dtype=torch.float16)
    out = torch.full((4, n), float("nan"), device="cuda", dtype=torch.float16)
    weights = mma_layout().pack(problem, stored)
    make(problem)(x, weights, out, workspace=workspace)
    assert not out.any()
    x[:, k // 2 :] = 0
    make(problem)(x, weights, out, workspace=workspace)
    assert torch.isinf(out).all()
