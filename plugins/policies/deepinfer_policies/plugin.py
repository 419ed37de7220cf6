"""What this distribution registers: five scheduling policies, by name."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_core.plugin_api import LaneSpec, PluginInfo, SchedulingPolicySpec, hookimpl

MAIN = (LaneSpec(name="main"),)

POLICIES = (
    SchedulingPolicySpec(
        name="serial",
        description="one lane; a cycle decodes all, then computes one prefill chunk",
        lanes=MAIN,
        options="deepinfer_policies.serial:SerialOptions",
        factory="deepinfer_policies.serial:Serial",
    ),
    SchedulingPolicySpec(
        name="dual_stream",
        description="two lanes: decodes go on while a prefill chunk runs beside them",
        lanes=(LaneSpec(name="decode", priority=1), LaneSpec(name="prefill", priority=0)),
        options="deepinfer_policies.dual_stream:DualStreamOptions",
        factory="deepinfer_policies.dual_stream:DualStream",
    ),
    SchedulingPolicySpec(
        name="mixed",
        description="one lane; decode rows and a prefill chunk share one forward",
        lanes=MAIN,
        options="deepinfer_policies.mixed:MixedOptions",
        factory="deepinfer_policies.mixed:Mixed",
    ),
    SchedulingPolicySpec(
        name="time_sliced",
        description="serial with a prefill slice of so many milliseconds",
        lanes=MAIN,
        options="deepinfer_policies.time_sliced:TimeSlicedOptions",
        factory="deepinfer_policies.time_sliced:TimeSliced",
    ),
    SchedulingPolicySpec(
        name="slo",
        description="the largest prefill chunk that holds ttft_ms, tpot_p95_ms and max_itl_ms together",
        lanes=MAIN,
        options="deepinfer_policies.slo:SloOptions",
        factory="deepinfer_policies.slo:SloPolicy",
    ),
)


@hookimpl
def deepinfer_plugin_info() -> PluginInfo:
    """Return who this plugin is."""
    return PluginInfo(name="policies")


@hookimpl
def deepinfer_scheduling_policies() -> Iterable[SchedulingPolicySpec]:
    """Return the policies."""
    return POLICIES
