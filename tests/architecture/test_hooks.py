"""Every hook is documented, typed, questioned by discovery, explained to authors, and tested."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from deepinfer_core.plugin_api import hooks
from deepinfer_core.registry.loading import HOOKS, INFO_HOOK, signature_text

ROOT = Path(__file__).parents[2]
NAMES = sorted(name for name, value in vars(hooks).items() if hasattr(value, "deepinfer_spec"))


def test_there_are_hooks_and_discovery_asks_every_one() -> None:
    assert sorted([*HOOKS, INFO_HOOK]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_has_a_docstring_a_return_type_and_no_arguments(name: str) -> None:
    hook = getattr(hooks, name)
    assert len((inspect.getdoc(hook) or "").split()) >= 4
    signature = inspect.signature(hook)
    assert not signature.parameters
    assert signature.return_annotation is not inspect.Signature.empty
    assert signature_text(name).startswith(f"{name}() -> ")


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_is_explained_to_authors(name: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert any(f"`{name}`" in page for page in pages)


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_is_used_in_a_test(name: str) -> None:
    tests = [page.read_text(encoding="utf-8") for page in (ROOT / "tests" / "unit" / "registry").glob("*.py")]
    assert any(f"def {name}(" in page for page in tests)
