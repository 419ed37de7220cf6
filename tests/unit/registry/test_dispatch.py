"""The table from M to kernel, and binding a kernel to a problem."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from deepinfer_core.errors import KernelError, PluginError
from deepinfer_core.plugin_api import MRange
from deepinfer_core.registry.catalog import Registered
from deepinfer_core.registry.dispatch import DispatchRow, DispatchTable, fallback_spec, make_kernel, timing_name


def row(build: Any, lo: int, hi: int) -> DispatchRow:
    kernel = Registered(spec=build.kernel(f"w.{lo}"), backend="w", distribution="d", version="1")
    return DispatchRow(m=MRange(lo, hi), kernel=kernel, why="only candidate")


@pytest.mark.parametrize("m", [0, -1, 9, 1 << 40])
def test_an_m_outside_the_table_is_an_error_that_names_the_range(build: Any, m: int) -> None:
    table = DispatchTable((row(build, 1, 1), row(build, 2, 8)))
    with pytest.raises(KernelError, match=rf"M = {m} .* covers M = 1\.\.8"):
        table.kernel_for(m)


@pytest.mark.parametrize("bounds", [((2, 8),), ((1, 2), (4, 8)), ((1, 4), (4, 8)), ()])
def test_gaps_and_overlaps_are_our_own_fault(build: Any, bounds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError):
        DispatchTable(tuple(row(build, lo, hi) for lo, hi in bounds))


def test_only_the_fallback_gets_the_layout(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake_kernels")
    module.__dict__["Kernel"] = lambda *arguments: arguments
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    problem, layout = build.problem(), object()
    spec = build.kernel(factory="fake_kernels:Kernel")
    made: Any = make_kernel(Registered(spec=spec, backend="w", distribution="d", version="1"), problem, layout)  # type: ignore[arg-type]
    assert made == (problem,)
    monkeypatch.setattr("deepinfer_core.registry.dispatch.FALLBACK_FACTORY", "fake_kernels:Kernel")
    fallback: Any = make_kernel(Registered.by_core(fallback_spec(build.layout(), problem)), problem, layout)  # type: ignore[arg-type]
    assert fallback == (problem, layout)


def test_the_fallback_is_measured_per_layout(build: Any) -> None:
    names = {timing_name(fallback_spec(build.layout(name), build.problem())) for name in ("w.v1", "w.v2")}
    assert len(names) == 2
    assert timing_name(build.kernel("w.k")) == "w.k"


def test_a_factory_that_fails_is_named_with_its_distribution_and_cause(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("fake_kernels")
    module.__dict__.update(Broken=lambda problem: 1 / 0, Nothing=lambda problem: None)
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    cases = {
        "fake_kernels:Broken": "ZeroDivisionError",
        "fake_kernels:Nothing": "None",
        "fake_kernels:X": "has no attribute",
    }
    for factory, cause in cases.items():
        kernel = Registered(spec=build.kernel(factory=factory), backend="w", distribution="acme", version="2.0")
        with pytest.raises(PluginError, match=rf"acme 2\.0.*{cause}"):
            make_kernel(kernel, build.problem(), object())  # type: ignore[arg-type]
