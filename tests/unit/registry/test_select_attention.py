"""Which attention backend serves a model, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import AttentionBackendSpec, AttentionProblem, CapabilityRange
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.select import select_attention


def problem(**changes: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "heads": 9, "kv_heads": 3, "head_dim": 64, "scale": 0.125, "sliding_windows": (None,), "page_size": 16,
        "act_dtype": "float16", "kv_dtype": "float16", "device": "cuda", "capability": (8, 6),
    }  # fmt: skip
    return AttentionProblem(**(values | changes))


def installed(build: Any, *specs: AttentionBackendSpec) -> Catalog:
    found: Catalog = build.catalog(build.plugin("fp16", attention=specs))
    return found


def test_the_highest_priority_that_fits_wins(build: Any) -> None:
    found = installed(build, build.attention("sdpa"), build.attention("paged", priority=10))
    selection = select_attention(found, problem())
    assert (selection.spec.spec.name, selection.why) == ("paged", "priority 10")
    assert [str(r) for r in selection.rejected] == ["sdpa (dist-fp16 1.0): outranked by paged (priority 10)"]


@pytest.mark.parametrize(
    ("of_spec", "of_problem", "expected"),
    [
        ({"devices": ("cpu",)}, {}, "runs on cpu, asked for cuda"),
        ({"capability": CapabilityRange(lo=(9, 0))}, {}, "needs sm_90+, asked for sm_86"),
        ({}, {"act_dtype": "float32"}, "serves activation dtype float16, asked for float32"),
        ({}, {"kv_dtype": "int8"}, "serves KV dtype float16, asked for int8"),
        ({"page_sizes": (32, 64)}, {}, "serves page size 32, 64, asked for 16"),
        ({"head_dims": (128,)}, {}, "serves head_dim 128, asked for 64"),
        ({}, {"sliding_windows": (None, 4096)}, "lacks sliding_window"),
    ],
)
def test_what_does_not_fit_is_rejected_with_the_reason_and_an_error_when_named(
    build: Any, of_spec: dict[str, Any], of_problem: dict[str, Any], expected: str
) -> None:
    asked = problem(**of_problem)
    fits = build.attention(
        "fits", act_dtypes=("float16", "float32"), kv_dtypes=("float16", "int8"), features=("sliding_window",)
    )
    found = installed(build, fits, build.attention("odd", priority=9, **of_spec))
    selection = select_attention(found, asked)
    assert selection.spec.spec.name == "fits"
    assert [r.reason for r in selection.rejected] == [expected] or expected in selection.rejected[0].reason
    with pytest.raises(SelectionError, match=r"the config names 'odd' \(dist-fp16 1\.0\), which") as caught:
        select_attention(found, asked, "odd")
    assert expected in str(caught.value)


def test_an_experimental_backend_runs_only_when_named(build: Any) -> None:
    found = installed(build, build.attention("sdpa"), build.attention("new", priority=9, stability="experimental"))
    assert select_attention(found, problem()).spec.spec.name == "sdpa"
    assert select_attention(found, problem(), "new").why == "named"


def test_a_tie_is_an_error_that_names_both(build: Any) -> None:
    found = installed(build, build.attention("a"), build.attention("b"))
    with pytest.raises(SelectionError, match=r"'a' .*and 'b' .*tie at priority 0"):
        select_attention(found, problem())


def test_nothing_that_fits_is_an_error_with_every_reason(build: Any) -> None:
    found = installed(build, build.attention("a", devices=("cpu",)), build.attention("b", head_dims=(128,)))
    with pytest.raises(SelectionError, match="no backend serves it") as caught:
        select_attention(found, problem())
    assert "a (dist-fp16 1.0): runs on cpu" in str(caught.value)
    assert "b (dist-fp16 1.0): serves head_dim 128" in str(caught.value)


def test_without_any_backend_the_error_says_what_to_install(build: Any) -> None:
    with pytest.raises(SelectionError, match="pip install deepinfer-plugin-fp16"):
        select_attention(build.catalog(), problem())


def test_a_failed_plugin_is_the_cause_when_nothing_serves(build: Any) -> None:
    cause = OSError("libacme.so")
    with pytest.raises(SelectionError, match=r"libacme\.so") as caught:
        select_attention(build.catalog(faults=(build.fault("fp16", cause),)), problem())
    assert caught.value.__cause__ is cause


def test_an_unknown_name_is_an_error_with_the_nearest(build: Any) -> None:
    with pytest.raises(SelectionError, match="'spda'; did you mean 'sdpa'"):
        select_attention(installed(build, build.attention("sdpa")), problem(), "spda")
