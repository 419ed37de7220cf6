"""Plugins that break the contract are rejected by name, with what was expected (PL-06)."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.registry.discovery import PluginFault, discover

LINEAR = "@hookimpl\ndef deepinfer_linear_backends():\n    return "
KERNEL = "LinearKernelSpec(name='k', scheme='s', layout='l', device='cpu', factory='a:b'"


def one_fault(fakes: Any, source: str) -> PluginFault:
    """Return the fault of a bad plugin that is installed beside a good one, which must be active."""
    fakes.good("p1")
    fakes.add("bad", {"bad": "bad"}, {"bad": source})
    found = discover(entry_points=fakes.entry_points())
    assert [p.name for p in found.plugins] == ["p1"]
    (fault,) = found.faults
    assert fault.name == "bad"
    return fault


def test_an_extra_argument_is_named_with_the_expected_signature(fakes: Any) -> None:
    body = "@hookimpl\ndef deepinfer_linear_backends(path):\n    return []\n"
    fault = one_fault(fakes, fakes.source("bad", body))
    assert fault.stage == "hooks"
    assert "'path'" in fault.cause
    assert "expected deepinfer_linear_backends() -> Iterable[LinearBackend]" in fault.cause


def test_a_misspelt_hook_is_named_with_the_nearest_right_one(fakes: Any) -> None:
    body = "@hookimpl\ndef deepinfer_linear_backend():\n    return []\n"
    fault = one_fault(fakes, fakes.source("bad", body))
    assert fault.stage == "hooks"
    assert "'deepinfer_linear_backend'" in fault.cause
    assert "did you mean 'deepinfer_linear_backends'" in fault.cause


def test_a_hook_without_its_mark_is_reported_instead_of_never_running(fakes: Any) -> None:
    fault = one_fault(fakes, fakes.source("bad", "def deepinfer_linear_backends():\n    return []\n"))
    assert "not marked with @hookimpl" in fault.cause


@pytest.mark.parametrize("version", ["(99, 0)", "(0, 9)", "(1, 99)", "99", "'1.0'", "(1,)", "(True, 0)", "None"])
def test_another_api_version_is_reported_with_both_versions(fakes: Any, version: str) -> None:
    source = fakes.source("bad").replace("PluginInfo(name='bad')", f"PluginInfo(name='bad', api_version={version})")
    fault = one_fault(fakes, source)
    assert fault.stage == "version"
    assert "1" in fault.cause
    assert "API version" in fault.cause


def test_the_version_is_the_cause_even_when_hooks_changed_too(fakes: Any) -> None:
    body = "@hookimpl\ndef deepinfer_linear_backends_v2(x):\n    return []\n"
    source = fakes.source("bad", body).replace("PluginInfo(name='bad')", "PluginInfo(name='bad', api_version=(2, 0))")
    assert one_fault(fakes, source).stage == "version"


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("None", "None"),
        ("3", "a int"),
        ("'w4a16'", "a str"),
        ("[None]", "None among its items"),
        ("['w4a16']", "a str among its items"),
        ("LinearBackend(name='x')", "a LinearBackend"),
        ("[AttentionBackendSpec(name='x', devices=('cpu',), factory='a:b')]", "a AttentionBackendSpec among"),
    ],
)
def test_a_wrong_return_type_is_named(fakes: Any, returned: str, named: str) -> None:
    fault = one_fault(fakes, fakes.source("bad", LINEAR + returned + "\n"))
    assert fault.stage == "contract"
    assert f"deepinfer_linear_backends returned {named}" in fault.cause
    assert "expected deepinfer_linear_backends() -> Iterable[LinearBackend]" in fault.cause


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        (KERNEL + ", act_dtypes=('float16'))", "act_dtypes is 'float16' (str)"),
        (KERNEL + ", m=(1, 8))", "m is (1, 8) (tuple); expected MRange"),
        (KERNEL + ", group_sizes=(32, '64'))", "group_sizes"),
        (KERNEL + ", stability='beta')", "stability is 'beta'"),
        (KERNEL + ", priority='high')", "priority is 'high'"),
        (KERNEL + ", zeros=1)", "zeros is 1"),
        (KERNEL.replace("'a:b'", "'a.b'") + ")", 'the form "package.module:attribute"'),
        (KERNEL.replace("'a:b'", "print") + ")", "factory is"),
        (KERNEL + ", predicate='no colon')", "predicate"),
        (KERNEL.replace("name='k'", "name=None") + ")", "name is None"),
        (KERNEL.replace("name='k'", "name=''") + ")", "name is empty"),
        ("'k'", "kernels[0] is 'k'"),
    ],
)
def test_a_wrong_value_inside_a_descriptor_is_named_before_anything_uses_it(
    fakes: Any, kernel: str, place: str
) -> None:
    fault = one_fault(fakes, fakes.source("bad", f"{LINEAR}[LinearBackend(name='bad', kernels=({kernel},))]\n"))
    assert fault.stage == "contract"
    assert place in fault.cause


def test_a_plugin_without_its_identity_is_reported(fakes: Any) -> None:
    source = "from deepinfer_core.plugin_api import *\n" + LINEAR + "[]\n"
    assert "deepinfer_plugin_info() -> PluginInfo" in one_fault(fakes, source).cause


def test_an_identity_of_the_wrong_type_is_reported(fakes: Any) -> None:
    source = fakes.source("bad").replace("PluginInfo(name='bad')", "'bad'")
    assert "deepinfer_plugin_info returned a str" in one_fault(fakes, source).cause


def test_a_hook_that_raises_is_reported_with_its_error(fakes: Any) -> None:
    fault = one_fault(fakes, fakes.source("bad", LINEAR + "1 / 0\n"))
    assert (fault.stage, fault.cause) == ("call", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("@hookimpl(wrapper=True)\ndef deepinfer_linear_backends():\n    return (yield)\n", "wrapper"),
        ("@hookimpl\nasync def deepinfer_linear_backends():\n    return []\n", "async"),
        (
            LINEAR + "[]\n@hookimpl(specname='deepinfer_linear_backends')\ndef more():\n    return []\n",
            "implemented twice",
        ),
        (LINEAR + "[LinearBackend(name='x'), LinearBackend(name='X')]\n", "registered twice"),
        (LINEAR + "[LinearBackend(name='auto')]\n", "reserved"),
        (LINEAR + f"[LinearBackend(name='x', kernels=({KERNEL.replace('k', 'core.k', 1)}),))]\n", "reserved"),
        (LINEAR + "[LinearBackend(name='two words')]\n", "white space"),
    ],
)
def test_other_breaches_are_reported(fakes: Any, body: str, cause: str) -> None:
    assert cause in one_fault(fakes, fakes.source("bad", body)).cause


def test_hooks_may_return_generators_and_be_left_out(fakes: Any) -> None:
    fakes.add("p", {"p": "p"}, {"p": fakes.source("p", LINEAR + "(LinearBackend(name=n) for n in ('a', 'b'))\n")})
    (plugin,) = discover(entry_points=fakes.entry_points()).plugins
    assert [b.name for b in plugin.backends] == ["a", "b"]
    assert (plugin.attention, plugin.policies) == ((), ())


def test_what_every_hook_returns_is_collected(fakes: Any) -> None:
    body = (
        "@hookimpl\ndef deepinfer_linear_backends():\n    return [LinearBackend(name='lin')]\n"
        "@hookimpl\ndef deepinfer_attention_backends():\n"
        "    return [AttentionBackendSpec(name='att', devices=('cpu',), factory='a:b')]\n"
        "@hookimpl\ndef deepinfer_scheduling_policies():\n"
        "    return [SchedulingPolicySpec(name='pol', description='d', lanes=(LaneSpec(name='l'),), factory='a:b')]\n"
    )
    fakes.add("p", {"p": "p"}, {"p": fakes.source("p", body)})
    (plugin,) = discover(entry_points=fakes.entry_points(), strict=True).plugins
    names = [spec.name for specs in (plugin.backends, plugin.attention, plugin.policies) for spec in specs]
    assert names == ["lin", "att", "pol"]
    assert (plugin.distribution, plugin.version, plugin.entry_point) == ("p", "1.0", "p = p")
