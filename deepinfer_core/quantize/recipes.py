"""Recipes: a registered name, or a TOML file with rules of the same form."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deepinfer_core.errors import ConfigError, nearest
from deepinfer_core.plugin_api import QuantizationRecipe, RecipeRule
from deepinfer_core.registry.catalog import Catalog

_RULE_KEYS = ("pattern", "scheme", "group_size", "zeros")
_TOP_KEYS = ("description", "rules")


def find_recipe(recipe: str, catalog: Catalog) -> QuantizationRecipe:
    """Return a recipe by its registered name or from a TOML file.

    Args:
        recipe: A name such as ``"mixed"``, or a path (it ends in ``.toml`` or contains a separator).
        catalog: Where names are looked up.

    Raises:
        SelectionError: No plugin registers the name.
        ConfigError: The file cannot be read or does not hold rules.
    """
    if recipe.endswith(".toml") or "/" in recipe or "\\" in recipe:
        return recipe_from_file(Path(recipe))
    return catalog.recipe(recipe).spec


def recipe_from_file(path: Path) -> QuantizationRecipe:
    """Read rules from a TOML file.

    ::

        [[rules]]
        pattern = "model.layers.*.mlp.*"   # glob on the module name; the first rule that matches decides
        scheme = "w3a16"                   # "fp16" keeps the layer as it is
        group_size = 64                    # or "auto" (the default); -1 is the whole row
        zeros = true                       # or "auto" (the default)

    Raises:
        ConfigError: With the file, the rule and the key that is wrong.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error
    _check_keys(content, _TOP_KEYS, str(path))
    rules = content.get("rules")
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"recipe {path} has no [[rules]]; each needs a pattern and a scheme")
    return QuantizationRecipe(
        name=str(path),
        description=str(content.get("description", "rules of a file")),
        rules=tuple(_rule(rule, f"{path}: rule {i}") for i, rule in enumerate(rules, start=1)),
    )


def matching_rule(recipe: QuantizationRecipe, module: str) -> RecipeRule | None:
    """Return the first rule whose pattern matches a module name; None when the layer stays as it is."""
    return next((rule for rule in recipe.rules if fnmatchcase(module, rule.pattern)), None)


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, known)}")


def _rule(table: object, where: str) -> RecipeRule:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table with a pattern and a scheme, got {table!r}")
    _check_keys(table, _RULE_KEYS, where)
    for key in ("pattern", "scheme"):
        if not isinstance(table.get(key), str):
            raise ConfigError(f"{where}: {key} must be text, got {table.get(key)!r}")
    group_size, zeros = table.get("group_size", "auto"), table.get("zeros", "auto")
    if group_size != "auto" and (not isinstance(group_size, int) or isinstance(group_size, bool)):
        raise ConfigError(f'{where}: group_size must be a number, -1 (whole row) or "auto", got {group_size!r}')
    if zeros != "auto" and not isinstance(zeros, bool):
        raise ConfigError(f'{where}: zeros must be true, false or "auto", got {zeros!r}')
    return RecipeRule(
        pattern=table["pattern"],
        scheme=table["scheme"],
        group_size=None if group_size == "auto" else group_size,
        zeros=None if zeros == "auto" else zeros,
    )
