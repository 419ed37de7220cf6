"""Everything that the loaded plugins registered, by kind and name, with who brought it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from attrs import field, frozen

from deepinfer_core import __version__
from deepinfer_core.errors import DeepinferError, PluginError, SelectionError, nearest
from deepinfer_core.plugin_api import (
    AttentionBackendSpec,
    LinearBackend,
    LinearKernelSpec,
    QuantizationRecipe,
    SchedulingPolicySpec,
    WeightLayoutSpec,
    WeightScheme,
    WeightSchemeSpec,
)
from deepinfer_core.registry.discovery import Discovery, LoadedPlugin, PluginFault
from deepinfer_core.registry.names import find, install_line, normalized

T = TypeVar("T")
CORE = "deepinfer-core"


@frozen(kw_only=True)
class Registered(Generic[T]):
    """A descriptor and where it came from.

    Attributes:
        spec: The descriptor.
        backend: Name of the `LinearBackend` that holds it; None for kinds that stand alone.
        distribution: The pip distribution that brought it.
        version: Version of that distribution.
    """

    spec: T
    backend: str | None
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Distribution and version, as messages print them."""
        return f"{self.distribution} {self.version}".strip()

    @classmethod
    def by_core(cls, spec: T) -> Registered[T]:
        """Return a descriptor of core's own."""
        return cls(spec=spec, backend=None, distribution=CORE, version=__version__)


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@frozen(kw_only=True)
class Catalog:
    """Name -> `Registered` for each kind of descriptor; look-ups explain what is missing.

    Attributes:
        backends: Linear backends.
        schemes: Weight formats.
        layouts: Resident weight layouts.
        kernels: Linear kernels.
        recipes: Quantization recipes.
        attention: Attention backends.
        policies: Scheduling policies.
        plugins: The plugins behind all of it.
        faults: Plugins that were held back.
    """

    backends: Mapping[str, Registered[LinearBackend]] = field(factory=_empty)
    schemes: Mapping[str, Registered[WeightSchemeSpec]] = field(factory=_empty)
    layouts: Mapping[str, Registered[WeightLayoutSpec]] = field(factory=_empty)
    kernels: Mapping[str, Registered[LinearKernelSpec]] = field(factory=_empty)
    recipes: Mapping[str, Registered[QuantizationRecipe]] = field(factory=_empty)
    attention: Mapping[str, Registered[AttentionBackendSpec]] = field(factory=_empty)
    policies: Mapping[str, Registered[SchedulingPolicySpec]] = field(factory=_empty)
    plugins: tuple[LoadedPlugin, ...] = ()
    faults: tuple[PluginFault, ...] = ()

    @classmethod
    def from_discovery(cls, discovery: Discovery) -> Catalog:
        """Sort what was discovered into mappings, each ordered by name."""
        parts: dict[str, dict[str, Registered[Any]]] = {
            kind: {} for kind in ("backends", "schemes", "layouts", "kernels", "recipes", "attention", "policies")
        }

        def add(kind: str, specs: Iterable[Any], plugin: LoadedPlugin, backend: str | None) -> None:
            for spec in specs:
                assert spec.name not in parts[kind], f"{kind} {spec.name!r} passed discovery twice"
                parts[kind][spec.name] = Registered(
                    spec=spec, backend=backend, distribution=plugin.distribution, version=plugin.version
                )

        for plugin in discovery.plugins:
            for backend in plugin.backends:
                add("backends", [backend], plugin, backend.name)
                add("schemes", backend.schemes, plugin, backend.name)
                add("layouts", backend.layouts, plugin, backend.name)
                add("kernels", backend.kernels, plugin, backend.name)
                add("recipes", backend.recipes, plugin, backend.name)
            add("attention", plugin.attention, plugin, None)
            add("policies", plugin.policies, plugin, None)
        mappings: dict[str, Any] = {k: MappingProxyType(dict(sorted(v.items()))) for k, v in parts.items()}
        return cls(**mappings, plugins=discovery.plugins, faults=discovery.faults)

    def backend(self, name: str) -> Registered[LinearBackend]:
        """Return a linear backend by name.

        Raises:
            SelectionError: It is not registered; this and the other look-ups name the nearest, the ``pip install``
                line of a well-known name, and the original error of the failed plugin that was to bring it.
        """
        return self._look_up("linear backend", name, self.backends)

    def scheme(self, name: str, *, distribution: str | None = None) -> Registered[WeightSchemeSpec]:
        """Return a weight scheme by name; ``distribution`` is who brings it according to the checkpoint."""
        return self._look_up("scheme", name, self.schemes, distribution)

    def layout(self, name: str) -> Registered[WeightLayoutSpec]:
        """Return a layout by name."""
        return self._look_up("layout", name, self.layouts)

    def kernel(self, name: str) -> Registered[LinearKernelSpec]:
        """Return a linear kernel by name."""
        return self._look_up("kernel", name, self.kernels)

    def recipe(self, name: str) -> Registered[QuantizationRecipe]:
        """Return a quantization recipe by name."""
        return self._look_up("recipe", name, self.recipes)

    def attention_backend(self, name: str) -> Registered[AttentionBackendSpec]:
        """Return an attention backend by name."""
        return self._look_up("attention backend", name, self.attention)

    def policy(self, name: str) -> Registered[SchedulingPolicySpec]:
        """Return a scheduling policy by name; ``"auto"`` is core's word and is resolved before this."""
        return self._look_up("scheduling policy", name, self.policies)

    def _look_up(
        self, kind: str, name: str, known: Mapping[str, Registered[T]], distribution: str | None = None
    ) -> Registered[T]:
        match = find(name, known)
        if match is not None:
            return known[match]
        raise self._missing(kind, name, known, distribution)

    def _missing(self, kind: str, name: str, known: Iterable[str], distribution: str | None) -> SelectionError:
        text = f"no installed plugin registers the {kind} {name!r}; {nearest(name, known)}"
        culprits = self.faults_for(kind, name, distribution)
        line = install_line(kind, name, distribution)
        package = line.split()[2] if line else None
        installed = {normalized(p.distribution): p for p in self.plugins}
        if culprits:
            text += "".join(f"\n  {fault}" for fault in culprits)
        elif package is not None and normalized(package) in installed:
            owner = installed[normalized(package)]
            text += (
                f"\n  {owner.distribution} {owner.version} is installed but registers no such {kind} in this release"
            )
        elif line is not None:
            text += f"\n  to get it: {line}"
        elif self.faults:
            text += "\n  these plugins failed, one of them may have been to bring it:"
            text += "".join(f"\n  {fault}" for fault in self.faults)
            culprits = self.faults
        error = SelectionError(text)
        error.__cause__ = culprits[0].error if culprits else None
        return error

    def faults_for(self, kind: str, name: str, distribution: str | None = None) -> tuple[PluginFault, ...]:
        """Return the failed plugins that were to bring a name: by what they returned, else by what they are called."""
        wanted = kind, normalized(name)
        seen = tuple(f for f in self.faults if wanted in {(k, normalized(n)) for k, n in f.brings})
        if seen:
            return seen
        line = install_line(kind, name, distribution)
        packages = {normalized(line.split()[2])} if line else set()
        stem = normalized(name)
        names = {stem, stem.split("-")[0]}
        return tuple(
            f
            for f in self.faults
            if normalized(f.distribution) in packages
            or normalized(f.name) in names
            or normalized(f.distribution).removeprefix("deepinfer-plugin-") in names
        )


def load_factory(target: str, owner: Registered[Any] | None = None) -> Any:
    """Import what ``"module:attribute"`` names; done when it is chosen, never before.

    Args:
        target: The text of a descriptor.
        owner: Whose it is, for the message.

    Raises:
        PluginError: It cannot be imported, with the distribution and the original cause.
    """
    module_name, _, attribute = target.partition(":")
    label = f"{target!r} of {owner.spec.name!r} ({owner.origin})" if owner is not None else repr(target)
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        raise PluginError(f"cannot import {label}: {type(error).__name__}: {error}") from error
    return value


def make(target: str, owner: Registered[Any], *arguments: object) -> Any:
    """Import a factory and call it.

    Raises:
        PluginError: The factory raised something that is not an error of ours, or returned None.
    """
    factory = load_factory(target, owner)
    try:
        made = factory(*arguments)
    except DeepinferError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{target!r} of {owner.spec.name!r} ({owner.origin}) raised {type(error).__name__}: {error}"
        ) from error
    if made is None:
        raise PluginError(f"{target!r} of {owner.spec.name!r} ({owner.origin}) returned None")
    return made


def make_scheme(catalog: Catalog, name: str, *, distribution: str | None = None) -> WeightScheme:
    """Return the scheme's object."""
    owner = catalog.scheme(name, distribution=distribution)
    return cast(WeightScheme, make(owner.spec.factory, owner))
