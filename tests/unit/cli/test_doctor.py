"""``doctor``: a finding for each part of the machine, and what to install next."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_core.cli.cuda_driver import Card, Driver, ask_driver
from deepinfer_core.cli.doctor import Finding, examine
from deepinfer_core.cli.main import main
from deepinfer_core.plugin_api import AttentionBackendSpec, LinearBackend, WeightSchemeSpec
from deepinfer_core.registry.discovery import Discovery, LoadedPlugin, PluginFault

CARD = Card(name="RTX 3050", capability=(8, 6), memory=4 << 30)
PLUGIN = LoadedPlugin(
    name="w",
    distribution="dist-w",
    version="1.0",
    entry_point="w = w",
    backends=(LinearBackend(name="w", schemes=(WeightSchemeSpec(name="w", bits=4, tensors=(), factory="a:b"),)),),
    attention=(AttentionBackendSpec(name="sdpa", devices=("cpu",), factory="a:b"),),
)


def torch(cuda: str | None, available: bool) -> Any:
    return SimpleNamespace(
        __version__="2.9",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available),
        get_num_threads=lambda: 4,
    )


def findings(
    driver: Driver | None = None,
    *,
    missing: tuple[str, ...] = (),
    torch_module: Any = None,
    found: Discovery | None = None,
) -> dict[str, Finding]:
    def load(name: str) -> Any:
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return (torch_module or torch(None, False)) if name == "torch" else SimpleNamespace(__version__="1.0")

    discovery = found or Discovery(plugins=(PLUGIN,), faults=())

    def version_of(name: str) -> str:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    examined = examine(lambda: driver or Driver(problem="no NVIDIA driver"), load, version_of, lambda: discovery)
    return {finding.what: finding for finding in examined}


def test_a_cpu_machine_is_ready_and_told_that_it_runs_on_the_cpu() -> None:
    report = findings()
    assert not [f for f in report.values() if f.status == "missing"]
    assert "run on the CPU" in report["CUDA card"].found
    assert "CuPy" not in report


def test_a_missing_torch_stops_nothing_but_is_missing() -> None:
    report = findings(Driver(cards=(CARD,), cuda=(12, 4)), missing=("torch",))
    assert (report["torch"].status, report["torch"].next[:17]) == ("missing", "pip install torch")
    assert "RTX 3050, compute capability 8.6, 4.0 GiB" in report["CUDA card"].found


@pytest.mark.parametrize(("cuda", "extra"), [((12, 4), "cuda12"), ((13, 0), "cuda13")])
def test_the_cupy_extra_follows_the_driver(cuda: tuple[int, int], extra: str) -> None:
    report = findings(Driver(cards=(CARD,), cuda=cuda), missing=("cupy",), torch_module=torch("12.4", True))
    assert report["CuPy"].status == "note"
    assert report["CuPy"].next == f'pip install "deepinfer-core[{extra}]"'


@pytest.mark.parametrize("name", ["transformers", "safetensors", "gguf"])
def test_a_missing_library_comes_with_its_pip_line(name: str) -> None:
    finding = findings(missing=(name,))[name]
    assert (finding.status, finding.next) == ("missing", f"pip install {name}")


def test_a_torch_without_cuda_on_a_machine_with_a_card_is_pointed_out() -> None:
    report = findings(Driver(cards=(CARD,), cuda=(12, 4)))
    assert "built without CUDA; the driver supports up to CUDA 12.4" in report["torch on the card"].found
    assert "torch on the card" not in findings(Driver(cards=(CARD,), cuda=(12, 4)), torch_module=torch("12.4", True))


def test_a_card_that_is_too_old_is_pointed_out() -> None:
    old = Card(name="GTX 1060", capability=(6, 1), memory=6 << 30)
    assert "8.0 or newer" in findings(Driver(cards=(old,), cuda=(12, 4)))["CUDA card"].next


def test_without_plugins_the_pip_line_is_given() -> None:
    backends = findings(found=Discovery(plugins=(), faults=()))["backends"]
    assert backends.status == "missing"
    assert "no weight scheme and no attention backend" in backends.found
    assert "pip install deepinfer-plugin-w3a16" in backends.next


def test_a_fault_of_a_plugin_is_a_note_with_its_cause() -> None:
    fault = PluginFault(
        name="p2", distribution="d2", version="2.0", stage="load", cause="ImportError: x", error=ImportError("x")
    )
    found = findings(found=Discovery(plugins=(PLUGIN,), faults=(fault,)))["plugin fault"]
    assert found.status == "note"
    assert "d2 2.0" in found.found
    assert "ImportError: x" in found.found


def test_a_cache_directory_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def refuse(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = findings()["cache directory"]
    assert found.status == "note"
    assert "DEEPINFER_CACHE_DIR" in found.next


def test_asking_the_driver_never_raises() -> None:
    driver = ask_driver()
    assert bool(driver.cards) == (driver.problem is None)


def test_the_command_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == int(any(f["status"] == "missing" for f in report))
    assert {"Python", "torch", "CUDA card", "plugins", "backends"} <= {f["what"] for f in report}
