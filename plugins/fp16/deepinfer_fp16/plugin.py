"""What this distribution registers: the dense scheme `fp16`, its layout and kernels, and attention backends."""

from __future__ import annotations

from deepinfer_core.plugin_api import (
    DTYPES,
    AttentionBackendSpec,
    CapabilityRange,
    LinearBackend,
    LinearKernelSpec,
    MRange,
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
    return [
        LinearBackend(name="fp16", schemes=(scheme(),), layouts=layouts(), kernels=(*matmul_kernels(), *half_kernels()))
    ]


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
        WeightLayoutSpec(
            name="fp16.half_cpu.v1",
            scheme="fp16",
            devices=("cpu",),
            act_dtypes=("bfloat16",),
            factory="deepinfer_fp16.half_cpu:HalfCpuLayout",
            lossless=False,  # rounds BF16's and float32's exponents and float32's mantissas to FP16's
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
        # torch's 16-bit products on a CPU grow with M from the first row on; float32 chunks do not. Milliseconds of
        # one thread at 576 x 1536, torch / chunks: M = 4 1.4 / 1.5, 8 2.7 / 1.7, 16 5.2 / 2.2; with two threads
        # M = 512 83 / 16 (AVX2 EPYC, torch 2.13, 2026-11-30).
        LinearKernelSpec(
            name="fp16.chunked_matmul_cpu",
            scheme="fp16",
            layout="fp16.rows.v1",
            device="cpu",
            m=MRange(5),
            act_dtypes=("float16", "bfloat16"),
            epilogues=("none", "residual"),
            priority=10,
            float32_out=True,
            factory="deepinfer_fp16.matmul:from_rows",
        ),
    )


def half_kernels() -> tuple[LinearKernelSpec, ...]:
    """Return the kernels over FP16 rows, for a large head under BF16 activations on a CPU.

    Milliseconds of one thread at 49152 x 576, BF16 / FP16 / float32 chunks over FP16: M = 1 11.8 / 10.0 / 36,
    4 45 / 37 / 47, 5 55 / 46 / 44, 16 178 / 149 / 77. With two threads M = 1 took 5.9 / 4.8; float32 took 7.3, int8,
    which loses accuracy, 4.1 (AVX2 EPYC, torch 2.13, 2026-11-30).
    """
    return (
        LinearKernelSpec(
            name="fp16.half_cpu",
            scheme="fp16",
            layout="fp16.half_cpu.v1",
            device="cpu",
            m=MRange(1, 4),
            act_dtypes=("bfloat16",),
            epilogues=("none", "residual"),
            priority=20,
            predicate="deepinfer_fp16.half_cpu_fit:misfit",
            float32_out=True,
            factory="deepinfer_fp16.half_cpu:HalfCpuMatmul",
        ),
        LinearKernelSpec(
            name="fp16.half_cpu_chunked",
            scheme="fp16",
            layout="fp16.half_cpu.v1",
            device="cpu",
            act_dtypes=("bfloat16",),
            epilogues=("none", "residual"),
            priority=15,
            predicate="deepinfer_fp16.half_cpu_fit:misfit",
            float32_out=True,
            factory="deepinfer_fp16.half_cpu:from_half",
        ),
    )


def attention_backends() -> list[AttentionBackendSpec]:
    """Return the attention backends."""
    return [sdpa(), paged()]


def paged() -> AttentionBackendSpec:
    """Return the native kernels over pages; by name only until they have been run on a card."""
    return AttentionBackendSpec(
        name="paged",
        devices=("cuda",),
        factory="deepinfer_fp16.paged:PagedAttention",
        capability=CapabilityRange(lo=(8, 0)),
        act_dtypes=("float16", "bfloat16"),
        kv_dtypes=("float16", "bfloat16", "int8"),
        page_sizes=tuple(range(16, 257, 16)),
        head_dims=(64, 96, 128),
        features=("mixed_batch", "sliding_window"),
        graph_safe=True,
        priority=20,
        stability="experimental",
    )


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
