"""What holds for any set of kernels: order decides nothing, the table covers every M once, bisect is a scan."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import LinearBackend, LinearKernelSpec, MRange
from deepinfer_core.registry.choice import LinearChoice
from deepinfer_core.registry.dispatch import DispatchTable
from deepinfer_core.registry.select import Selection, select_linear
from deepinfer_core.registry.tuning import Timing, Timings, problem_key

M_LIMIT = 40
LAYOUTS = ("w.v1", "w.v2")

ranges = st.tuples(st.integers(1, 30), st.integers(0, 30)).map(lambda t: MRange(t[0], t[0] + t[1]))


@st.composite
def kernels(draw: st.DrawFn) -> list[LinearKernelSpec]:
    count = draw(st.integers(0, 6))
    return [
        LinearKernelSpec(
            name=f"w.k{index}",
            scheme="w",
            layout=draw(st.sampled_from(LAYOUTS)),
            device="cuda",
            factory="fake:K",
            m=draw(ranges),
            priority=draw(st.integers(0, 2)),
            stability=draw(st.sampled_from(["stable", "stable", "experimental"])),
            act_dtypes=draw(st.sampled_from([("float16",), ("float16",), ("bfloat16",)])),
        )
        for index in range(count)
    ]


@st.composite
def timings(draw: st.DrawFn, specs: list[LinearKernelSpec], key: str) -> Timings:
    entries = [
        Timing(problem=key, kernel=spec.name, version="1.0", m=m, us=draw(st.floats(1, 100)))
        for spec in specs
        for m in draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), unique=True, max_size=3))
    ]
    return Timings("card", tuple(entries))


def outcome(build: Any, specs: list[LinearKernelSpec], choice: LinearChoice, times: Timings) -> Any:
    layouts = tuple(build.layout(name) for name in LAYOUTS)
    found = build.catalog(
        build.plugin("w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=layouts, kernels=tuple(specs)))
    )
    try:
        return select_linear(found, build.problem(m_max=M_LIMIT), choice, times)
    except SelectionError as error:
        return sorted(str(error).splitlines())


@settings(deadline=None)  # a busy machine is no fault of the code
@given(data=st.data(), specs=kernels(), strict=st.booleans(), experimental=st.booleans())
def test_registration_order_never_decides(
    build: Any, data: st.DataObject, specs: list[LinearKernelSpec], strict: bool, experimental: bool
) -> None:
    choice = LinearChoice(strict=strict, allow_experimental=experimental)
    times = data.draw(timings(specs, problem_key(build.problem())))
    shuffled = data.draw(st.permutations(specs))
    reordered = Timings("card", tuple(data.draw(st.permutations(times.entries))))
    assert outcome(build, specs, choice, times) == outcome(build, shuffled, choice, reordered)


@settings(deadline=None)  # a busy machine is no fault of the code
@given(data=st.data(), specs=kernels(), experimental=st.booleans())
def test_the_table_covers_every_m_exactly_once_with_a_kernel_that_serves_it(
    build: Any, data: st.DataObject, specs: list[LinearKernelSpec], experimental: bool
) -> None:
    times = data.draw(timings(specs, problem_key(build.problem())))
    found = outcome(build, specs, LinearChoice(allow_experimental=experimental), times)
    if not isinstance(found, Selection):
        assert any(" tie at M = " in line for line in found)  # the only way to fail when a fallback is allowed
        return
    covered = [m for row in found.table.rows for m in range(row.m.lo, row.m.hi + 1)]
    assert covered == list(range(1, M_LIMIT + 1))
    for row in found.table.rows:
        assert row.m.lo in row.kernel.spec.m
        assert row.m.hi in row.kernel.spec.m
        assert row.kernel.spec.layout == found.layout.spec.name
        serving = [k for k in specs if k.layout == found.layout.spec.name and row.m.lo in k.m]
        fits = [k for k in serving if "float16" in k.act_dtypes and (experimental or k.stability == "stable")]
        assert (row.why == "fallback") == (not fits)
        if row.why.startswith(("priority", "narrower")):
            assert row.kernel.spec.priority == max(k.priority for k in fits)


@settings(deadline=None)  # a busy machine is no fault of the code
@given(specs=kernels())
def test_bisect_equals_a_linear_scan(build: Any, specs: list[LinearKernelSpec]) -> None:
    found = outcome(build, specs, LinearChoice(), Timings())
    if isinstance(found, Selection):
        table: DispatchTable = found.table
        for m in range(1, M_LIMIT + 1):
            (scanned,) = [row for row in table.rows if row.m.lo <= m <= row.m.hi]
            assert table.kernel_for(m) is scanned
