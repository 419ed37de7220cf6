"""What becomes of each layer is decided, and refused, before any work (QW-04)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.checkpoint import DENSE, LayerFormat
from deepinfer_core.checkpoint.base import Checkpoint, SourceGroups
from deepinfer_core.checkpoint.writer import PlannedTensor
from deepinfer_core.errors import ConfigError, SelectionError
from deepinfer_core.model.shapes import LinearModule
from deepinfer_core.plugin_api import QuantizationRecipe, RecipeRule, TensorSpec, WeightSchemeSpec
from deepinfer_core.quantize.layer_plan import LayerPlan, Overrides, auto_group_size, plan_layers
from deepinfer_core.registry.catalog import Catalog, Registered

PARTS = (
    TensorSpec(name="packed", dtype="uint8", per=2),
    TensorSpec(name="scales", dtype="float16", per="group"),
    TensorSpec(name="zeros", dtype="float16", per="group", needs_zeros=True),
)
W4 = WeightSchemeSpec(
    name="w4a16", bits=4, tensors=PARTS, group_sizes=(32, 64, 128, -1), zeros=True, factory="no:where"
)
PLAIN = WeightSchemeSpec(name="acme4", bits=4, tensors=PARTS, group_sizes=(64,), factory="no:where")
CATALOG = Catalog(
    schemes={s.name: Registered(spec=s, backend=None, distribution="acme", version="1") for s in (W4, PLAIN)}
)
GGUF = LayerFormat("w4a16", 32, True, "deepinfer-plugin-w4a16")


class FakeSource(Checkpoint):
    """Layers by name: (N, K), format, and the groups that the values were quantized in."""

    path = Path("fake")

    def __init__(self, layers: dict[str, tuple[tuple[int, int], LayerFormat, SourceGroups]], tied: bool = False):
        self.layers = layers
        self.hf_config: dict[str, Any] = {"tie_word_embeddings": tied}

    def layer_format(self, module: str) -> LayerFormat:
        return self.layers[module][1] if module in self.layers else DENSE

    def source_groups(self, module: str) -> SourceGroups:
        return self.layers[module][2] if module in self.layers else SourceGroups()

    def stored_names(self) -> frozenset[str]:
        names = {"model.embed_tokens.weight"}
        for module, (_, form, _groups) in self.layers.items():
            names |= {f"{module}.weight"} if form.dense else {f"{module}.{p.name}" for p in PARTS}
        return frozenset(names)

    def file_of(self, name: str) -> Path:
        return self.path

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        (n, k), form, _ = self.layers[name.rpartition(".")[0]]
        return (n, k) if form.dense else (n, k // 2 if name.endswith("packed") else k // form.group_size)

    def _stored_dtype(self, name: str) -> str:
        return "uint8" if name.endswith("packed") else "float16"

    def _read(self, name: str) -> torch.Tensor:
        raise AssertionError("planning reads no tensor")


UP = "model.layers.0.mlp.up_proj"


def plan_one(
    k: int,
    rule: RecipeRule,
    form: LayerFormat = DENSE,
    groups: SourceGroups | None = None,
    overrides: Overrides | None = None,
) -> LayerPlan:
    source = FakeSource({UP: ((48, k), form, groups or SourceGroups(form.group_size, form.zeros))})
    modules = [LinearModule(name=UP, n=48, k=k, bias=False)]
    recipe = QuantizationRecipe(name="r", description="", rules=(rule,))
    (plan,) = plan_layers(modules, source, recipe, CATALOG, overrides or Overrides())
    return plan


def test_tensors_follow_from_the_schemes_descriptor_with_a_short_last_group() -> None:
    plan = plan_one(160, RecipeRule(pattern="*", scheme="w4a16", group_size=128, zeros=True))
    assert plan.target == LayerFormat("w4a16", 128, True, "acme")
    assert plan.tensors == (
        PlannedTensor(f"{UP}.packed", "uint8", (48, 80)),
        PlannedTensor(f"{UP}.scales", "float16", (48, 2)),
        PlannedTensor(f"{UP}.zeros", "float16", (48, 2)),
    )
    assert not plan.carried


@pytest.mark.parametrize(
    ("k", "source_group", "expected"),
    [
        (576, 32, 32),  # a GGUF's blocks are kept
        (576, 16, 128),  # Q6_K's cannot be held
        (576, 0, 128),
        (128, 0, 128),
        (96, 0, 32),  # shorter than 128: the largest group that divides K
        (64, 0, 64),
        (50, 0, -1),  # none divides: the whole row
    ],
)
def test_auto_keeps_the_sources_groups_else_128(k: int, source_group: int, expected: int) -> None:
    assert auto_group_size(W4, k, source_group) == expected
    plan = plan_one(k, RecipeRule(pattern="*", scheme="w4a16"), groups=SourceGroups(source_group))
    assert plan.target.group_size == expected


def test_auto_zeros_are_those_of_the_source_where_the_scheme_has_them() -> None:
    rule = RecipeRule(pattern="*", scheme="w4a16")
    assert plan_one(64, rule, groups=SourceGroups(32, True)).target.zeros
    assert not plan_one(64, rule, groups=SourceGroups(32, False)).target.zeros
    assert not plan_one(64, RecipeRule(pattern="*", scheme="acme4"), groups=SourceGroups(64, True)).target.zeros


def test_a_layer_in_the_wanted_form_is_carried_over() -> None:
    plan = plan_one(64, RecipeRule(pattern="*", scheme="w4a16"), GGUF)
    assert plan.carried
    assert plan.target == GGUF
    assert [t.name for t in plan.tensors] == [f"{UP}.packed", f"{UP}.scales", f"{UP}.zeros"]
    assert plan_one(64, RecipeRule(pattern="*", scheme="fp16"), GGUF).carried


@pytest.mark.parametrize("overrides", [Overrides(group_size=64), Overrides(zeros=False)])
def test_a_layer_is_never_quantized_twice_in_the_same_scheme(overrides: Overrides) -> None:
    with pytest.raises(ConfigError, match=rf"layer {UP} is w4a16 \(group 32, zeros\) already.*second time"):
        plan_one(64, RecipeRule(pattern="*", scheme="w4a16"), GGUF, overrides=overrides)


def test_what_the_command_line_says_wins_over_the_recipe() -> None:
    rule = RecipeRule(pattern="*", scheme="w4a16", group_size=32, zeros=False)
    plan = plan_one(256, rule, overrides=Overrides(group_size=-1, zeros=True))
    assert (plan.target.group_size, plan.target.zeros) == (-1, True)
    assert plan.tensors[1] == PlannedTensor(f"{UP}.scales", "float16", (48, 1))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            RecipeRule(pattern="*", scheme="w4a16", group_size=48),
            rf"layer {UP} \(N = 48, K = 64\): w4a16 cannot hold groups of 48; possible: 32, 64, 128, -1",
        ),
        (RecipeRule(pattern="*", scheme="w4a16", group_size=0), "cannot hold groups of 0"),
        (RecipeRule(pattern="*", scheme="acme4", zeros=True), rf"layer {UP}: acme4 stores no zeros"),
    ],
)
def test_what_a_scheme_cannot_hold_is_refused_with_the_layer(rule: RecipeRule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_one(64, rule)


def test_a_scheme_that_is_not_installed_gets_its_pip_line_even_when_no_layer_matches() -> None:
    with pytest.raises(SelectionError, match=r"pip install deepinfer-plugin-w3a16"):
        plan_one(64, RecipeRule(pattern="nothing", scheme="w3a16"))


def test_a_recipe_that_matches_nothing_is_refused_and_an_idle_rule_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match=r"no pattern matches a layer of fake: model.layer.\*"):
        plan_one(64, RecipeRule(pattern="model.layer.*", scheme="w4a16"))
    source = FakeSource({UP: ((48, 64), DENSE, SourceGroups())})
    rules = (RecipeRule(pattern="nothing.*", scheme="w4a16"), RecipeRule(pattern="*", scheme="w4a16"))
    recipe = QuantizationRecipe(name="r", description="", rules=rules)
    with caplog.at_level(logging.WARNING, "deepinfer"):
        plan_layers([LinearModule(name=UP, n=48, k=64, bias=False)], source, recipe, CATALOG, Overrides())
    assert "nothing.*" in caplog.text


def test_a_tied_head_is_stored_once_unless_it_is_quantized() -> None:
    head = LinearModule(name="lm_head", n=48, k=64, bias=False)
    source = FakeSource({"model.embed_tokens": ((48, 64), DENSE, SourceGroups())}, tied=True)
    for pattern, stored in (("lm_head", 2), ("*", 2)):
        recipe = QuantizationRecipe(name="r", description="", rules=(RecipeRule(pattern=pattern, scheme="w4a16"),))
        (plan,) = plan_layers([head], source, recipe, CATALOG, Overrides())
        assert len(plan.tensors) == stored
    keep = QuantizationRecipe(name="r", description="", rules=(RecipeRule(pattern="lm_head", scheme="fp16"),))
    (plan,) = plan_layers([head], source, keep, CATALOG, Overrides())
    assert plan.tensors == ()
    assert plan.carried
