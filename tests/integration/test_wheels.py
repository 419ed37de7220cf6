"""What a user gets from the wheels alone: an empty environment, one pip install, names, and an answer."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECTS = (".", "plugins/fp16", "plugins/policies", "plugins/w4a16", "plugins/w3a16_mixed")


def _run(*command: str | Path, cwd: Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"PYTHONUTF8": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the five wheels, built from copies: a stale build folder cannot slip into them."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    skip = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "tests")
    for project in PROJECTS:
        origin, copy = ROOT / project, sources / Path(project).name
        copy.mkdir(exist_ok=True)
        packages = [p.parent for p in origin.glob("deepinfer_*/__init__.py")]
        assert len(packages) == 1, packages
        shutil.copytree(packages[0], copy / packages[0].name, ignore=skip)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(origin / name, copy / name)
        _run(
            sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, copy,
            cwd=sources,
        )  # fmt: skip
    return built


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script folder of an empty environment after one pip install."""
    root = tmp_path_factory.mktemp("user")
    venv.create(root / "env", with_pip=True)
    scripts = root / "env" / ("Scripts" if os.name == "nt" else "bin")
    constraints = root / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    _run(
        scripts / "python", "-m", "pip", "install", "--no-compile", "--find-links", wheels, "-c", constraints,
        "deepinfer-plugin-w3a16",
        cwd=root,
    )  # fmt: skip
    return scripts


@pytest.fixture(scope="module")
def listed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = _run(installed / "deepinfer", "plugins", "list", "--json", cwd=tmp_path_factory.mktemp("elsewhere"))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_wheels_hold_package_data_and_no_tests(wheels: Path) -> None:
    found = {path.name.partition("-")[0]: zipfile.ZipFile(path).namelist() for path in wheels.glob("*.whl")}
    assert set(found) == {
        tomllib.loads((ROOT / p / "pyproject.toml").read_text())["project"]["name"].replace("-", "_") for p in PROJECTS
    }
    for name, files in found.items():
        assert any(f.endswith("/py.typed") for f in files), name
        assert any(f.endswith("licenses/LICENSE") for f in files), name
        assert not any(f.startswith("tests/") or "/tests/" in f for f in files), name
    for project in PROJECTS:
        (package,) = (p.parent for p in (ROOT / project).glob("deepinfer_*/__init__.py"))
        data = {
            f.relative_to(ROOT / project).as_posix() for f in package.rglob("*") if f.suffix in (".cu", ".cuh", ".txt")
        }
        assert data <= {f for files in found.values() for f in files}


def test_one_install_brings_every_plugin_without_a_fault(listed: dict[str, Any]) -> None:
    assert listed["faults"] == []
    assert {p["distribution"] for p in listed["plugins"]} == {
        "deepinfer-plugin-fp16", "deepinfer-plugin-policies", "deepinfer-plugin-w4a16", "deepinfer-plugin-w3a16",
    }  # fmt: skip


def test_each_wheel_that_registers_something_lists_its_names(listed: dict[str, Any]) -> None:
    plugins = {p["distribution"].removeprefix("deepinfer-plugin-"): p for p in listed["plugins"]}
    assert plugins["fp16"]["schemes"] == ["fp16"]
    assert "sdpa" in plugins["fp16"]["attention"]
    assert (plugins["w4a16"]["schemes"], plugins["w4a16"]["recipes"]) == (["w4a16"], ["w4"])
    assert plugins["w3a16"]["schemes"] == ["w3a16"]
    assert set(plugins["w3a16"]["recipes"]) == {"w3", "mixed"}
    assert plugins["policies"]["policies"] == ["serial", "dual_stream", "mixed", "time_sliced", "slo"]
    for name in ("fp16", "w4a16", "w3a16"):
        assert plugins[name]["kernels"]
        assert plugins[name]["layouts"]


def test_mixed_checkpoint_answers_from_the_wheels_alone(installed: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    where = _run(installed / "python", "-c", "import deepinfer_core; print(deepinfer_core.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent), "the wheel is what runs, not the source tree"
    _run(
        installed / "deepinfer", "quantize", tiny_chat_model, "mixed", "--recipe", "mixed", "--group-size", "32",
        cwd=tmp_path,
    )  # fmt: skip
    layers = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]["layers"]
    assert {entry["scheme"] for entry in layers.values()} == {"w4a16", "w3a16"}
    done = _run(
        installed / "deepinfer", "generate", "mixed", "--chat", "--prompt", "Hello", "--ignore-eos", cwd=tmp_path
    )
    assert "128 tokens, length" in done.stderr
    assert done.stdout.strip()


def test_policy_that_is_not_there_is_a_clear_error(installed: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    done = _run(
        installed / "deepinfer", "generate", tiny_chat_model, "--prompt", "x", "--policy", "no-such-policy",
        cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "no-such-policy" in done.stderr
    assert "Traceback" not in done.stderr
