"""What this distribution registers: the dense scheme `fp16`, its layout and kernels, and attention backends."""

from __future__ import annotations

from deepinfer_core.plugin_api import (
    DTYPES,
    AttentionBackendSpec,
    LinearBackend,
    LinearKernelSpec,
    PluginInfo,
    TensorSpec,
    WeightLayoutSpec,
    WeightSchemeSpec,
    hookimpl,
)


@hookimpl
def deepinfer_plugin_info() -> PluginInfo:
    """Name the plugin and the contract it was written for."""
    return PluginInfo(name="fp16", api_version=(1, 0))


@hookimpl
def deepinfer_linear_backends() -> list[LinearBackend]:
    """Return the one linear backend of this distribution."""
    return [LinearBackend(name="fp16", schemes=(scheme(),), layouts=layouts(), kernels=matmul_kernels())]


@hookimpl
def deepinfer_attention_backends() -> list[AttentionBackendSpec]:
    """Return the attention backends of this distribution."""
    return attention_backends()


def scheme() -> WeightSchemeSpec:
    """Return the weight format."""
    return WeightSchemeSpec(
        name="fp16",
        bits=16,
        tensors=(TensorSpec(name="weight", dtype="act"),),
        factory="deepinfer_fp16.scheme:Dense",
    )


def layouts() -> tuple[WeightLayoutSpec, ...]:
    """Return the resident forms of the weights."""
    return (
        WeightLayoutSpec(
            name="fp16.rows.v1",
            scheme="fp16",
            devices=("cuda", "cpu"),
            factory="deepinfer_fp16.rows_layout:DenseRows",
            lossless=False,  # rounds to the act dtype; a checkpoint may hold a wider one
        ),
    )


def matmul_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return torch's matmul for cards and CPUs."""
    return (
        LinearKernelSpec(
            name="fp16.matmul",
            scheme="fp16",
            layout="fp16.rows.v1",
            device="cuda",
            act_dtypes=DTYPES,
            epilogues=("none", "residual"),
            factory="deepinfer_fp16.matmul:Matmul",
        ),
        LinearKernelSpec(
            name="fp16.matmul_cpu",
            scheme="fp16",
            layout="fp16.rows.v1",
            device="cpu",
            act_dtypes=DTYPES,
            epilogues=("none", "residual"),
            factory="deepinfer_fp16.matmul:Matmul",
        ),
    )


def attention_backends() -> list[AttentionBackendSpec]:
    """Return the attention backends."""
    return [sdpa()]


def sdpa() -> AttentionBackendSpec:
    """Return torch's attention: any device, any page size, any head width."""
    return AttentionBackendSpec(
        name="sdpa",
        devices=("cpu", "cuda"),
        factory="deepinfer_fp16.sdpa:SdpaAttention",
        act_dtypes=DTYPES,
        kv_dtypes=(*DTYPES, "int8"),
        features=("mixed_batch", "sliding_window"),
    )
