"""What the package registers: one kernel, for somebody else's scheme and layout."""

from __future__ import annotations

from deepinfer_core.plugin_api import LinearBackend, LinearKernelSpec, MRange, PluginInfo, hookimpl


@hookimpl
def deepinfer_plugin_info() -> PluginInfo:
    """Name the plugin and the contract it was written for."""
    return PluginInfo(name="acme-w4", api_version=(1, 0))


@hookimpl
def deepinfer_linear_backends() -> list[LinearBackend]:
    """Return the backend that a config selects by name."""
    gemv = LinearKernelSpec(
        name="acme-w4.gemv",
        scheme="w4a16",
        layout="w4a16.rows.v1",
        device="cpu",
        m=MRange(1, 1),
        act_dtypes=("float32",),
        short_last_group=False,
        k_multiple_of=2,
        priority=10,
        factory="acme_w4.gemv:Gemv",
    )
    return [LinearBackend(name="acme-w4", kernels=(gemv,))]
