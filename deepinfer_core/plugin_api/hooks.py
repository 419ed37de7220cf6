"""The four hooks of a deepinfer plugin. Each returns plain data; factories are named and imported when chosen."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy
from attrs import field, frozen

from deepinfer_core.plugin_api.attention import AttentionBackendSpec
from deepinfer_core.plugin_api.linear import LinearBackend
from deepinfer_core.plugin_api.scheduling import SchedulingPolicySpec
from deepinfer_core.plugin_api.values import API_VERSION

PROJECT = "deepinfer"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation: ``@hookimpl`` above ``def deepinfer_linear_backends()``."""


@frozen(kw_only=True)
class PluginInfo:
    """Who a plugin is.

    Attributes:
        name: Shown in listings; compared after normalization (lower case; ``-``, ``_`` and ``.`` alike).
        api_version: The contract it was written for: ``(1, 0)``.
    """

    name: str
    api_version: tuple[int, int] = field(default=API_VERSION)


@hookspec
def deepinfer_plugin_info() -> PluginInfo:  # type: ignore[empty-body]
    """Return the plugin's name and the API version it was written for. Required."""


@hookspec
def deepinfer_linear_backends() -> Iterable[LinearBackend]:  # type: ignore[empty-body]
    """Return weight schemes, layouts, kernels and recipes, bundled under the names that a config selects."""


@hookspec
def deepinfer_attention_backends() -> Iterable[AttentionBackendSpec]:  # type: ignore[empty-body]
    """Return attention backends; ``[attention] backend`` in a config selects one by name."""


@hookspec
def deepinfer_scheduling_policies() -> Iterable[SchedulingPolicySpec]:  # type: ignore[empty-body]
    """Return scheduling policies; ``[scheduler] policy`` in a config selects one by name."""
