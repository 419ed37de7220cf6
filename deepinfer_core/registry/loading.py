"""Loads one plugin in a pluggy manager of its own and asks each hook alone; any failure ends it with a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import pluggy
from attrs import Factory, define

from deepinfer_core.errors import PluginError, nearest
from deepinfer_core.plugin_api import (
    API_VERSION,
    AttentionBackendSpec,
    LinearBackend,
    PluginInfo,
    SchedulingPolicySpec,
    hooks,
)
from deepinfer_core.registry.names import normalized
from deepinfer_core.registry.shape_check import faults_in, is_target

INFO_HOOK = "deepinfer_plugin_info"
HOOKS: dict[str, type] = {
    "deepinfer_linear_backends": LinearBackend,
    "deepinfer_attention_backends": AttentionBackendSpec,
    "deepinfer_scheduling_policies": SchedulingPolicySpec,
}
"""Subject hooks and what each returns an iterable of."""

RESERVED = ("auto", "core")
"""Words of core: ``auto`` is what a config writes for "choose for me", ``core.`` begins core's own kernels."""


@define
class Brought:
    """What a plugin has returned so far; filled hook by hook so that a failure can say what is missing now."""

    info: PluginInfo | None = None
    backends: list[LinearBackend] = Factory(list)
    attention: list[AttentionBackendSpec] = Factory(list)
    policies: list[SchedulingPolicySpec] = Factory(list)

    def names(self) -> tuple[tuple[str, str], ...]:
        """Return (kind, name) of every descriptor, duplicates included."""
        labels: list[tuple[str, str]] = []
        for backend in self.backends:
            labels.append(("linear backend", backend.name))
            labels += [("scheme", s.name) for s in backend.schemes]
            labels += [("layout", s.name) for s in backend.layouts]
            labels += [("kernel", s.name) for s in backend.kernels]
            labels += [("recipe", s.name) for s in backend.recipes]
        labels += [("attention backend", s.name) for s in self.attention]
        labels += [("scheduling policy", s.name) for s in self.policies]
        return tuple(labels)


class PluginFailure(Exception):  # noqa: N818  (a carrier between two files, not an error that anyone sees)
    """The stage at which a plugin failed, and the original exception."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(stage)
        self.stage = stage
        self.error = error


def load_and_question(entry: metadata.EntryPoint, brought: Brought) -> None:
    """Load a plugin and fill ``brought`` from its hooks.

    Raises:
        PluginFailure: Whatever went wrong, KeyboardInterrupt excepted; nothing of the plugin may be used then.
    """
    module, _, attribute = entry.value.partition(":")
    if not is_target(f"{module.strip()}:{attribute.strip() or 'x'}"):
        raise PluginFailure("load", PluginError(f'{entry.value!r} does not have the form "module" or "module:object"'))
    plugin = _guarded("load", entry.load)
    if inspect.isclass(plugin):
        raise PluginFailure(
            "load", PluginError(f"{entry.value!r} is a class; an entry point names a module or an instance")
        )
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    marked: Marked = _guarded("hooks", lambda: _marked(manager, plugin))
    # The version first: a plugin for another contract has other hooks, and its version is the cause worth naming.
    brought.info = _info(marked.functions)
    _check_marked(marked)
    _guarded("hooks", lambda: manager.register(plugin, entry.name))
    _guarded("hooks", manager.check_pending)
    targets: dict[str, list[Any]] = {
        "deepinfer_linear_backends": brought.backends,
        "deepinfer_attention_backends": brought.attention,
        "deepinfer_scheduling_policies": brought.policies,
    }
    for name, kind in HOOKS.items():
        if name in marked.functions:
            targets[name].extend(_call(name, marked.functions[name], kind))
    _check_names(brought)


def signature_text(name: str) -> str:
    """Return a hook's expected signature, such as ``deepinfer_plugin_info() -> PluginInfo``."""
    signature = inspect.signature(getattr(hooks, name))
    return f"{name}{signature}".replace("'", "")


def _guarded(stage: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and panics of native modules are no reason to take core down
        raise PluginFailure(stage, error) from error


@define
class Marked:
    """What a plugin marks with ``@hookimpl``, and what it got wrong there."""

    functions: dict[str, Callable[[], Any]] = Factory(dict)
    unknown: list[str] = Factory(list)
    forgotten: list[str] = Factory(list)
    wrappers: list[str] = Factory(list)
    twice: list[str] = Factory(list)


def _marked(manager: pluggy.PluginManager, plugin: object) -> Marked:
    specs = {INFO_HOOK, *HOOKS}
    marked = Marked()
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute in specs and callable(getattr(plugin, attribute)):
                marked.forgotten.append(attribute)
            continue
        name = options.get("specname") or attribute
        if options.get("hookwrapper") or options.get("wrapper"):
            marked.wrappers.append(attribute)
        elif name in marked.functions:
            marked.twice.append(name)
        elif name in specs:
            marked.functions[name] = getattr(plugin, attribute)
        elif not options.get("optionalhook"):
            marked.unknown.append(name)
    return marked


def _check_marked(marked: Marked) -> None:
    faults = [f"unknown hook {name!r}: {nearest(name, {INFO_HOOK, *HOOKS})}" for name in marked.unknown]
    faults += [f"{name} is defined but not marked with @hookimpl, so it would never run" for name in marked.forgotten]
    faults += [f"{name} is a hook wrapper; each plugin is asked alone, so it wraps nothing" for name in marked.wrappers]
    faults += [f"hook {name} is implemented twice" for name in marked.twice]
    if faults:
        raise PluginFailure("hooks", PluginError("; ".join(faults)))
    for name, function in marked.functions.items():
        _check_signature(name, function)


def _info(implementations: dict[str, Callable[[], Any]]) -> PluginInfo:
    if INFO_HOOK not in implementations:
        raise PluginFailure("hooks", PluginError(f"it lacks the required hook {signature_text(INFO_HOOK)}"))
    function = implementations[INFO_HOOK]
    _check_signature(INFO_HOOK, function)
    info = _guarded("call", function)
    if not isinstance(info, PluginInfo):
        raise PluginFailure(
            "contract", PluginError(f"{INFO_HOOK} returned {_kind(info)}; expected {signature_text(INFO_HOOK)}")
        )
    version: object = info.api_version
    if not (isinstance(version, tuple) and len(version) == 2 and all(type(part) is int for part in version)):
        raise PluginFailure(
            "version", PluginError(f"it states API version {version!r}; write (major, minor) like {API_VERSION}")
        )
    if version[0] != API_VERSION[0] or version[1] > API_VERSION[1]:
        raise PluginFailure(
            "version",
            PluginError(
                f"it was written for API version {version[0]}.{version[1]}, this core has "
                f"{API_VERSION[0]}.{API_VERSION[1]}; install matching versions of the plugin and deepinfer-core"
            ),
        )
    for fault in faults_in(info, "PluginInfo"):
        raise PluginFailure("contract", PluginError(fault))
    return info


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    parameters = _guarded("hooks", lambda: inspect.signature(function).parameters.values())
    if inspect.iscoroutinefunction(function):
        raise PluginFailure("hooks", PluginError(f"hook {name} is async; expected {signature_text(name)}"))
    extra = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if extra:
        raise PluginFailure(
            "hooks",
            PluginError(
                f"hook {name} takes {', '.join(repr(e) for e in extra)}, which core does not pass; "
                f"expected {signature_text(name)}"
            ),
        )


def _call(name: str, function: Callable[[], Any], kind: type) -> list[Any]:
    result = _guarded("call", function)
    expected = f"expected {signature_text(name)}"
    if isinstance(result, str | bytes) or not isinstance(result, Iterable):
        raise PluginFailure("contract", PluginError(f"{name} returned {_kind(result)}; {expected}"))
    items: list[Any] = _guarded("call", lambda: list(result))
    for item in items:
        if not isinstance(item, kind):
            raise PluginFailure("contract", PluginError(f"{name} returned {_kind(item)} among its items; {expected}"))
        faults = list(faults_in(item, f"{kind.__name__} {getattr(item, 'name', '')!r}"))
        if faults:
            raise PluginFailure("contract", PluginError("; ".join(faults[:3])))
    return items


def _check_names(brought: Brought) -> None:
    seen: set[tuple[str, str]] = set()
    for kind, name in brought.names():
        key = kind, normalized(name)
        if key in seen:
            raise PluginFailure("contract", PluginError(f"{kind} {name!r} is registered twice by this plugin"))
        if key[1] in RESERVED or key[1].startswith("core-"):
            raise PluginFailure("contract", PluginError(f"{kind} name {name!r} is reserved for core"))
        if any(character.isspace() for character in name):
            raise PluginFailure("contract", PluginError(f"{kind} name {name!r} holds white space"))
        seen.add(key)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
