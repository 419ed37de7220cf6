"""What this distribution registers: scheme w4a16, its layouts, its kernels, the recipe `w4`."""

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
    TensorSpec,
    WeightLayoutSpec,
    WeightSchemeSpec,
    hookimpl,
)


@hookimpl
def deepinfer_plugin_info() -> PluginInfo:
    """Name the plugin and the contract it was written for."""
    return PluginInfo(name="w4a16", api_version=(1, 0))


@hookimpl
def deepinfer_linear_backends() -> list[LinearBackend]:
    """Return the one backend of this distribution."""
    return [
        LinearBackend(
            name="w4a16",
            schemes=(scheme(),),
            layouts=layouts(),
            kernels=(*cpu_kernels(), *row_kernels(), *dequantize_kernels()),
            recipes=(recipe(),),
        )
    ]


def scheme() -> WeightSchemeSpec:
    """Return the weight format."""
    return WeightSchemeSpec(
        name="w4a16",
        bits=4,
        tensors=(
            TensorSpec(name="packed", dtype="uint8", per=2),
            TensorSpec(name="scales", dtype="float16", per="group"),
            TensorSpec(name="zeros", dtype="float16", per="group", needs_zeros=True),
        ),
        group_sizes=(32, 64, 128, WHOLE_ROW),
        zeros=True,
        factory="deepinfer_w4a16.scheme:W4A16",
    )


def layouts() -> tuple[WeightLayoutSpec, ...]:
    """Return the resident forms of the weights."""
    return (
        WeightLayoutSpec(
            name="w4a16.rows.v1",
            scheme="w4a16",
            devices=("cuda", "cpu"),
            factory="deepinfer_w4a16.rows_layout:rows_layout",
        ),
    )


def cpu_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return the kernels made for CPUs."""
    return ()


def row_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return the first system's kernels over canonical rows: M = 1, 2..8 and above; readable references."""
    forms = (("gemv", MRange(1, 1)), ("batch_tile_gemv", MRange(2, 8)), ("tiled_gemm", MRange(9)))
    return tuple(
        LinearKernelSpec(
            name=f"w4a16.{form}",
            scheme="w4a16",
            layout="w4a16.rows.v1",
            device="cuda",
            m=m,
            capability=CapabilityRange(lo=(8, 0)),
            epilogues=("none", "residual"),
            priority=10,
            factory=f"deepinfer_w4a16.row_kernels:{form}",
        )
        for form, m in forms
    )


def dequantize_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return dequantize + matmul over the canonical rows: any shape, any M, any dtype."""
    return (
        LinearKernelSpec(
            name="w4a16.dequantize_matmul_cpu",
            scheme="w4a16",
            layout="w4a16.rows.v1",
            device="cpu",
            act_dtypes=DTYPES,
            epilogues=("none", "residual"),
            priority=-20,
            factory="deepinfer_w4a16.dequantize_matmul:from_rows",
        ),
        LinearKernelSpec(
            name="w4a16.dequantize_matmul",
            scheme="w4a16",
            layout="w4a16.rows.v1",
            device="cuda",
            act_dtypes=DTYPES,
            epilogues=("none", "residual"),
            priority=-50,
            factory="deepinfer_w4a16.dequantize_matmul:from_rows",
        ),
    )


def recipe() -> QuantizationRecipe:
    """Return the recipe that makes every linear of the decoder layers W4."""
    return QuantizationRecipe(
        name="w4",
        description="every linear of the decoder layers in 4 bits; embeddings, norms and the head stay as they are",
        rules=(RecipeRule(pattern="model.layers.*", scheme="w4a16"),),
    )
