"""Recipes come by name or from a file; what is wrong in them is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_core.errors import ConfigError, SelectionError
from deepinfer_core.plugin_api import QuantizationRecipe, RecipeRule
from deepinfer_core.quantize.recipes import find_recipe, matching_rule
from deepinfer_core.registry.catalog import Catalog, Registered

MIXED = QuantizationRecipe(name="mixed", description="", rules=(RecipeRule(pattern="*", scheme="w3a16"),))
CATALOG = Catalog(recipes={"mixed": Registered(spec=MIXED, backend=None, distribution="acme", version="1")})


def written(directory: Path, text: str) -> str:
    path = directory / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_registered_name_is_found_and_a_misspelt_one_named_with_the_nearest() -> None:
    assert find_recipe("mixed", CATALOG) is MIXED
    with pytest.raises(SelectionError, match=r"recipe 'mixd'; did you mean 'mixed'"):
        find_recipe("mixd", CATALOG)


def test_a_file_gives_rules_in_order(tmp_path: Path) -> None:
    text = """
        description = "mine"
        [[rules]]
        pattern = "model.layers.0.*"
        scheme = "fp16"
        [[rules]]
        pattern = "model.layers.*.mlp.*"
        scheme = "w3a16"
        group_size = 64
        zeros = true
        [[rules]]
        pattern = "model.layers.*"
        scheme = "w4a16"
        group_size = "auto"
        zeros = "auto"
    """
    recipe = find_recipe(written(tmp_path, text), CATALOG)
    assert recipe.description == "mine"
    assert recipe.rules == (
        RecipeRule(pattern="model.layers.0.*", scheme="fp16"),
        RecipeRule(pattern="model.layers.*.mlp.*", scheme="w3a16", group_size=64, zeros=True),
        RecipeRule(pattern="model.layers.*", scheme="w4a16"),
    )
    assert matching_rule(recipe, "model.layers.0.mlp.up_proj") == recipe.rules[0]
    assert matching_rule(recipe, "model.layers.1.mlp.up_proj") == recipe.rules[1]
    assert matching_rule(recipe, "model.layers.1.self_attn.q_proj") == recipe.rules[2]
    assert matching_rule(recipe, "lm_head") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = ", "is not valid TOML"),
        ("", r"has no \[\[rules\]\]"),
        ("rules = 3", r"has no \[\[rules\]\]"),
        ("rules = [3]", "rule 1 must be a table"),
        ('[[rule]]\npattern = "*"\nscheme = "w4a16"', r"unknown key 'rule'; did you mean 'rules'\?"),
        ('[[rules]]\npatern = "*"\nscheme = "w4a16"', r"rule 1: unknown key 'patern'; did you mean 'pattern'\?"),
        ('[[rules]]\npattern = "*"', "rule 1: scheme must be text, got None"),
        ('[[rules]]\npattern = "*"\nscheme = 4', "rule 1: scheme must be text, got 4"),
        ('[[rules]]\npattern = "*"\nscheme = "w4a16"\ngroup_size = "64"', "group_size must be a number.*got '64'"),
        ('[[rules]]\npattern = "*"\nscheme = "w4a16"\ngroup_size = true', "group_size must be a number.*got True"),
        ('[[rules]]\npattern = "*"\nscheme = "w4a16"\nzeros = "yes"', 'zeros must be true, false or "auto", got'),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        find_recipe(path, CATALOG)
    assert path in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml cannot be read"):
        find_recipe(str(tmp_path / "nowhere.toml"), CATALOG)
