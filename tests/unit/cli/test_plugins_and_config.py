"""``plugins list`` and ``config show``."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from attrs import evolve

from deepinfer_core.cli.main import main
from deepinfer_core.cli.plugins import names_by_kind, to_json
from deepinfer_core.plugin_api import LinearBackend, LinearKernelSpec
from deepinfer_core.registry.discovery import Discovery, LoadedPlugin, PluginFault


def test_plugins_list_names_every_installed_plugin_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    printed = capsys.readouterr().out
    for entry in metadata.entry_points(group="deepinfer.plugins"):
        assert entry.dist is not None
        assert f"{entry.dist.name} {entry.dist.version}" in printed


def test_json_has_plugins_faults_and_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"plugins", "faults", "disabled"}
    w4a16 = next(p for p in data["plugins"] if p["name"] == "w4a16")
    assert w4a16["schemes"] == ["w4a16"]
    assert "w4a16.gemv" in w4a16["kernels"]


def test_a_config_disables_a_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[plugins]\ndisable = ["w3a16"]\n', encoding="utf-8")
    assert main(["plugins", "list", "--json", "--config", str(config)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["disabled"] == ["w3a16"]
    assert "w3a16" not in [p["name"] for p in data["plugins"]]


def test_experimental_kernels_are_told_apart() -> None:
    stable = LinearKernelSpec(name="w.a", scheme="w", layout="l", device="cpu", factory="a:b")
    backend = LinearBackend(name="w", kernels=(stable, evolve(stable, name="w.b", stability="experimental")))
    plugin = LoadedPlugin(name="w", distribution="d", version="1", entry_point="w = w", backends=(backend,))
    kinds = names_by_kind(plugin)
    assert (kinds["kernels"], kinds["experimental"]) == (["w.a", "w.b"], ["w.b"])


def test_a_fault_is_listed_with_stage_and_cause() -> None:
    fault = PluginFault(
        name="p2", distribution="d2", version="2.0", stage="load", cause="ImportError: x", error=ImportError("x")
    )
    assert to_json(Discovery(plugins=(), faults=(fault,)))["faults"] == [
        {"name": "p2", "distribution": "d2", "version": "2.0", "stage": "load", "cause": "ImportError: x"}
    ]


def test_config_show_prints_values_with_their_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[scheduler]\npolicy = "auto"\n', encoding="utf-8")
    assert main(["config", "show", "--config", str(config), "--max-model-len", "1024", "--cache.page_size", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    origins = dict(line.rsplit(" # ", 1) for line in lines if " # " in line)
    by_key = {text.strip(): origin for text, origin in origins.items()}
    assert by_key['policy = "auto"'] == f"file {config}"
    assert by_key["max_model_len = 1024"] == "flag"
    assert by_key["page_size = 32"] == "flag"
    assert by_key['backend = "auto"'] == "default"


def test_config_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--backend", "w4a16=acme"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["linear.w4a16.backend"] == {"value": "acme", "origin": "flag"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "cache.page_sise=3"], "did you mean 'page_size'"),
        (["--set", "cache.page_size"], "KEY=VALUE"),
        (["--config", "no-such.toml"], "no-such.toml: there is no such config file"),
    ],
)
def test_a_wrong_config_is_one_clear_error_and_exit_code_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *arguments]) == 2
    printed = capsys.readouterr()
    assert part in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
