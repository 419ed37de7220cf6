"""Problems for linear kernels and layouts, made from their descriptors, and what is under test in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import lcm
from typing import Any, TypeVar

import pytest
import torch
from attrs import evolve, frozen

from deepinfer_core.plugin_api import (
    DTYPES,
    Capability,
    CapabilityRange,
    Device,
    LinearBackend,
    LinearKernelSpec,
    LinearProblem,
    WeightLayoutSpec,
    WeightSchemeSpec,
)
from deepinfer_core.registry.catalog import Catalog, Registered
from deepinfer_core.registry.discovery import discover
from deepinfer_core.testing.pairs import pairwise_cases

T = TypeVar("T", LinearKernelSpec, WeightLayoutSpec, WeightSchemeSpec)

SHAPES = ((1, 8), (5, 1), (64, 1056), (77, 333), (130, 36), (257, 160))
"""(N, K): one feature, one input, K inside a group, odd both, one behind a tile, several groups and a short one."""

_UNKNOWN_CARD: Capability = (8, 0)


@frozen
class Case:
    """One problem, named so that a failure can be read.

    Attributes:
        problem: Without a capability: the card's own is put in when the test runs.
        residual: A residual is added by the kernel.
        ms: Row counts to run.
    """

    problem: LinearProblem
    residual: bool = False
    ms: tuple[int, ...] = ()

    def __str__(self) -> str:
        p = self.problem
        group = "" if p.group_size == 0 else f"-g{p.group_size}" + ("-zeros" if p.zeros else "")
        extras = ("-bias" if p.bias else "") + ("-residual" if self.residual else "")
        return f"{p.device}-{p.act_dtype}{group}-{p.n}x{p.k}{extras}"


def find_spec(kind: str, wanted: str | T, of_type: type[T], backends: Sequence[LinearBackend] = ()) -> T:
    """Return a descriptor as it is, or look its name up in backends and then among the installed plugins.

    Args:
        kind: ``"kernel"``, ``"layout"`` or ``"scheme"``.
        wanted: The descriptor or its name.
        of_type: The descriptor's class.
        backends: Searched first.

    Raises:
        SelectionError: Neither has the name.
    """
    if isinstance(wanted, of_type):
        return wanted
    for backend in backends:
        specs: tuple[T, ...] = getattr(backend, kind + "s")
        for spec in specs:
            if spec.name == wanted:
                return spec
    look_up: Callable[[str], Registered[T]] = getattr(_installed(), kind)
    assert isinstance(wanted, str), f"{wanted!r} is neither a name nor a {of_type.__name__}"
    return look_up(wanted).spec


def registered_names(kind: str, distribution: str) -> set[str]:
    """Return the names that an installed distribution registers: ``kind`` is ``"kernels"`` or ``"layouts"``."""
    entries: Mapping[str, Registered[Any]] = getattr(_installed(), kind)
    return {name for name, entry in entries.items() if entry.distribution == distribution}


def in_test(spec: T) -> Registered[T]:
    """Return a descriptor as if a plugin had registered it."""
    return Registered(spec=spec, backend=None, distribution="the plugin under test", version="")


def groups_of(scheme: WeightSchemeSpec) -> tuple[int, ...]:
    """Return the group sizes of a scheme; (0,) when it has no groups."""
    return scheme.group_sizes or (0,)


def cases_for(
    scheme: WeightSchemeSpec,
    *,
    devices: Sequence[Device],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    m_max: int,
    fits: Callable[[LinearProblem], bool],
    groups: Sequence[int] | None = None,
    zeros: bool = True,
    extras: Sequence[tuple[bool, bool]] = ((False, False),),
    row_counts: Sequence[tuple[int, ...]] = ((),),
) -> list[Case]:
    """Return cases in which every two values of device, dtype, group, zeros, shape, extras and row counts meet.

    Args:
        scheme: Says which group sizes there are and whether zeros.
        devices: Where to run.
        dtypes: Activation dtypes.
        shapes: (N, K).
        m_max: Rows that will be launched.
        fits: Whether a problem can be served at all.
        groups: Group sizes; the scheme's own when None.
        zeros: With and without zeros where the scheme has them; False for without alone.
        extras: (bias, residual).
        row_counts: What a case runs.
    """
    axes: Mapping[str, Sequence[Any]] = {
        "device": devices,
        "dtype": tuple(dtype for dtype in DTYPES if dtype in dtypes),
        "group": groups_of(scheme) if groups is None else groups,
        "zeros": (False, True) if zeros and scheme.zeros else (False,),
        "shape": tuple(dict.fromkeys(shapes)),
        "extras": extras,
        "ms": row_counts,
    }

    def case_of(values: dict[str, Any]) -> Case:
        n, k = values["shape"]
        bias, residual = values["extras"]
        problem = LinearProblem(
            n=n,
            k=k,
            m_max=m_max,
            device=values["device"],
            act_dtype=values["dtype"],
            scheme=scheme.name,
            group_size=values["group"],
            zeros=values["zeros"],
            bias=bias,
        )
        return Case(problem, residual, values["ms"])

    asked: dict[tuple[Any, ...], bool] = {}

    def served(values: dict[str, Any]) -> bool:
        key = tuple(value for name, value in values.items() if name != "ms")
        if key not in asked:
            asked[key] = fits(case_of(values).problem)
        return asked[key]

    chosen = pairwise_cases(axes, served)
    return [case_of(values) for values in chosen]


def rounded_shapes(
    shapes: Sequence[tuple[int, int]], *, n_multiple: int, k_multiple: int, whole_groups: int
) -> tuple[tuple[int, int], ...]:
    """Return shapes with N and K rounded up to what a kernel takes; ``whole_groups`` is 1 where a short one is."""
    step = lcm(k_multiple, whole_groups)
    return tuple(dict.fromkeys((-(-n // n_multiple) * n_multiple, -(-k // step) * step) for n, k in shapes))


def with_stand_in_card(problem: LinearProblem, cards: CapabilityRange | None) -> LinearProblem:
    """Return the problem on the lowest card of a range: fit is asked where no card is."""
    if problem.device == "cpu":
        return problem
    return evolve(problem, capability=_UNKNOWN_CARD if cards is None else cards.lo)


def on_this_machine(problem: LinearProblem, name: str, cards: CapabilityRange | None = None) -> LinearProblem:
    """Return the problem with the card's capability; skip the test, with the reason, where it cannot run."""
    if problem.device == "cpu":
        return problem
    if not torch.cuda.is_available():
        pytest.skip("no CUDA card that torch can use")
    found = torch.cuda.get_device_capability()
    if cards is not None and found not in cards:
        pytest.skip(f"{name} needs {cards}, this card is sm_{found[0]}{found[1]}")
    return evolve(problem, capability=found)


def parametrize(metafunc: pytest.Metafunc, name: str, cases: Callable[[], Sequence[Case]]) -> None:
    """Give a suite's test its cases, grouped by case so that weights are packed once; CUDA ones are marked gpu."""
    if name in metafunc.fixturenames:
        marked = [
            pytest.param(case, id=str(case), marks=[pytest.mark.gpu] if case.problem.device == "cuda" else [])
            for case in cases()
        ]
        metafunc.parametrize(name, marked, scope="class")


def class_name(name: str) -> str:
    """Return a test class's name for a descriptor: ``TestW4a16RowsV1`` for ``w4a16.rows.v1``."""
    return "Test" + "".join(part.capitalize() for part in re.split(r"[^0-9A-Za-z]+", name))


def sample_weight(n: int, k: int, device: str) -> torch.Tensor:
    """Return float32 ``[N, K]`` of about 1 / sqrt(K), so that products are about 1; with rows that are special.

    Row 1 is zero, row 2 is -0.0, row 3 has the tiniest FP16 numbers and row 4 one outlier.
    """
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(7 * n + k)) / k**0.5
    special = (0.0, -0.0, 2.0**-24)
    for row, value in enumerate(special, start=1):
        weight[row : row + 1] = value
    weight[4:5, k // 2] *= 20
    on_device: torch.Tensor = weight.to(device)
    return on_device


@cache
def _installed() -> Catalog:
    return Catalog.from_discovery(discover())
