"""A broken, a duplicate and a misspelt plugin installed beside good ones: the good ones work, each fault is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

EXPLAIN = (
    "explain", "--shape", "1536x576", "--group-size", "32", "--capability", "86", "--dtype", "float16", "--json",
)  # fmt: skip
FIXTURES = Path(__file__).parents[1] / "fixtures" / "plugins"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder in which every fixture plugin is installed, as an installer would leave it."""
    folder = tmp_path / "site"
    folder.mkdir()
    for source in sorted(FIXTURES.iterdir()):
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for module in source.glob("*.py"):
            shutil.copy(module, folder)
        info = folder / f"{source.name}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
        )
        entries = project["entry-points"]["deepinfer.plugins"].items()
        lines = "".join(f"{name} = {value}\n" for name, value in entries)
        (info / "entry_points.txt").write_text(f"[deepinfer.plugins]\n{lines}", encoding="utf-8")
    return folder


def deepinfer(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_core", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(site), "DEEPINFER_CACHE_DIR": str(site / "cache")},
        timeout=120,
        check=False,
    )


def listed(result: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(result.stdout)


def test_the_good_ones_are_listed_and_each_fault_is_named(site: Path) -> None:
    result = deepinfer(site, "plugins", "list", "--json")
    assert result.returncode == 0, result.stderr
    names = [p["name"] for p in listed(result)["plugins"]]
    assert names.count("acme-good") == 1
    assert {"fp16", "w4a16", "w3a16"} <= set(names)
    faults = {f["name"]: f for f in listed(result)["faults"] if f["distribution"].startswith("acme")}
    assert set(faults) == {"acme-broken", "acme-misspelt", "acme-twin-a", "acme-twin-b"}
    assert "libacme.so.1" in faults["acme-broken"]["cause"]
    assert "did you mean 'deepinfer_linear_backends'" in faults["acme-misspelt"]["cause"]
    assert "'acme-twin-b' (acme-twin-b 1.0)" in faults["acme-twin-a"]["cause"]
    assert all(f["version"] == "1.0" for f in faults.values())


def test_the_table_for_people_names_the_same(site: Path) -> None:
    result = deepinfer(site, "plugins", "list")
    for part in ("acme-good", "w4a16.gemv", "acme-broken", "libacme.so.1", "acme-misspelt", "acme-twin-a"):
        assert part in result.stdout


def test_strict_mode_is_fatal(site: Path, tmp_path: Path) -> None:
    assert deepinfer(site, "plugins", "list", "--strict").returncode == 3
    config = tmp_path / "c.toml"
    config.write_text("[plugins]\nstrict = true\n", encoding="utf-8")
    result = deepinfer(site, "explain", "--config", str(config), "--shape", "64x64")
    assert result.returncode == 3
    for part in ("acme-broken", "acme-misspelt", "acme-twin-a", "acme-twin-b"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_disabling_one_twin_brings_the_other_back(site: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[plugins]\ndisable = ["acme-twin-b", "acme-broken", "acme_misspelt"]\n', encoding="utf-8")
    result = deepinfer(site, "plugins", "list", "--json", "--config", str(config))
    assert "acme-twin-a" in [p["name"] for p in listed(result)["plugins"]]
    assert not [f for f in listed(result)["faults"] if f["distribution"].startswith("acme")]


def test_a_config_that_names_a_failed_backend_gets_its_original_error(site: Path) -> None:
    result = deepinfer(site, "explain", "--shape", "64x64", "--set", "linear.w4a16.backend=acme-broken")
    assert result.returncode == 4
    assert "libacme.so.1: cannot open shared object file" in result.stderr
    assert "Traceback" not in result.stderr


def test_automatic_choice_works_and_says_which_plugins_were_left_out(site: Path) -> None:
    result = deepinfer(
        site,
        "explain",
        "--shape",
        "1536x576",
        "--group-size",
        "32",
        "--capability",
        "86",
        "--dtype",
        "float16",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    (layer,) = listed(result)["layers"]
    (warning,) = layer["warnings"]
    assert "acme-broken (acme-broken 1.0)" in warning
    assert layer["rows"][0]["kernel"] in warning


def test_a_third_partys_kernel_serves_where_the_config_names_it(site: Path) -> None:
    result = deepinfer(site, *EXPLAIN, "--set", "linear.w4a16.kernels.1=acme-good.gemv")
    assert result.returncode == 0, result.stderr
    (layer,) = listed(result)["layers"]
    assert layer["rows"][0]["distribution"] == "acme-good"
    assert layer["rows"][1]["distribution"] == "deepinfer-plugin-w4a16"
