"""What this distribution registers: scheme w3a16, its layouts, its kernels, the recipes `w3` and `mixed`."""

from __future__ import annotations

from deepinfer_core.plugin_api import (
    DTYPES,
    WHOLE_ROW,
    CapabilityRange,
    LinearBackend,
    LinearKernelSpec,
    MRange,
    PluginInfo,
    QuantizationRecipe,
    RecipeRule,
    Stability,
    TensorSpec,
    WeightLayoutSpec,
    WeightSchemeSpec,
    hookimpl,
)
from deepinfer_w3a16.mma_specs import mma_kernels, mma_layouts


@hookimpl
def deepinfer_plugin_info() -> PluginInfo:
    """Name the plugin and the contract it was written for."""
    return PluginInfo(name="w3a16", api_version=(1, 0))


@hookimpl
def deepinfer_linear_backends() -> list[LinearBackend]:
    """Return the one backend of this distribution."""
    return [
        LinearBackend(
            name="w3a16",
            schemes=(scheme(),),
            layouts=(*layouts(), *mma_layouts()),
            kernels=(*cpu_kernels(), *mma_kernels(), *row_kernels(), *dequantize_kernels()),
            recipes=recipes(),
        )
    ]


def scheme() -> WeightSchemeSpec:
    """Return the weight format."""
    return WeightSchemeSpec(
        name="w3a16",
        bits=3,
        tensors=(
            TensorSpec(name="packed", dtype="uint8", per=8, elements=3),
            TensorSpec(name="scales", dtype="float16", per="group"),
            TensorSpec(name="zeros", dtype="float16", per="group", needs_zeros=True),
        ),
        group_sizes=(32, 64, 128, WHOLE_ROW),
        zeros=True,
        factory="deepinfer_w3a16.scheme:W3A16",
    )


def layouts() -> tuple[WeightLayoutSpec, ...]:
    """Return the resident forms of the weights."""
    return (
        WeightLayoutSpec(
            name="w3a16.rows.v1",
            scheme="w3a16",
            devices=("cuda", "cpu"),
            factory="deepinfer_w3a16.rows_layout:rows_layout",
        ),
        WeightLayoutSpec(
            name="w3a16.int4cpu.v1",
            scheme="w3a16",
            devices=("cpu",),
            act_dtypes=("bfloat16",),
            lossless=False,  # scales are rounded to BF16
            factory="deepinfer_w3a16.int4_cpu:int4_layout",
        ),
    )


def cpu_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return torch's int4 matmul and, above the rows that it is good at, dequantize + matmul over the same bytes.

    Milliseconds of one thread at 3072 x 576, int4 / dequantize: M = 1 0.5 / 4.8, 32 7.6 / 9.8, 48 11.3 / 10.9,
    128 30 / 21, 512 119 / 63; at 576 x 1536 they meet at 48 as well (AVX2 EPYC, torch 2.13, 2026-11-30).
    """
    return (
        LinearKernelSpec(
            name="w3a16.int4_cpu",
            scheme="w3a16",
            layout="w3a16.int4cpu.v1",
            device="cpu",
            m=MRange(1, 48),
            act_dtypes=("bfloat16",),
            epilogues=("none", "residual"),
            priority=50,
            predicate="deepinfer_core.kernels.int4_cpu_fit:misfit",
            factory="deepinfer_core.kernels.int4_cpu:Int4CpuMatmul",
        ),
        LinearKernelSpec(
            name="w3a16.int4_cpu_dequantize",
            scheme="w3a16",
            layout="w3a16.int4cpu.v1",
            device="cpu",
            act_dtypes=("bfloat16",),
            epilogues=("none", "residual"),
            priority=40,
            predicate="deepinfer_core.kernels.int4_cpu_fit:misfit",
            factory="deepinfer_w3a16.int4_cpu:from_int4",
        ),
    )


def row_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return the first system's kernels over canonical rows: M = 1..8 with grid.y = batch, and above.

    The batch tile is experimental: there eight accumulators cost more occupancy than the shared weight read saved
    (0.48x to 0.53x of grid.y = batch on the first system's RTX 3050 laptop card).
    """
    forms: tuple[tuple[str, MRange, Stability], ...] = (
        ("gemv", MRange(1, 8), "stable"),
        ("batch_tile_gemv", MRange(2, 8), "experimental"),
        ("tiled_gemm", MRange(9), "stable"),
    )
    return tuple(
        LinearKernelSpec(
            name=f"w3a16.{form}",
            scheme="w3a16",
            layout="w3a16.rows.v1",
            device="cuda",
            m=m,
            capability=CapabilityRange(lo=(8, 0)),
            epilogues=("none", "residual"),
            priority=10 if stability == "stable" else 5,
            stability=stability,
            factory=f"deepinfer_w3a16.row_kernels:{form}",
        )
        for form, m, stability in forms
    )


def dequantize_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return dequantize + matmul over the canonical rows: any shape, any M, any dtype."""
    return (
        LinearKernelSpec(
            name="w3a16.dequantize_matmul_cpu",
            scheme="w3a16",
            layout="w3a16.rows.v1",
            device="cpu",
            act_dtypes=DTYPES,
            epilogues=("none", "residual"),
            priority=-20,
            factory="deepinfer_w3a16.dequantize_matmul:from_rows",
        ),
        LinearKernelSpec(
            name="w3a16.dequantize_matmul",
            scheme="w3a16",
            layout="w3a16.rows.v1",
            device="cuda",
            act_dtypes=DTYPES,
            epilogues=("none", "residual"),
            priority=-50,
            factory="deepinfer_w3a16.dequantize_matmul:from_rows",
        ),
    )


def recipes() -> tuple[QuantizationRecipe, ...]:
    """Return the recipes that make W3 layers, without zeros whatever the source has.

    That saves half a bit a weight in groups of 32. Times the GGUF's perplexity (SmolLM2-135M, 520 tokens of prose,
    2026-11-30), without and with zeros: `mixed` 1.53 and 1.48, `w3` 1.98 and 2.48.
    """
    return (
        QuantizationRecipe(
            name="w3",
            description="every linear of the decoder layers in 3 bits; embeddings, norms and the head stay as they are",
            rules=(RecipeRule(pattern="model.layers.*", scheme="w3a16", zeros=False),),
        ),
        QuantizationRecipe(
            name="mixed",
            description="attention in 4 bits, MLP in 3; embeddings, norms and the head stay as they are",
            rules=(
                RecipeRule(pattern="model.layers.*.self_attn.*", scheme="w4a16"),
                RecipeRule(pattern="model.layers.*.mlp.*", scheme="w3a16", zeros=False),
            ),
        ),
    )
