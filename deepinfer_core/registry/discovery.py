"""Finds plugins through entry points, each loaded and questioned alone; a broken one is dropped and remembered."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from attrs import field, frozen

from deepinfer_core.errors import ConfigError, PluginError, nearest
from deepinfer_core.plugin_api import (
    ENTRY_POINT_GROUP,
    AttentionBackendSpec,
    LinearBackend,
    SchedulingPolicySpec,
)
from deepinfer_core.registry.loading import Brought, PluginFailure, load_and_question
from deepinfer_core.registry.names import normalized

log = logging.getLogger("deepinfer")


@frozen(kw_only=True)
class LoadedPlugin:
    """A plugin that passed every check, with what its hooks returned.

    Attributes:
        name: From its `PluginInfo`.
        distribution: The pip distribution that declares it; empty when unknown.
        version: Version of that distribution.
        entry_point: ``"name = module"`` as declared.
        backends: Its linear backends.
        attention: Its attention backends.
        policies: Its scheduling policies.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    backends: tuple[LinearBackend, ...] = ()
    attention: tuple[AttentionBackendSpec, ...] = ()
    policies: tuple[SchedulingPolicySpec, ...] = ()


@frozen(kw_only=True)
class PluginFault:
    """Why a plugin was held back.

    Attributes:
        name: Its entry point's name.
        distribution: The pip distribution that declares it; empty when unknown.
        version: Version of that distribution.
        stage: ``metadata``, ``load``, ``version``, ``hooks``, ``call``, ``contract`` or ``conflict``.
        cause: One line for listings.
        error: The original exception, raised again (as the cause) when a config needs this plugin.
        brings: (kind, name) of the descriptors that it would have brought, as far as they were seen.
    """

    name: str
    distribution: str
    version: str
    stage: str
    cause: str
    error: BaseException = field(eq=False, repr=False)
    brings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}".strip() or "unknown distribution"
        return f"plugin {self.name!r} ({origin}) was held back at {self.stage}: {self.cause}"


@frozen(kw_only=True)
class Discovery:
    """What `discover` found: plugins and faults, each sorted by name."""

    plugins: tuple[LoadedPlugin, ...]
    faults: tuple[PluginFault, ...]
    disabled: tuple[str, ...] = ()


@frozen(kw_only=True)
class _Found:
    """One entry point with its distribution, before it is loaded."""

    entry: metadata.EntryPoint = field(eq=False)
    name: str
    value: str
    distribution: str
    version: str

    @property
    def key(self) -> str:
        return normalized(self.name)

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "unknown distribution"

    def is_named(self, names: set[str]) -> bool:
        return self.key in names or (bool(self.distribution) and normalized(self.distribution) in names)

    def fault(self, stage: str, error: BaseException, brings: tuple[tuple[str, str], ...] = ()) -> PluginFault:
        return PluginFault(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            stage=stage,
            cause=_one_line(error),
            error=error,
            brings=brings,
        )


def discover(
    *,
    disable: Sequence[str] = (),
    strict: bool = False,
    entry_points: Iterable[metadata.EntryPoint] | None = None,
    quiet: bool = False,
) -> Discovery:
    """Load every installed plugin on its own; what fails is reported and the rest goes on.

    Args:
        disable: Entry-point or distribution names that are not even imported.
        strict: Raise when any plugin was held back.
        entry_points: What to look at instead of the installed distributions.
        quiet: Do not log a warning for each fault (listings print them themselves).

    Raises:
        ConfigError: A name in ``disable`` matches nothing that is installed.
        PluginError: In strict mode, naming every plugin that was held back.
    """
    faults: list[PluginFault] = []
    found = list(_installed(faults) if entry_points is None else map(_from_entry_point, entry_points))
    enabled, disabled = _without_disabled(found, disable)
    sound = _without_name_conflicts(_unique(enabled), faults)
    loaded: list[tuple[_Found, LoadedPlugin]] = []
    for item in sound:
        brought = Brought()
        try:
            load_and_question(item.entry, brought)
        except PluginFailure as failure:
            faults.append(item.fault(failure.stage, failure.error, brought.names()))
        else:
            assert brought.info is not None
            plugin = LoadedPlugin(
                name=brought.info.name,
                distribution=item.distribution,
                version=item.version,
                entry_point=f"{item.name} = {item.value}",
                backends=tuple(brought.backends),
                attention=tuple(brought.attention),
                policies=tuple(brought.policies),
            )
            loaded.append((item, plugin))
    plugins = _without_descriptor_conflicts(loaded, faults)
    discovery = Discovery(
        plugins=tuple(sorted(plugins, key=lambda p: (normalized(p.name), p.distribution))),
        faults=tuple(sorted(faults, key=lambda f: (normalized(f.name), f.distribution, f.version, f.cause))),
        disabled=disabled,
    )
    if strict and discovery.faults:
        lines = "\n".join(f"  {fault}" for fault in discovery.faults)
        raise PluginError(
            f"strict mode, and {len(discovery.faults)} plugin(s) were held back:\n{lines}\n"
            "mend or uninstall them, or name them under [plugins] disable"
        ) from discovery.faults[0].error
    if not quiet:
        for fault in discovery.faults:
            log.warning("%s", fault)
    return discovery


def names_brought(plugin: LoadedPlugin) -> tuple[tuple[str, str], ...]:
    """Return (kind, name) of the plugin itself and of everything that it registers."""
    brought = Brought(backends=list(plugin.backends), attention=list(plugin.attention), policies=list(plugin.policies))
    return (("plugin", plugin.name), *brought.names())


def _installed(faults: list[PluginFault]) -> Iterator[_Found]:
    """Yield the entry points of every distribution on ``sys.path``.

    A distribution of the same name further down the path is shadowed, as its modules are. Two in one place (a broken
    upgrade, an editable install beside a stale egg-info) are both looked at: which comes first is chance there.
    """
    places: dict[str, str] = {}
    for dist in metadata.distributions():
        try:
            entries = [e for e in dist.entry_points if e.group == ENTRY_POINT_GROUP]
            if not entries:
                continue
            name, version = _fact(dist, "Name"), _fact(dist, "Version")
            place = str(dist.locate_file(""))
        except Exception as error:
            label = str(getattr(dist, "_path", "a distribution"))
            faults.append(
                PluginFault(
                    name=label.replace("\\", "/").rsplit("/", 1)[-1],
                    distribution="",
                    version="",
                    stage="metadata",
                    cause=f"its metadata cannot be read: {_one_line(error)}",
                    error=error,
                )
            )
            continue
        if places.setdefault(normalized(name), place) == place:
            for entry in entries:
                yield _Found(entry=entry, name=entry.name, value=entry.value, distribution=name, version=version)


def _fact(dist: metadata.Distribution, key: str) -> str:
    """Return a metadata field, empty when it is missing (asking for a missing one is deprecated)."""
    facts = dist.metadata
    return facts[key] if key in facts else ""  # noqa: SIM401  (older typings know no get)


def _from_entry_point(entry: metadata.EntryPoint) -> _Found:
    name = _fact(entry.dist, "Name") if entry.dist is not None else ""
    version = _fact(entry.dist, "Version") if entry.dist is not None else ""
    return _Found(entry=entry, name=entry.name, value=entry.value, distribution=name, version=version)


def _unique(found: Iterable[_Found]) -> list[_Found]:
    """Keep one of the entries with the same name and value: that of the distribution which ships the module."""
    alike: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    for item in sorted(found, key=lambda f: (f.key, f.value, f.distribution, f.version)):
        alike[item.key, item.value.replace(" ", "")].append(item)
    return [min(items, key=_distance_from_module) if len(items) > 1 else items[0] for items in alike.values()]


def _distance_from_module(item: _Found) -> int:
    """Return 0 when the distribution lists the module among its files, 1 when it is called like it, else 2."""
    top = item.value.partition(":")[0].partition(".")[0].strip()
    with contextlib.suppress(Exception):  # a broken RECORD only costs the better guess
        files = (item.entry.dist.files if item.entry.dist is not None else None) or ()
        if any(file.parts[0] in (top, f"{top}.py") for file in files):
            return 0
    return 1 if normalized(item.distribution) in (normalized(top), item.key) else 2


def _without_disabled(found: list[_Found], disable: Sequence[str]) -> tuple[list[_Found], tuple[str, ...]]:
    names = {normalized(name) for name in disable}
    known = {f.key for f in found} | {normalized(f.distribution) for f in found if f.distribution}
    for name in disable:
        if normalized(name) not in known:
            installed = {f.name for f in found} | {f.distribution for f in found if f.distribution}
            raise ConfigError(f"[plugins] disable names {name!r}, which is not installed; {nearest(name, installed)}")
    kept = [f for f in found if not f.is_named(names)]
    return kept, tuple(sorted({f.name for f in found if f.is_named(names)}))


def _without_name_conflicts(found: list[_Found], faults: list[PluginFault]) -> list[_Found]:
    """Hold back every entry whose name stands for two values; which one is meant cannot be known."""
    by_name: dict[str, list[_Found]] = defaultdict(list)
    for item in found:
        by_name[item.key].append(item)
    sound = []
    for items in by_name.values():
        if len(items) == 1:
            sound.append(items[0])
            continue
        sides = " and ".join(f"{i.value!r} ({i.origin})" for i in items)
        for item in items:
            text = f"the name {item.name!r} has two values: {sides}; uninstall one, or disable it by distribution name"
            faults.append(item.fault("conflict", PluginError(text)))
    return sound


def _without_descriptor_conflicts(
    loaded: list[tuple[_Found, LoadedPlugin]], faults: list[PluginFault]
) -> list[LoadedPlugin]:
    """Hold back every plugin that shares a descriptor's name with another; all pairs at once, so order is nothing."""
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, (_, plugin) in enumerate(loaded):
        for kind, name in names_brought(plugin):
            owners[kind, normalized(name)].append(index)
    clashes: dict[int, list[str]] = defaultdict(list)
    for (kind, name), indexes in owners.items():
        for index in indexes if len(indexes) > 1 else ():
            others = " and ".join(f"{loaded[i][0].name!r} ({loaded[i][0].origin})" for i in indexes if i != index)
            clashes[index].append(f"{kind} {name!r} is also registered by {others}")
    for index, texts in clashes.items():
        item, plugin = loaded[index]
        error = PluginError(f"{'; '.join(texts)}; disable one of them under [plugins] disable")
        faults.append(item.fault("conflict", error, names_brought(plugin)))
    return [plugin for index, (_, plugin) in enumerate(loaded) if index not in clashes]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
