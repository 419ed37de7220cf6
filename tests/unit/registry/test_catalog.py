"""Look-ups by name: what is there, what is near, what to install, and which failure is to blame."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepinfer_core.errors import PluginError, SelectionError
from deepinfer_core.plugin_api import LinearBackend, QuantizationRecipe
from deepinfer_core.registry.catalog import load_factory, make, make_scheme
from deepinfer_core.registry.policy import resolve_policy


def test_everything_is_found_by_kind_with_its_owner(build: Any) -> None:
    recipe = QuantizationRecipe(name="half", description="a recipe", rules=())
    parts = LinearBackend(
        name="w", schemes=(build.scheme(),), layouts=(build.layout(),), kernels=(build.kernel(),), recipes=(recipe,)
    )
    found = build.catalog(build.plugin("w", parts, attention=(build.attention("att"),), policies=(build.policy("po"),)))
    for registered in (
        found.backend("w"), found.scheme("w"), found.layout("w.v1"), found.kernel("w.k"), found.recipe("half"),
        found.attention_backend("att"), found.policy("po"),
    ):  # fmt: skip
        assert registered.origin == "dist-w 1.0"
    assert found.kernel("w.k").backend == "w"
    assert found.attention_backend("att").backend is None


@pytest.mark.parametrize("spelling", ["acme-w4", "acme_w4", "Acme.W4"])
def test_names_are_found_in_any_spelling(build: Any, spelling: str) -> None:
    found = build.catalog(build.plugin("acme", LinearBackend(name="acme-w4")))
    assert found.backend(spelling).spec.name == "acme-w4"


def test_listings_are_in_order_of_names_whatever_the_order_of_plugins(build: Any) -> None:
    plugins = [build.plugin(n, LinearBackend(name=n)) for n in ("c", "a", "b")]
    assert {tuple(build.catalog(*order).backends) for order in itertools.permutations(plugins)} == {("a", "b", "c")}


def test_an_unknown_name_is_an_error_with_the_nearest(build: Any) -> None:
    found = build.catalog(build.plugin("w", LinearBackend(name="w", kernels=(build.kernel("w.tiled_gemm"),))))
    with pytest.raises(SelectionError, match=r"kernel 'w\.tiled_gem'; did you mean 'w\.tiled_gemm'"):
        found.kernel("w.tiled_gem")


@pytest.mark.parametrize(
    ("method", "name", "line"),
    [
        ("scheme", "w3a16", "pip install deepinfer-plugin-w3a16"),
        ("scheme", "fp16", "pip install deepinfer-plugin-fp16"),
        ("backend", "w4a16", "pip install deepinfer-plugin-w4a16"),
        ("recipe", "mixed", "pip install deepinfer-plugin-w3a16"),
        ("attention_backend", "sdpa", "pip install deepinfer-plugin-fp16"),
        ("policy", "slo", "pip install deepinfer-plugin-policies"),
        ("policy", "Dual-Stream", "pip install deepinfer-plugin-policies"),
    ],
)
def test_a_well_known_name_comes_with_its_pip_line(build: Any, method: str, name: str, line: str) -> None:
    with pytest.raises(SelectionError, match=line):
        getattr(build.catalog(), method)(name)


def test_a_checkpoints_own_distribution_is_named_with_a_caution(build: Any) -> None:
    with pytest.raises(SelectionError, match=r"pip install acme-deepinfer \(the name comes from the checkpoint"):
        build.catalog().scheme("acme5", distribution="acme-deepinfer")


@pytest.mark.parametrize("text", ["--index-url http://evil x", "a; rm -rf /", "a b", "x" * 200, "", "-e ."])
def test_text_from_a_checkpoint_that_is_no_project_name_is_not_repeated(build: Any, text: str) -> None:
    with pytest.raises(SelectionError) as caught:
        build.catalog().scheme("acme5", distribution=text)
    assert "pip install" not in str(caught.value)


def test_an_installed_distribution_that_registers_no_such_policy_is_said_to_be_there(build: Any) -> None:
    policies = build.plugin("policies", distribution="deepinfer-plugin-policies", version="0.1.0")
    with pytest.raises(SelectionError, match=r"deepinfer-plugin-policies 0\.1\.0 is installed but registers no such"):
        resolve_policy(build.catalog(policies), "slo")


def test_auto_without_the_policies_distribution_names_the_pip_line(build: Any) -> None:
    with pytest.raises(SelectionError, match=r'(?s)"auto" means .mixed.*pip install deepinfer-plugin-policies'):
        resolve_policy(build.catalog(), "auto")


def test_auto_is_the_mixed_policy_where_it_is_installed(build: Any) -> None:
    found = build.catalog(build.plugin("p", policies=(build.policy("mixed"), build.policy("serial"))))
    assert resolve_policy(found, "auto").spec.name == "mixed"


def test_a_policy_that_is_registered_is_returned(build: Any) -> None:
    found = build.catalog(build.plugin("p", policies=(build.policy("serial"),)))
    assert resolve_policy(found, "serial").spec.name == "serial"


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ({"name": "acme"}, "acme"),
        ({"name": "plug", "distribution": "deepinfer-plugin-acme"}, "acme"),
        ({"name": "plug", "brings": (("scheme", "Acme"),)}, "acme"),
        ({"name": "w4a16", "distribution": "deepinfer-plugin-w4a16"}, "w4a16"),
    ],
)
def test_a_name_that_a_failed_plugin_was_to_bring_gets_the_original_error(
    build: Any, fault: dict[str, Any], name: str
) -> None:
    cause = ImportError("no acme_kernels")
    other = build.fault("aaa", OSError("something else"))
    found = build.catalog(faults=(other, build.fault(fault.pop("name"), cause, **fault)))
    with pytest.raises(SelectionError, match="no acme_kernels") as caught:
        found.scheme(name)
    assert caught.value.__cause__ is cause
    assert "something else" not in str(caught.value)
    assert "pip install" not in str(caught.value)


def test_factories_are_imported_when_asked_and_failures_name_target_and_cause(build: Any) -> None:
    assert load_factory("json:decoder.JSONDecoder").__name__ == "JSONDecoder"
    with pytest.raises(PluginError, match=r"cannot import 'no_such_module_x:y': ModuleNotFoundError"):
        load_factory("no_such_module_x:y")
    found = build.catalog(
        build.plugin("w", LinearBackend(name="w", schemes=(build.scheme(),), layouts=(build.layout(),)))
    )
    with pytest.raises(PluginError, match=r"'fake:Scheme' of 'w' \(dist-w 1\.0\)"):
        make_scheme(found, "w")
    with pytest.raises(PluginError, match=r"'fake:Layout' of 'w\.v1' \(dist-w 1\.0\)"):
        make(found.layout("w.v1").spec.factory, found.layout("w.v1"))
