"""The contract, the registry, the config, descriptors and listings work where torch, CuPy and transformers cannot."""

from __future__ import annotations

import json
import pkgutil
from importlib import metadata

import pytest

import deepinfer_core.plugin_api
import deepinfer_core.registry

from .conftest import RunWithout

LIGHT = ["deepinfer_core.errors", "deepinfer_core.config", "deepinfer_core.config_parsing"] + [
    name
    for package in (deepinfer_core.plugin_api, deepinfer_core.registry)
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]

PLUGINS = {
    entry.name: entry.module
    for entry in metadata.entry_points(group="deepinfer.plugins")
    if entry.dist is not None and entry.dist.name.startswith("deepinfer-plugin-")
}


def cli(*argv: str) -> str:
    return f"from deepinfer_core.cli.main import main\nsys.exit(main({list(argv)!r}))"


def test_contract_registry_and_config_import_without_heavy_packages(run_without: RunWithout) -> None:
    code = f"import importlib\nfor name in {LIGHT!r}:\n    importlib.import_module(name)\nprint(len(sys.modules))"
    result = run_without(code, blocked=("torch", "cupy", "transformers", "numpy", "safetensors"))
    assert result.returncode == 0, result.stderr


def test_all_five_distributions_are_installed() -> None:
    assert set(PLUGINS) == {"fp16", "policies", "w4a16", "w3a16"}


@pytest.mark.parametrize("module", PLUGINS.values(), ids=PLUGINS)
def test_a_plugins_descriptors_import_without_heavy_packages(run_without: RunWithout, module: str) -> None:
    code = f"import importlib\nimportlib.import_module({module!r})"
    result = run_without(code, blocked=("torch", "cupy", "transformers", "numpy"))
    assert result.returncode == 0, result.stderr


def test_the_cuda_room_imports_without_cupy(run_without: RunWithout) -> None:
    result = run_without("import deepinfer_core.kernels.cuda, deepinfer_core.kernels.nvrtc", blocked=("cupy",))
    assert result.returncode == 0, result.stderr


def test_plugins_list_needs_no_heavy_package(run_without: RunWithout) -> None:
    result = run_without(cli("plugins", "list", "--json"))
    assert result.returncode == 0, result.stderr
    listed = json.loads(result.stdout)
    assert {p["distribution"] for p in listed["plugins"]} >= {"deepinfer-plugin-fp16", "deepinfer-plugin-w4a16"}


def test_explain_answers_for_a_card_that_is_not_here_without_heavy_packages(run_without: RunWithout) -> None:
    arguments = ["--shape", "1536x576", "--scheme", "w4a16", "--group-size", "32", "--capability", "86"]
    result = run_without(cli("explain", *arguments, "--dtype", "float16", "--json"))
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["device"], data["capability"], data["dtype"]) == ("cuda", "8.6", "float16")
    (layer,) = data["layers"]
    assert layer["rows"][0]["m_from"] == 1
    assert all(row["distribution"] and row["version"] and row["kernel"] for row in layer["rows"])
    assert all(rejection["reason"] for rejection in layer["rejected"])


def test_config_show_needs_no_heavy_package(run_without: RunWithout) -> None:
    result = run_without(cli("config", "show", "--set", "cache.page_size=32"))
    assert result.returncode == 0, result.stderr
    assert "page_size = 32" in result.stdout


def test_doctor_says_what_to_install_where_torch_is_missing(run_without: RunWithout) -> None:
    result = run_without(cli("doctor"))
    assert result.returncode == 1
    assert "pip install torch" in result.stdout
    assert "not ready: torch" in result.stderr
    assert "Traceback" not in result.stderr
