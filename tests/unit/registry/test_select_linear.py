"""How layout and kernels are chosen, and what is said about the others."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import CapabilityRange, LinearBackend, MRange
from deepinfer_core.registry.choice import LinearChoice
from deepinfer_core.registry.dispatch import FALLBACK
from deepinfer_core.registry.select import Selection, select_linear


def rows(selection: Selection) -> list[tuple[str, str, str]]:
    return [(str(r.m), r.kernel.spec.name, r.why) for r in selection.table.rows]


def reason(selection: Selection, kernel: str) -> str:
    (text,) = [r.reason for r in selection.rejected if r.kernel.spec.name == kernel]
    return text


@pytest.fixture
def origin(build: Any) -> Any:
    """The measured table of the system this follows: GEMV, small-batch GEMV, tiled GEMM."""
    return build.of_kernels(
        build.kernel("w.gemv", MRange(1, 1)),
        build.kernel("w.batch_tile_gemv", MRange(2, 8)),
        build.kernel("w.tiled_gemm", MRange(9)),
    )


def test_the_origin_table_is_reproducible_by_name(build: Any, origin: Any) -> None:
    selection = select_linear(origin, build.problem(), LinearChoice(backend="w"))
    assert [row[:2] for row in rows(selection)] == [
        ("1", "w.gemv"),
        ("2..8", "w.batch_tile_gemv"),
        ("9..64", "w.tiled_gemm"),
    ]
    assert not selection.warnings
    on_cpu = select_linear(origin, build.problem(device="cpu", capability=None, act_dtype="float32"))
    assert rows(on_cpu) == [("1..64", FALLBACK, "fallback")]


def test_the_row_names_kernel_distribution_and_version(build: Any, origin: Any) -> None:
    row = select_linear(origin, build.problem()).table.kernel_for(3)
    assert (row.kernel.spec.name, row.kernel.distribution, row.kernel.version) == ("w.batch_tile_gemv", "dist-w", "1.0")


def test_higher_priority_wins_and_the_loser_is_told_so(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", priority=1), build.kernel("w.b", priority=2))
    selection = select_linear(found, build.problem())
    assert rows(selection) == [("1..64", "w.b", "priority 2")]
    assert reason(selection, "w.a") == "outranked by w.b (priority 2)"


def test_at_equal_priority_the_narrower_range_wins_where_it_serves(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.all"), build.kernel("w.small", MRange(2, 8)))
    selection = select_linear(found, build.problem())
    assert rows(selection) == [
        ("1", "w.all", "only candidate"),
        ("2..8", "w.small", "narrower"),
        ("9..64", "w.all", "only candidate"),
    ]


def test_a_tie_is_an_error_that_names_both_and_what_to_write(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 8)), build.kernel("w.b", MRange(2, 9)))
    with pytest.raises(
        SelectionError, match=r"'w\.a' \(dist-w 1\.0\) and 'w\.b' \(dist-w 1\.0\) tie at M = 2"
    ) as caught:
        select_linear(found, build.problem())
    assert 'kernels = { "2" = "w.a" }' in str(caught.value)


def test_kernels_that_tie_beyond_the_limit_do_not_matter(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 70)), build.kernel("w.b", MRange(65, 134)))
    assert rows(select_linear(found, build.problem(m_max=64))) == [("1..64", "w.a", "only candidate")]


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "device": ({"device": "cpu"}, {}, "runs on cpu, asked for cuda"),
    "capability": ({"capability": CapabilityRange(lo=(9, 0))}, {}, "needs sm_90+, asked for sm_86"),
    "capability above": (
        {"capability": CapabilityRange(lo=(8, 0), hi=(8, 9))},
        {"capability": (12, 0)},
        "needs sm_80..sm_89, asked for sm_120",
    ),
    "unknown capability": ({"capability": CapabilityRange(lo=(8, 0))}, {"capability": None}, "unknown capability"),
    "dtype": ({"act_dtypes": ("bfloat16",)}, {}, "serves activation dtype bfloat16, asked for float16"),
    "group": ({"group_sizes": (64, 128)}, {}, "serves group sizes 64, 128, asked for 32"),
    "zeros": ({"zeros": False}, {"zeros": True}, "does not serve layers that store zeros"),
    "short group": ({"short_last_group": False}, {"k": 100}, "K = 100, group 32"),
    "n": ({"n_multiple_of": 128}, {}, "multiple of 128, asked for N = 64"),
    "k": ({"k_multiple_of": 256}, {}, "multiple of 256, asked for K = 128"),
    "epilogue": ({}, {"epilogue": "residual"}, "serves epilogue none, asked for residual"),
    "m": ({"m": MRange(100, 200)}, {}, "serves M = 100..200, the batched-token limit is 64"),
    "no such layout": ({"layout": "w.v9"}, {}, "reads layout 'w.v9', which no installed plugin registers"),
    "predicate": ({"predicate": "fake_w:refuses"}, {}, "64 outputs are too few"),
    "predicate that raises": ({"predicate": "fake_w:raises"}, {}, "raised ZeroDivisionError"),
    "predicate that is not there": ({"predicate": "fake_w:nothing"}, {}, "cannot import 'fake_w:nothing'"),
    "predicate that answers nonsense": ({"predicate": "fake_w:nonsense"}, {}, "returned True"),
    "experimental": ({"stability": "experimental"}, {}, "experimental: name it under kernels"),
}


@pytest.fixture
def predicates(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake_w")
    module.__dict__.update(
        accepts=lambda problem: None,
        refuses=lambda problem: f"{problem.n} outputs are too few",
        raises=lambda problem: 1 / 0,
        nonsense=lambda problem: True,
    )
    monkeypatch.setitem(sys.modules, "fake_w", module)


@pytest.mark.usefixtures("predicates")
@pytest.mark.parametrize(("of_kernel", "of_problem", "expected"), MISFITS.values(), ids=MISFITS)
def test_every_misfit_is_a_reason(
    build: Any, of_kernel: dict[str, Any], of_problem: dict[str, Any], expected: str
) -> None:
    fits = build.kernel("w.fits", epilogues=("none", "residual"))
    found = build.of_kernels(fits, build.kernel("w.odd", priority=9, **of_kernel))
    selection = select_linear(found, build.problem(**of_problem))
    assert rows(selection) == [("1..64", "w.fits", "only candidate")]
    assert expected in reason(selection, "w.odd")


@pytest.mark.usefixtures("predicates")
def test_a_predicate_that_accepts_lets_the_kernel_through(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", predicate="fake_w:accepts"))
    assert rows(select_linear(found, build.problem())) == [("1..64", "w.a", "only candidate")]


def test_every_kernel_of_the_scheme_is_either_used_or_rejected_with_a_reason(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.a", MRange(1, 4)),
        build.kernel("w.b", priority=-1),
        build.kernel("w.c", device="cpu"),
        build.kernel("w.d", layout="w.v2"),
        build.kernel("v.e", scheme="v"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    selection = select_linear(found, build.problem(), LinearChoice(kernels={"1": "w.a"}))
    used = {k.spec.name for k in selection.table.kernels()}
    rejected = {r.kernel.spec.name for r in selection.rejected}
    assert (used, rejected) == ({"w.a", "w.b"}, {"w.c", "w.d"})
    assert all(r.reason for r in selection.rejected)


# Layout first


def test_untuned_the_layout_of_the_best_kernel_at_one_row_wins_for_every_m(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.one", MRange(1, 1), layout="w.v2", priority=5),
        build.kernel("w.rest", MRange(2), layout="w.v2", priority=1),
        build.kernel("w.other", priority=3),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    selection = select_linear(found, build.problem())
    assert selection.layout.spec.name == "w.v2"
    assert rows(selection) == [("1", "w.one", "only candidate"), ("2..64", "w.rest", "only candidate")]
    assert "reads layout 'w.v1'; 'w.v2' was chosen" in reason(selection, "w.other")


def test_a_tie_between_layouts_is_an_error_that_names_both(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.a"),
        build.kernel("w.b", layout="w.v2"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    with pytest.raises(SelectionError, match=r"'w\.a'.*and 'w\.b'.*tie at M = 1"):
        select_linear(found, build.problem())


def test_strict_mode_takes_the_layout_that_covers_every_m(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.fast", MRange(1, 4), layout="w.v2", priority=5),
        build.kernel("w.all"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    assert select_linear(found, build.problem()).layout.spec.name == "w.v2"
    strict = select_linear(found, build.problem(), LinearChoice(strict=True))
    assert rows(strict) == [("1..64", "w.all", "only candidate")]


# Pins


def test_a_pin_fixes_kernel_and_layout(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.a", priority=9),
        build.kernel("w.b", layout="w.v2"),
        build.kernel("w.c", MRange(1, 32), layout="w.v2", stability="experimental"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    selection = select_linear(found, build.problem(), LinearChoice(kernels={"2..8": "w.c"}))
    assert selection.layout.spec.name == "w.v2"
    assert rows(selection) == [
        ("1", "w.b", "only candidate"),
        ("2..8", "w.c", "pinned"),
        ("9..64", "w.b", "only candidate"),
    ]


def test_pins_of_two_layouts_are_an_error(build: Any) -> None:
    found = build.of_kernels(
        build.kernel("w.a"),
        build.kernel("w.b", layout="w.v2"),
        layouts=(build.layout(), build.layout("w.v2")),
    )
    with pytest.raises(SelectionError, match=r"do not share a layout.*w\.v1.*w\.v2"):
        select_linear(found, build.problem(), LinearChoice(kernels={"1": "w.a", "2..": "w.b"}))


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({"1..4": "w.small"}, r"pinned to M = 1\.\.4 .* but serves M = 2\.\.8"),
        ({"2..9": "w.small"}, r"but serves M = 2\.\.8"),
        ({"1": "w.cpu"}, "cannot serve it: runs on cpu, asked for cuda"),
        ({"1": "w.smal"}, r"kernel 'w\.smal'; did you mean 'w\.small'"),
        ({"1": "v.k"}, r"'v\.k' serves scheme 'v'; kernels of 'w': w\.all, w\.cpu, w\.small"),
        ({"1..4": "w.all", "4..8": "w.small"}, r"ranges 1\.\.4 \(w\.all\) and 4\.\.8 \(w\.small\) overlap"),
        ({"eight": "w.all"}, "'eight' is not a range of M"),
        ({"8..2": "w.all"}, "1 <= lo <= hi"),
    ],
)
def test_a_pin_that_cannot_serve_is_an_error_with_the_reason(
    build: Any, kernels: dict[str, str], expected: str
) -> None:
    found = build.of_kernels(
        build.kernel("w.all"),
        build.kernel("w.small", MRange(2, 8)),
        build.kernel("w.cpu", device="cpu"),
        build.kernel("v.k", scheme="v"),
    )
    with pytest.raises(SelectionError, match=expected):
        select_linear(found, build.problem(), LinearChoice(kernels=kernels))


def test_an_open_pin_ends_at_the_limit_and_one_beyond_it_is_idle(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.all"), build.kernel("w.big", MRange(9, 64)))
    open_pin = select_linear(found, build.problem(), LinearChoice(kernels={"9..": "w.big"}))
    assert rows(open_pin)[-1] == ("9..64", "w.big", "pinned")
    beyond = select_linear(found, build.problem(m_max=8), LinearChoice(kernels={"9..": "w.big"}))
    assert rows(beyond) == [("1..8", "w.all", "only candidate")]


def test_the_fallback_can_be_pinned_by_name(build: Any, origin: Any) -> None:
    selection = select_linear(origin, build.problem(), LinearChoice(kernels={"9..": FALLBACK}))
    assert rows(selection)[-1] == ("9..64", FALLBACK, "pinned")
    assert not selection.warnings


# Backends


def test_a_named_backend_alone_is_asked_and_gaps_are_filled_with_a_warning(build: Any) -> None:
    acme = build.plugin("acme", LinearBackend(name="acme", kernels=(build.kernel("acme.gemv", MRange(1, 1)),)))
    w = build.plugin(
        "w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=(build.layout(),), kernels=(build.kernel(),))
    )
    selection = select_linear(build.catalog(acme, w), build.problem(), LinearChoice(backend="Acme"))
    assert rows(selection) == [("1", "acme.gemv", "only candidate"), ("2..64", FALLBACK, "fallback")]
    (warning,) = selection.warnings
    assert "M = 2..64" in warning
    assert "the config names 'acme'" in reason(selection, "w.k")


def test_a_named_backend_that_cannot_serve_is_an_error_with_every_reason(build: Any) -> None:
    acme = build.plugin("acme", LinearBackend(name="acme", kernels=(build.kernel("acme.gemv", n_multiple_of=256),)))
    w = build.plugin(
        "w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=(build.layout(),), kernels=(build.kernel(),))
    )
    with pytest.raises(SelectionError, match=r"backend 'acme' cannot serve any M") as caught:
        select_linear(build.catalog(acme, w), build.problem(), LinearChoice(backend="acme"))
    assert "acme.gemv: needs N to be a multiple of 256" in str(caught.value)


def test_a_pin_may_name_another_backends_kernel(build: Any) -> None:
    acme = build.plugin("acme", LinearBackend(name="acme", kernels=(build.kernel("acme.gemv", MRange(1, 1)),)))
    w = build.plugin(
        "w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=(build.layout(),), kernels=(build.kernel(),))
    )
    choice = LinearChoice(backend="w", kernels={"1": "acme.gemv"})
    selection = select_linear(build.catalog(acme, w), build.problem(), choice)
    assert [r[1] for r in rows(selection)] == ["acme.gemv", "w.k"]


def test_an_unknown_backend_is_an_error_with_the_nearest_name(build: Any, origin: Any) -> None:
    with pytest.raises(SelectionError, match="linear backend 'ww'; did you mean 'w'"):
        select_linear(origin, build.problem(), LinearChoice(backend="ww"))


# Gaps


def test_a_gap_is_filled_by_the_fallback_with_a_warning_that_names_the_range(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 4)), build.kernel("w.b", MRange(9)))
    selection = select_linear(found, build.problem())
    assert rows(selection)[1] == ("5..8", FALLBACK, "fallback")
    (warning,) = selection.warnings
    assert "no kernel serves M = 5..8" in warning
    assert FALLBACK in warning


def test_in_strict_mode_a_gap_is_an_error_with_every_reason(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 4)), build.kernel("w.b", device="cpu"))
    with pytest.raises(SelectionError, match=r"no kernel of layout 'w\.v1' serves M = 5\.\.64") as caught:
        select_linear(found, build.problem(), LinearChoice(strict=True))
    assert "w.b: runs on cpu" in str(caught.value)


def test_strict_mode_without_any_kernel_is_an_error(build: Any) -> None:
    with pytest.raises(SelectionError, match="nothing serves any M"):
        select_linear(build.of_kernels(), build.problem(), LinearChoice(strict=True))


def test_a_gap_where_the_fallback_does_not_fit_either_is_an_error(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a", MRange(1, 4), epilogues=("silu_mul",)))
    with pytest.raises(SelectionError, match=rf"serves M = 5\.\.64, nor does {FALLBACK}: it serves epilogue"):
        select_linear(found, build.problem(epilogue="silu_mul"))


def test_without_a_kernel_a_lossless_layout_is_taken_whatever_it_is_called(build: Any) -> None:
    layouts = (build.layout("w.a", lossless=False), build.layout("w.b", devices=("cuda",)), build.layout("w.c"))
    assert select_linear(build.of_kernels(layouts=layouts), build.problem()).layout.spec.name == "w.c"


def test_without_a_layout_that_fits_nothing_serves_and_each_layout_has_its_reason(build: Any) -> None:
    layouts = (build.layout("w.a", devices=("cpu",)), build.layout("w.b", act_dtypes=("bfloat16",)))
    with pytest.raises(SelectionError, match="nothing serves any M") as caught:
        select_linear(build.of_kernels(layouts=layouts), build.problem())
    assert "layout w.a: serves device cpu, asked for cuda" in str(caught.value)
    assert "layout w.b: serves activation dtype bfloat16" in str(caught.value)


def test_the_error_says_what_was_asked(build: Any) -> None:
    with pytest.raises(SelectionError, match=r"w 64 x 128 group 32 on cuda sm_86 float16, M = 1\.\.64"):
        select_linear(build.of_kernels(layouts=()), build.problem())


# Experimental kernels


def test_experimental_kernels_run_when_allowed_or_named_and_only_then(build: Any) -> None:
    found = build.of_kernels(build.kernel("w.a"), build.kernel("w.x", MRange(1, 8), stability="experimental"))
    assert rows(select_linear(found, build.problem())) == [("1..64", "w.a", "only candidate")]
    allowed = select_linear(found, build.problem(), LinearChoice(allow_experimental=True))
    assert rows(allowed)[0] == ("1..8", "w.x", "narrower")
    named = select_linear(found, build.problem(), LinearChoice(kernels={"4": "w.x"}))
    assert rows(named) == [
        ("1..3", "w.a", "only candidate"),
        ("4", "w.x", "pinned"),
        ("5..64", "w.a", "only candidate"),
    ]


# Failed plugins (PL-02)


def test_automatic_choice_warns_of_failed_plugins_and_says_what_runs(build: Any) -> None:
    failed = build.fault("acme", ImportError("no acme_kernels"))
    w = build.plugin(
        "w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=(build.layout(),), kernels=(build.kernel(),))
    )
    (warning,) = select_linear(build.catalog(w, faults=(failed,)), build.problem()).warnings
    assert "acme (acme 1.0)" in warning
    assert "w.k" in warning


def test_naming_a_failed_backend_is_an_error_with_the_original_cause(build: Any) -> None:
    cause = ImportError("no acme_kernels")
    w = build.plugin(
        "w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=(build.layout(),), kernels=(build.kernel(),))
    )
    found = build.catalog(w, faults=(build.fault("acme", cause),))
    with pytest.raises(SelectionError, match="no acme_kernels") as caught:
        select_linear(found, build.problem(), LinearChoice(backend="acme"))
    assert caught.value.__cause__ is cause
