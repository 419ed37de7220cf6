"""Names: loaded once, compared after normalization, and conflicts hold both sides back (PL-03)."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.errors import ConfigError
from deepinfer_core.registry.discovery import discover


def test_the_same_entry_in_two_distributions_loads_once(fakes: Any) -> None:
    fakes.good("acme")
    fakes.add("aaa-again", {"acme": "acme"})
    found = discover(entry_points=fakes.entry_points())
    assert [(p.name, p.distribution) for p in found.plugins] == [("acme", "acme")]
    assert not found.faults


def test_the_distribution_that_ships_the_module_owns_an_entry_that_two_list(fakes: Any) -> None:
    fakes.add("zzz", {"acme": "acme_impl"}, {"acme_impl": fakes.source("acme")})
    (fakes.folder / "zzz-1.0.dist-info" / "RECORD").write_text("acme_impl.py,,\n", encoding="utf-8")
    fakes.add("acme", {"acme": "acme_impl"})
    (plugin,) = discover(entry_points=fakes.entry_points()).plugins
    assert plugin.distribution == "zzz"


@pytest.mark.parametrize("spelling", ["foo_bar", "foo-bar", "Foo.Bar", "FOO--BAR"])
def test_the_same_entry_spelt_differently_loads_once(fakes: Any, spelling: str) -> None:
    fakes.good("foo", entry="foo-bar")
    fakes.add("other", {spelling: "foo"})
    found = discover(entry_points=fakes.entry_points())
    assert len(found.plugins) == 1
    assert not found.faults


def test_a_stale_egg_info_beside_an_editable_install_does_no_harm(fakes: Any, tmp_path: Path) -> None:
    fakes.good("acme")
    source_tree = tmp_path / "checkout"
    fakes.add("acme", {"acme": "acme"}, folder=source_tree, form="egg-info", version="0.9")
    sys.path.insert(0, str(source_tree))
    try:
        found = discover()
    finally:
        sys.path.remove(str(source_tree))
    assert [p.name for p in found.plugins if p.name == "acme"] == ["acme"]
    assert not [f for f in found.faults if f.name == "acme"]


def test_a_distribution_further_down_the_path_is_shadowed_like_its_modules(fakes: Any, tmp_path: Path) -> None:
    fakes.good("acme")
    old = tmp_path / "old"
    fakes.add("acme", {"acme": "acme_before_rename"}, folder=old, version="0.1")
    sys.path.append(str(old))
    try:
        found = discover()
    finally:
        sys.path.remove(str(old))
    assert [p.version for p in found.plugins if p.name == "acme"] == ["1.0"]
    assert not [f for f in found.faults if f.name == "acme"]


def test_one_name_with_two_values_holds_both_back_until_one_is_disabled(fakes: Any) -> None:
    fakes.good("first", entry="acme")
    fakes.good("second", entry="Acme")
    entries = fakes.entry_points()
    found = discover(entry_points=entries)
    assert not found.plugins
    assert {f.distribution for f in found.faults} == {"first", "second"}
    for fault in found.faults:
        assert fault.stage == "conflict"
        for part in ("'first'", "'second'", "disable"):
            assert part in fault.cause
    after = discover(entry_points=entries, disable=["second"])
    assert [p.distribution for p in after.plugins] == ["first"]
    assert not after.faults
    assert after.disabled == ("Acme",)


def test_one_descriptor_name_in_two_distributions_holds_both_back_until_one_is_disabled(fakes: Any) -> None:
    fakes.good("p1")
    fakes.add("twin", {"twin": "twin"}, {"twin": fakes.source("twin").replace("'twin.gemv'", "'P1_gemv'")})
    fakes.good("p3")
    for entries in itertools.permutations(fakes.entry_points()):
        found = discover(entry_points=entries)
        assert [p.name for p in found.plugins] == ["p3"]
        assert {f.name for f in found.faults} == {"p1", "twin"}
        for fault in found.faults:
            assert "kernel 'p1-gemv' is also registered by" in fault.cause
            assert ("kernel", "p1.gemv") in fault.brings or ("kernel", "P1_gemv") in fault.brings
    after = discover(entry_points=fakes.entry_points(), disable=["twin"])
    assert {p.name for p in after.plugins} == {"p1", "p3"}


def test_two_plugins_of_one_name_hold_each_other_back(fakes: Any) -> None:
    fakes.add("a", {"a": "a"}, {"a": fakes.source("same", "x = 1\n")})
    fakes.add("b", {"b": "b"}, {"b": fakes.source("Same", "x = 1\n")})
    found = discover(entry_points=fakes.entry_points())
    assert not found.plugins
    assert all("plugin 'same' is also registered by" in f.cause for f in found.faults)


def test_a_disabled_plugin_is_not_even_imported(fakes: Any) -> None:
    fakes.add("p2", {"p2": "p2"}, {"p2": "raise KeyboardInterrupt"})
    assert discover(entry_points=fakes.entry_points(), disable=["P2"]).disabled == ("p2",)


def test_a_distribution_name_disables_all_of_its_plugins(fakes: Any) -> None:
    fakes.add("acme_tools", {"one": "one", "two": "two"}, {m: fakes.source(m) for m in ("one", "two")})
    assert not discover(entry_points=fakes.entry_points(), disable=["acme-tools"]).plugins


def test_disabling_what_is_not_installed_is_an_error_with_the_nearest_name(fakes: Any) -> None:
    fakes.good("acme")
    with pytest.raises(ConfigError, match=r"'akme'.*did you mean 'acme'"):
        discover(entry_points=fakes.entry_points(), disable=["akme"])


def test_what_is_found_does_not_depend_on_the_order_of_entries(fakes: Any) -> None:
    for name in ("p3", "p1", "p2"):
        fakes.good(name)
    results = [discover(entry_points=entries) for entries in itertools.permutations(fakes.entry_points())]
    assert [p.name for p in results[0].plugins] == ["p1", "p2", "p3"]
    assert all(result == results[0] for result in results)
