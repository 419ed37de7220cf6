"""Hard fit: whether a kernel or a layout can serve a problem at all, and the reason when it cannot."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_core.errors import PluginError
from deepinfer_core.plugin_api import (
    Capability,
    CapabilityRange,
    LinearKernelSpec,
    LinearProblem,
    MRange,
    WeightLayoutSpec,
)
from deepinfer_core.registry.catalog import Catalog, Registered, load_factory


def kernel_misfit(catalog: Catalog, kernel: Registered[LinearKernelSpec], problem: LinearProblem) -> str | None:
    """Return why a kernel cannot serve a problem at any M, or None when it can.

    The author's own predicate is asked last, when everything that is declared already fits.
    """
    spec = kernel.spec
    reason = (
        _device_misfit(spec.device, spec.capability, problem)
        or _one_of("activation dtype", problem.act_dtype, spec.act_dtypes)
        or _group_misfit(spec, problem)
        or _shape_misfit(spec, problem)
        or _one_of("epilogue", problem.epilogue, spec.epilogues)
    )
    if reason is not None:
        return reason
    if spec.m.lo > problem.m_max:
        return f"serves M = {spec.m}, the batched-token limit is {problem.m_max}"
    layout = catalog.layouts.get(spec.layout)
    if layout is None:
        return f"reads layout {spec.layout!r}, which no installed plugin registers"
    misfit = layout_misfit(layout.spec, problem)
    if misfit is not None:
        return f"its layout {spec.layout!r} {misfit}"
    return _predicate_misfit(kernel, problem)


def layout_misfit(layout: WeightLayoutSpec, problem: LinearProblem) -> str | None:
    """Return why a layout cannot hold a problem's weights, or None when it can."""
    if layout.scheme != problem.scheme:
        return f"holds scheme {layout.scheme!r}, not {problem.scheme!r}"
    return _one_of("device", problem.device, layout.devices) or _one_of(
        "activation dtype", problem.act_dtype, layout.act_dtypes
    )


def capability_text(capability: Capability | None) -> str:
    """Return a compute capability as messages print it."""
    return "a CUDA device of unknown capability" if capability is None else f"sm_{capability[0]}{capability[1]}"


def clipped(m: MRange, m_max: int) -> MRange:
    """Return the part of a range that lies in 1..m_max; ``m.lo`` must."""
    return MRange(m.lo, min(m.hi, m_max))


def _device_misfit(device: str, capability: CapabilityRange | None, problem: LinearProblem) -> str | None:
    if device != problem.device:
        return f"runs on {device}, asked for {problem.device}"
    if device == "cuda" and capability is not None and problem.capability not in capability:
        return f"needs {capability}, asked for {capability_text(problem.capability)}"
    return None


def _group_misfit(spec: LinearKernelSpec, problem: LinearProblem) -> str | None:
    if spec.group_sizes is not None and problem.group_size not in spec.group_sizes:
        return f"serves group sizes {_listed(spec.group_sizes)}, asked for {problem.group_size}"
    if problem.zeros and not spec.zeros:
        return "does not serve layers that store zeros"
    if problem.short_last_group and not spec.short_last_group:
        return f"needs K to be a multiple of the group: K = {problem.k}, group {problem.group_size}"
    return None


def _shape_misfit(spec: LinearKernelSpec, problem: LinearProblem) -> str | None:
    if problem.n % spec.n_multiple_of:
        return f"needs N to be a multiple of {spec.n_multiple_of}, asked for N = {problem.n}"
    if problem.k % spec.k_multiple_of:
        return f"needs K to be a multiple of {spec.k_multiple_of}, asked for K = {problem.k}"
    return None


def _one_of(what: str, value: str, allowed: Iterable[str]) -> str | None:
    options = tuple(allowed)
    return None if value in options else f"serves {what} {_listed(options)}, asked for {value}"


def _predicate_misfit(kernel: Registered[LinearKernelSpec], problem: LinearProblem) -> str | None:
    if kernel.spec.predicate is None:
        return None
    try:
        reason = load_factory(kernel.spec.predicate, kernel)(problem)
    except PluginError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return f"its predicate {kernel.spec.predicate!r} raised {type(error).__name__}: {error}"
    if reason is None or isinstance(reason, str):
        return reason
    return f"its predicate {kernel.spec.predicate!r} returned {reason!r}; a reason or None was expected"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values) or "none"
