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
            layouts=layouts(),
            kernels=(*cpu_kernels(), *row_kernels(), *dequantize_kernels()),
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
    )


def cpu_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return the kernels made for CPUs."""
    return ()


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
    """Return the recipes that make W3 layers."""
    return (
        QuantizationRecipe(
            name="w3",
            description="every linear of the decoder layers in 3 bits; embeddings, norms and the head stay as they are",
            rules=(RecipeRule(pattern="model.layers.*", scheme="w3a16"),),
        ),
        QuantizationRecipe(
            name="mixed",
            description="attention in 4 bits, MLP in 3; embeddings, norms and the head stay as they are",
            rules=(
                RecipeRule(pattern="model.layers.*.self_attn.*", scheme="w4a16"),
                RecipeRule(pattern="model.layers.*.mlp.*", scheme="w3a16"),
            ),
        ),
    )
