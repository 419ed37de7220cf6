"""Kernels that a config pins to ranges of M: what they name, and why one cannot serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from attrs import frozen

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import LinearKernelSpec, LinearProblem, MRange
from deepinfer_core.registry.catalog import Catalog, Registered
from deepinfer_core.registry.dispatch import FALLBACK
from deepinfer_core.registry.fit import clipped, kernel_misfit


@frozen(kw_only=True)
class Pin:
    """A kernel that the config names for a range of M; ``kernel`` is None for core's fallback."""

    m: MRange
    name: str
    kernel: Registered[LinearKernelSpec] | None


def read_pins(catalog: Catalog, problem: LinearProblem, kernels: Mapping[str, str]) -> tuple[Pin, ...]:
    """Read the pins that lie within M = 1..m_max and check that each can serve all of its range.

    Raises:
        SelectionError: A range that cannot be read or overlaps another, an unknown kernel, one of another scheme, or
            one that does not fit the problem (with the reason): what is named is never silently replaced.
    """
    section = f"[linear.{problem.scheme}] kernels"
    ranges: list[tuple[MRange, str]] = []
    for text, name in kernels.items():
        try:
            ranges.append((MRange.from_text(text), name))
        except ValueError as error:
            raise SelectionError(f"{section}: {error}") from None
    ranges.sort()
    for (m, name), (following, other) in pairwise(ranges):
        if following.lo <= m.hi:
            raise SelectionError(f"{section}: the ranges {m} ({name}) and {following} ({other}) overlap")
    pins = []
    for m, name in ranges:
        kernel = None if name == FALLBACK else catalog.kernel(name)
        if kernel is not None and kernel.spec.scheme != problem.scheme:
            mine = ", ".join(k.spec.name for k in catalog.kernels.values() if k.spec.scheme == problem.scheme)
            raise SelectionError(
                f"{section}: {name!r} serves scheme {kernel.spec.scheme!r}; kernels of {problem.scheme!r}: "
                f"{mine or 'none'}"
            )
        if m.lo > problem.m_max:
            continue
        part = clipped(m, problem.m_max)
        if kernel is not None:
            _check_serves(catalog, kernel, problem, part, section)
        pins.append(Pin(m=part, name=kernel.spec.name if kernel is not None else FALLBACK, kernel=kernel))
    return tuple(pins)


def pin_at(pins: Iterable[Pin], m: int) -> Pin | None:
    """Return the pin that holds M, if one does."""
    return next((pin for pin in pins if m in pin.m), None)


def _check_serves(
    catalog: Catalog, kernel: Registered[LinearKernelSpec], problem: LinearProblem, m: MRange, section: str
) -> None:
    label = f"{section}: {kernel.spec.name!r} ({kernel.origin}) is pinned to M = {m} for {problem.n} x {problem.k}"
    if not (m.lo in kernel.spec.m and m.hi in kernel.spec.m):
        raise SelectionError(f"{label} but serves M = {kernel.spec.m}")
    misfit = kernel_misfit(catalog, kernel, problem)
    if misfit is not None:
        raise SelectionError(f"{label} but cannot serve it: {misfit}")
