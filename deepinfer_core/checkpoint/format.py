"""How a layer is stored, and the patterns of `quantization_config` that say so."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from deepinfer_core.errors import CheckpointError

QUANT_METHOD = "deepinfer"
FORMAT_VERSION = 1


@frozen
class LayerFormat:
    """How one linear layer is stored.

    Attributes:
        scheme: Weight scheme name; ``"fp16"`` is a dense floating weight of whatever dtype.
        group_size: Codes along K that share a scale; -1 for the whole row; 0 for a dense weight.
        zeros: The layer stores a zero per group.
        distribution: The distribution that brings the scheme, for the ``pip install`` line of an error.
    """

    scheme: str
    group_size: int = 0
    zeros: bool = False
    distribution: str | None = None

    @property
    def dense(self) -> bool:
        """True for a plain floating weight."""
        return self.scheme == "fp16"

    def __str__(self) -> str:
        if self.dense:
            return self.scheme
        group = "whole row" if self.group_size == -1 else str(self.group_size)
        return f"{self.scheme} (group {group}, {'zeros' if self.zeros else 'no zeros'})"


DENSE = LayerFormat("fp16")


class LayerPatterns:
    """Globs on module names in order; the first that matches decides, an unmatched module is dense."""

    def __init__(self, patterns: Iterable[tuple[str, LayerFormat]]) -> None:
        self.patterns = tuple(patterns)
        self._resolved: dict[str, LayerFormat] = {}

    def format_of(self, module: str) -> LayerFormat:
        """Return the format of a module such as ``model.layers.0.self_attn.q_proj``."""
        if module not in self._resolved:
            matches = (form for pattern, form in self.patterns if fnmatchcase(module, pattern))
            self._resolved[module] = next(matches, DENSE)
        return self._resolved[module]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> LayerPatterns:
        """Read a ``quantization_config`` of ours.

        Args:
            config: The section, ``quant_method`` already known to be ours.
            source: File name for error messages.

        Raises:
            CheckpointError: The version is newer, or a pattern's entry is not what the format says.
        """
        version = config.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{source}: quantization_config has format_version {version!r}, this release reads {FORMAT_VERSION}; "
                "upgrade deepinfer-core or convert the model again"
            )
        layers = config.get("layers")
        if not isinstance(layers, Mapping):
            raise CheckpointError(f"{source}: quantization_config.layers must map patterns to formats, got {layers!r}")
        return cls((str(pattern), _format_from(entry, str(pattern), source)) for pattern, entry in layers.items())

    def to_config(self) -> dict[str, Any]:
        """Return the ``quantization_config`` section for config.json."""
        layers = {
            pattern: {
                "scheme": form.scheme,
                "group_size": form.group_size,
                "zeros": form.zeros,
                "distribution": form.distribution,
            }
            for pattern, form in self.patterns
        }
        return {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, "layers": layers}

    @classmethod
    def folded(cls, formats: Mapping[str, LayerFormat]) -> LayerPatterns:
        """Return few patterns that resolve every given module to its format.

        Layers that agree are folded: all of ``model.layers.*``, else a block (``model.layers.*.mlp.*``), else one
        projection over all layers; a layer that differs from most of its kind stands before them by its own name.
        """
        roles: dict[str, dict[str, LayerFormat]] = defaultdict(dict)
        for module, form in formats.items():
            roles[re.sub(r"\.\d+(?=\.)", ".*", module)][module] = form
        usual = {role: Counter(members.values()).most_common(1)[0][0] for role, members in roles.items()}
        exceptions = [
            (module, form) for role, members in roles.items() for module, form in members.items() if form != usual[role]
        ]
        folded = cls([*exceptions, *_fold_roles(usual)])
        if any(folded.format_of(module) != form for module, form in formats.items()):
            return cls(formats.items())  # an unusual module tree: name every layer, which is always right
        return folded


def _fold_roles(usual: Mapping[str, LayerFormat]) -> list[tuple[str, LayerFormat]]:
    """Join roles of one prefix while all of them agree; dense ones need no pattern of their own."""
    for depth in (3, 4):  # model.layers.*  and  model.layers.*.mlp
        by_prefix: dict[str, set[LayerFormat]] = defaultdict(set)
        for role, form in usual.items():
            if role.count(".") >= depth:
                by_prefix[".".join(role.split(".")[:depth])].add(form)
        usual = {
            _joined(role, depth) if len(by_prefix.get(".".join(role.split(".")[:depth]), ())) == 1 else role: form
            for role, form in usual.items()
        }
    return [(role, form) for role, form in usual.items() if not form.dense]


def _joined(role: str, depth: int) -> str:
    """Return the glob over all modules below a role's first ``depth`` parts."""
    if role.count(".") < depth:
        return role
    prefix = ".".join(role.split(".")[:depth])
    return prefix if prefix.endswith("*") else f"{prefix}.*"


def _format_from(entry: object, pattern: str, source: str) -> LayerFormat:
    where = f"{source}: quantization_config.layers[{pattern!r}]"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("scheme"), str):
        raise CheckpointError(f"{where} must be an object with a scheme, got {entry!r}")
    group_size, zeros, distribution = entry.get("group_size", 0), entry.get("zeros", False), entry.get("distribution")
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < -1:
        raise CheckpointError(f"{where}: group_size must be -1 (whole row), 0 (none) or positive, got {group_size!r}")
    if not isinstance(zeros, bool):
        raise CheckpointError(f"{where}: zeros must be true or false, got {zeros!r}")
    if distribution is not None and not isinstance(distribution, str):
        raise CheckpointError(f"{where}: distribution must be a name, got {distribution!r}")
    if entry["scheme"] == "fp16":
        return LayerFormat("fp16", 0, False, distribution)
    return LayerFormat(entry["scheme"], group_size, zeros, distribution)
