"""A third party's whole plugin, installed by pip: it is listed, explained, tested by its own suite, and it answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_w4"
SHAPE = (
    "--shape", "96x64", "--scheme", "w4a16", "--group-size", "32", "--device", "cpu", "--dtype", "float32",
)  # fmt: skip


def run(*command: str | Path, cwd: Path, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"DEEPINFER_CACHE_DIR": str(cwd / "cache"), "PYTHONUTF8": "1"}
    if site is not None:
        env["PYTHONPATH"] = str(site)
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the example: building leaves nothing in the source tree."""
    copy = tmp_path_factory.mktemp("acme") / "acme_w4"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    return copy


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    """Return the folder that pip installed the example into."""
    target = project.parent / "site"
    done = run(
        "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--target", target, project,
        cwd=project.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


def explained(site: Path, tmp_path: Path, *more: str) -> Any:
    done = run("deepinfer_core", "explain", *SHAPE, *more, "--json", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads(done.stdout)["layers"]
    return layer


def test_installing_it_is_all_it_takes_to_see_its_names(site: Path, tmp_path: Path) -> None:
    done = run("deepinfer_core", "plugins", "list", "--json", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    acme = listed["acme-w4"]
    assert (acme["distribution"], acme["version"], acme["kernels"]) == ("acme-w4", "1.0.0", ["acme-w4.gemv"])
    assert {"fp16", "w4a16"} <= set(listed)


def test_its_backend_serves_one_row_and_core_the_others_with_a_warning(site: Path, tmp_path: Path) -> None:
    layer = explained(site, tmp_path, "--linear.w4a16.backend", "acme-w4")
    assert [(row["m_from"], row["m_to"], row["kernel"], row["distribution"]) for row in layer["rows"]] == [
        (1, 1, "acme-w4.gemv", "acme-w4"),
        (2, 2048, "core.dequantize_matmul", "deepinfer-core"),
    ]
    (warning,) = layer["warnings"]
    assert "2..2048" in warning


def test_named_nowhere_it_competes_by_priority_over_the_same_layout(site: Path, tmp_path: Path) -> None:
    layer = explained(site, tmp_path)
    assert [(row["m_from"], row["kernel"]) for row in layer["rows"]] == [
        (1, "acme-w4.gemv"),
        (2, "w4a16.dequantize_matmul_cpu"),
    ]
    assert layer["layout"] == "w4a16.rows.v1"
    assert layer["warnings"] == []


def test_what_it_does_not_serve_is_told_with_the_reason(site: Path, tmp_path: Path) -> None:
    done = run("deepinfer_core", "explain", *SHAPE, "--shape", "96x72", cwd=tmp_path, site=site)
    assert "not acme-w4.gemv (acme-w4 1.0.0): needs K to be a multiple of the group: K = 72, group 32" in " ".join(
        done.stdout.split()
    )


def test_its_own_tests_pass_where_it_is_installed(site: Path, project: Path) -> None:
    done = run("pytest", "-q", "-p", "no:cacheprovider", project / "tests", cwd=project.parent, site=site)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_a_model_answers_through_its_kernel(site: Path, tiny_chat_model: Path, tmp_path: Path) -> None:
    quantized = run(
        "deepinfer_core", "quantize", tiny_chat_model, "w4", "--recipe", "w4", "--group-size", "32", cwd=tmp_path,
        site=site,
    )  # fmt: skip
    assert quantized.returncode == 0, quantized.stderr
    answers = []
    for backend in ("acme-w4", "w4a16"):
        done = run(
            "deepinfer_core", "generate", "w4", "--prompt", "Hello", "--max-tokens", "8", "--ignore-eos",
            "--device", "cpu", "--dtype", "float32", "--backend", f"w4a16={backend}",
            cwd=tmp_path, site=site,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1] != ""
