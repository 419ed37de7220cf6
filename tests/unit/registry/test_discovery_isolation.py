"""One broken plugin never takes the others down (PL-01)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from deepinfer_core.errors import PluginError
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.discovery import discover

BROKEN = {
    "import error": ("raise ImportError('no module named acme_kernels')", ImportError, "acme_kernels"),
    "missing library": ("raise OSError('libacme.so: cannot open shared object file')", OSError, "libacme.so"),
    "exit": ("raise SystemExit(3)", SystemExit, "SystemExit"),
    "native panic": ("class Panic(BaseException): pass\nraise Panic('unwrap on None')", BaseException, "unwrap"),
    "syntax error": ("def broken(:", SyntaxError, "SyntaxError"),
    "name error": ("undefined_name", NameError, "undefined_name"),
}


@pytest.mark.parametrize(("source", "kind", "cause"), BROKEN.values(), ids=BROKEN)
def test_plugins_around_a_broken_one_are_active(fakes: Any, source: str, kind: type[BaseException], cause: str) -> None:
    fakes.good("p1")
    fakes.add("p2", {"p2": "p2"}, {"p2": source})
    fakes.good("p3")
    found = discover()
    assert {"p1", "p3"} <= {p.name for p in found.plugins}
    (fault,) = [f for f in found.faults if f.name == "p2"]
    assert (fault.distribution, fault.version, fault.stage) == ("p2", "1.0", "load")
    assert isinstance(fault.error, kind)
    assert cause in fault.cause
    assert "\n" not in str(fault)


def test_a_plugin_that_raises_halfway_leaves_nothing_registered(fakes: Any) -> None:
    body = (
        "@hookimpl\ndef deepinfer_attention_backends():\n"
        "    yield AttentionBackendSpec(name='p2.att', devices=('cpu',), factory='a:b')\n"
        "    raise OSError('libacme.so')\n"
        "@hookimpl\ndef deepinfer_linear_backends():\n"
        "    return [LinearBackend(name='p2')]\n"
    )
    fakes.good("p1")
    fakes.add("p2", {"p2": "p2"}, {"p2": fakes.source("p2", body)})
    found = discover(entry_points=fakes.entry_points())
    catalog = Catalog.from_discovery(found)
    assert list(catalog.backends) == ["p1"]
    assert not catalog.attention
    (fault,) = found.faults
    assert fault.stage == "call"
    assert ("linear backend", "p2") in fault.brings


def test_each_fault_is_one_warning_that_names_plugin_distribution_and_cause(
    fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.good("p1")
    fakes.add("acme-dist", {"p2": "p2"}, {"p2": "raise ImportError('no acme_kernels')"}, version="2.5")
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        discover(entry_points=fakes.entry_points())
    (record,) = caplog.records
    for part in ("p2", "acme-dist 2.5", "no acme_kernels"):
        assert part in record.getMessage()


def test_quiet_discovery_logs_nothing(fakes: Any, caplog: pytest.LogCaptureFixture) -> None:
    fakes.add("p2", {"p2": "p2"}, {"p2": "raise ImportError('x')"})
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        assert discover(entry_points=fakes.entry_points(), quiet=True).faults
    assert not caplog.records


def test_strict_mode_makes_a_fault_fatal_and_keeps_its_cause(fakes: Any) -> None:
    fakes.good("p1")
    fakes.add("p2", {"p2": "p2"}, {"p2": "raise ImportError('no acme_kernels')"})
    with pytest.raises(PluginError, match=r"p2.*no acme_kernels") as caught:
        discover(entry_points=fakes.entry_points(), strict=True)
    assert isinstance(caught.value.__cause__, ImportError)


def test_strict_mode_is_silent_when_all_is_well(fakes: Any) -> None:
    fakes.good("p1")
    assert [p.name for p in discover(entry_points=fakes.entry_points(), strict=True).plugins] == ["p1"]


def test_ctrl_c_during_a_plugin_import_stops_the_program(fakes: Any) -> None:
    fakes.add("p2", {"p2": "p2"}, {"p2": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        discover(entry_points=fakes.entry_points())


@pytest.mark.parametrize("value", ["", "no spaces allowed", "p2:", "1abc", "p2:a b"])
def test_an_entry_that_names_no_module_is_reported(fakes: Any, value: str) -> None:
    fakes.good("p1")
    fakes.add("p2", {"p2": value})
    found = discover(entry_points=fakes.entry_points())
    assert [p.name for p in found.plugins] == ["p1"]
    assert [f.stage for f in found.faults] == ["load"]


def test_a_distribution_with_unreadable_metadata_is_reported_and_the_rest_loads(fakes: Any) -> None:
    fakes.good("p1")
    fakes.add("p2", {"p2": "p2"})
    (fakes.folder / "p2-1.0.dist-info" / "entry_points.txt").write_bytes(b"[deepinfer.plugins]\n\xff\xfe = x\n")
    found = discover()
    assert "p1" in {p.name for p in found.plugins}
    (fault,) = [f for f in found.faults if "p2" in f.name]
    assert fault.stage == "metadata"


def test_an_instance_can_be_a_plugin_and_a_class_cannot(fakes: Any) -> None:
    source = (
        "from deepinfer_core.plugin_api import *\n"
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def deepinfer_plugin_info(self):\n"
        "        return PluginInfo(name='obj')\n"
        "plugin = Plugin()\n"
    )
    fakes.add("obj", {"obj": "obj:plugin"}, {"obj": source})
    fakes.add("cls", {"cls": "obj:Plugin"})
    found = discover(entry_points=fakes.entry_points())
    assert [p.name for p in found.plugins] == ["obj"]
    (fault,) = found.faults
    assert "is a class" in fault.cause
