"""Names in a config are checked before anything is loaded, and the message says where each stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.config import load_config
from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import LinearBackend
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.config_names import check_names


@pytest.fixture
def installed(build: Any) -> Catalog:
    parts = LinearBackend(
        name="w4a16", schemes=(build.scheme("w4a16"),), layouts=(build.layout(),), kernels=(build.kernel("w4a16.gemv"),)
    )
    found: Catalog = build.catalog(build.plugin("w", parts, attention=(build.attention("sdpa"),)))
    return found


def check(found: Catalog, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    resolved = load_config(path)
    check_names(
        found,
        linear=resolved.config.linear,
        attention=resolved.config.attention.backend,
        policy=resolved.config.scheduler.policy,
        describe=resolved.describe,
    )


def test_right_names_pass(installed: Catalog, tmp_path: Path) -> None:
    check(
        installed,
        tmp_path / "c.toml",
        '[linear.w4a16]\nbackend = "w4a16"\n'
        'kernels = { "1" = "w4a16.gemv", "9.." = "core.dequantize_matmul" }\n'
        '[attention]\nbackend = "sdpa"\n',
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[linear.w4b16]\n", ["[linear.w4b16]", "did you mean 'w4a16'"]),
        ("[linear.w3a16]\n", ["[linear.w3a16]", "pip install deepinfer-plugin-w3a16"]),
        ('[linear.w4a16]\nbackend = "w4a17"\n', ['linear.w4a16.backend = "w4a17"', "did you mean 'w4a16'"]),
        ('[linear.w4a16]\nkernels = { "1" = "w4a16.gem" }\n', ["linear.w4a16.kernels", "did you mean 'w4a16.gemv'"]),
        ('[attention]\nbackend = "spda"\n', ['attention.backend = "spda"', "did you mean 'sdpa'"]),
        ('[scheduler]\npolicy = "slo"\n', ['scheduler.policy = "slo"', "pip install deepinfer-plugin-policies"]),
    ],
)
def test_an_unknown_name_is_an_error_with_file_key_and_nearest(
    installed: Catalog, tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = tmp_path / "c.toml"
    with pytest.raises(SelectionError) as caught:
        check(installed, path, text)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_a_name_of_a_failed_plugin_keeps_the_original_error(build: Any, tmp_path: Path) -> None:
    cause = ImportError("no acme_kernels")
    with pytest.raises(SelectionError, match="no acme_kernels") as caught:
        check(
            build.catalog(faults=(build.fault("acme", cause),)),
            tmp_path / "c.toml",
            '[attention]\nbackend = "acme"\n',
        )
    assert caught.value.__cause__ is cause
