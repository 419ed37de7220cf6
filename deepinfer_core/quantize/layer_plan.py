"""What will become of each layer, decided and checked before any work is done."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from attrs import frozen

from deepinfer_core.checkpoint import DENSE, Checkpoint, LayerFormat
from deepinfer_core.checkpoint.writer import PlannedTensor
from deepinfer_core.errors import ConfigError
from deepinfer_core.model.shapes import HEAD, LinearModule
from deepinfer_core.plugin_api import WHOLE_ROW, QuantizationRecipe, RecipeRule, WeightSchemeSpec
from deepinfer_core.quantize.recipes import matching_rule
from deepinfer_core.registry.catalog import Catalog

logger = logging.getLogger("deepinfer")

DEFAULT_GROUP = 128


@frozen(kw_only=True)
class LayerPlan:
    """One linear layer: where it comes from and what it becomes.

    Attributes:
        module: HF module name.
        n: Outputs.
        k: Inputs.
        source: Its format in the source.
        target: Its format in the result.
        tensors: What will be written for it; empty for a tied head, which is the embedding.
    """

    module: str
    n: int
    k: int
    source: LayerFormat
    target: LayerFormat
    tensors: tuple[PlannedTensor, ...]

    @property
    def carried(self) -> bool:
        """True when the stored tensors are copied bit for bit."""
        return self.source == self.target


@frozen(kw_only=True)
class Overrides:
    """What the command line says over the recipe; None leaves the recipe's word."""

    group_size: int | None = None
    zeros: bool | None = None


def plan_layers(
    modules: Iterable[LinearModule],
    source: Checkpoint,
    recipe: QuantizationRecipe,
    catalog: Catalog,
    overrides: Overrides,
) -> tuple[LayerPlan, ...]:
    """Decide what each layer becomes.

    Raises:
        SelectionError: A rule names a scheme that no installed plugin brings.
        ConfigError: A scheme cannot hold the group size or zeros, a layer would be quantized a second time in the same
            scheme, or the recipe matches no layer at all.
    """
    for rule in recipe.rules:
        if rule.scheme != DENSE.scheme:
            catalog.scheme(rule.scheme)
    plans, used = [], set[RecipeRule]()
    for module in modules:
        chosen = matching_rule(recipe, module.name)
        if chosen is not None:
            used.add(chosen)
        plans.append(_plan_layer(module, source, chosen, catalog, overrides))
    unused = [rule.pattern for rule in recipe.rules if rule not in used]
    if len(unused) == len(recipe.rules):
        raise ConfigError(f"recipe {recipe.name}: no pattern matches a layer of {source.path}: {', '.join(unused)}")
    if unused:
        logger.warning("recipe %s: patterns that decide no layer: %s", recipe.name, ", ".join(unused))
    return tuple(plans)


def _plan_layer(
    module: LinearModule, source: Checkpoint, rule: RecipeRule | None, catalog: Catalog, overrides: Overrides
) -> LayerPlan:
    stored = source.layer_format(module.name)
    if rule is None or rule.scheme == DENSE.scheme:
        return _carry(module, source, stored)
    registered = catalog.scheme(rule.scheme)
    spec = registered.spec
    groups = source.source_groups(module.name)
    group_size = overrides.group_size if overrides.group_size is not None else rule.group_size
    if group_size is None:
        group_size = auto_group_size(spec, module.k, groups.group_size)
    zeros = overrides.zeros if overrides.zeros is not None else rule.zeros
    if zeros is None:
        zeros = groups.zeros and spec.zeros
    _check_fit(module, spec, group_size, zeros)
    target = LayerFormat(spec.name, group_size, zeros, registered.distribution)
    if stored.scheme == spec.name:
        if (stored.group_size, stored.zeros) != (group_size, zeros):
            raise ConfigError(
                f"layer {module.name} is {stored} already and would be quantized a second time to {target}; leave "
                "group_size and zeros at auto to carry it over, or convert from the model's dense weights"
            )
        return _carry(module, source, stored)
    columns = ((part, part.columns(module.k, group_size)) for part in spec.stored(zeros=zeros))
    tensors = tuple(
        PlannedTensor(f"{module.name}.{part.name}", "float16" if part.dtype == "act" else part.dtype, (module.n, width))
        for part, width in columns
    )
    return LayerPlan(module=module.name, n=module.n, k=module.k, source=stored, target=target, tensors=tensors)


def _carry(module: LinearModule, source: Checkpoint, stored: LayerFormat) -> LayerPlan:
    if stored.dense and module.name == HEAD and source.tied:
        tensors: tuple[PlannedTensor, ...] = ()
    elif stored.dense:
        name = f"{module.name}.weight"
        tensors = (PlannedTensor(name, source.written_dtype(name), source.shape(name)),)
    else:
        names = sorted(n for n in source.names() if n.rpartition(".")[0] == module.name and not n.endswith(".bias"))
        tensors = tuple(PlannedTensor(n, source.dtype(n), source.shape(n)) for n in names)
    return LayerPlan(module=module.name, n=module.n, k=module.k, source=stored, target=stored, tensors=tensors)


def auto_group_size(spec: WeightSchemeSpec, k: int, source_group: int) -> int:
    """Return the group size that ``auto`` means for a layer.

    The source's own groups where the scheme can hold them; else 128; for rows shorter than that the largest group that
    divides K, else the whole row.

    Args:
        spec: The scheme.
        k: Inputs of the layer.
        source_group: Group of the source's values; 0 when they were not quantized.
    """
    if not spec.group_sizes:
        return 0
    if source_group in spec.group_sizes:
        return source_group
    if k >= DEFAULT_GROUP and DEFAULT_GROUP in spec.group_sizes:
        return DEFAULT_GROUP
    dividing = [g for g in spec.group_sizes if 0 < g <= min(k, DEFAULT_GROUP) and k % g == 0]
    if dividing:
        return max(dividing)
    return WHOLE_ROW if WHOLE_ROW in spec.group_sizes else min(spec.group_sizes)


def _check_fit(module: LinearModule, spec: WeightSchemeSpec, group_size: int, zeros: bool) -> None:
    if group_size not in (spec.group_sizes or (0,)):
        raise ConfigError(
            f"layer {module.name} (N = {module.n}, K = {module.k}): {spec.name} cannot hold groups of {group_size}; "
            f"possible: {', '.join(map(str, spec.group_sizes)) or '0 (no groups)'} (-1 is the whole row)"
        )
    if zeros and not spec.zeros:
        raise ConfigError(f"layer {module.name}: {spec.name} stores no zeros; set zeros = false")
