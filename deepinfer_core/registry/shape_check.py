"""Checks the values inside a descriptor against its declared types, so that a wrong one is named at discovery."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import attrs

FACTORY_FIELDS = ("factory", "workspace", "predicate", "options")
"""Fields that hold ``"module:attribute"``."""


def is_target(text: str) -> bool:
    """Return True for ``"module:attribute"`` with dotted Python names on both sides."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def faults_in(descriptor: Any, where: str) -> Iterator[str]:
    """Yield one sentence for every field whose value is not of its declared type.

    Args:
        descriptor: A frozen attrs descriptor of `plugin_api`.
        where: How a message names it, such as ``"LinearBackend 'acme'"``.
    """
    hints = typing.get_type_hints(type(descriptor))
    for field in attrs.fields(type(descriptor)):
        value = getattr(descriptor, field.name)
        place = f"{where}.{field.name}"
        reported = False
        for fault in _mismatches(value, hints[field.name], place):
            reported = True
            yield fault
        if not reported and field.name in FACTORY_FIELDS and value is not None and not is_target(value):
            yield f'{place} is {value!r}; it must have the form "package.module:attribute"'
        if not reported and field.name == "name" and not value.strip():
            yield f"{place} is empty"


def _mismatches(value: Any, hint: Any, where: str) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        attempts = [list(_mismatches(value, option, where)) for option in args]
        if all(attempts):
            yield f"{where} is {_shown(value)}; expected {_hint_text(hint)}"
    elif origin is Literal:
        if value not in args:
            yield f"{where} is {_shown(value)}; expected one of {', '.join(repr(a) for a in args)}"
    elif origin is tuple:
        if not isinstance(value, tuple) or (args[-1] is not Ellipsis and len(value) != len(args)):
            comma = "; a tuple of one needs a comma" if isinstance(value, str) else ""
            yield f"{where} is {_shown(value)}; expected {_hint_text(hint)}{comma}"
            return
        item_hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        for index, (item, item_hint) in enumerate(zip(value, item_hints, strict=True)):
            yield from _mismatches(item, item_hint, f"{where}[{index}]")
    elif attrs.has(hint):
        if not isinstance(value, hint):
            yield f"{where} is {_shown(value)}; expected {hint.__name__}"
        else:
            name = getattr(value, "name", None)
            label = f"{where} ({name})" if isinstance(name, str) else where
            yield from faults_in(value, label)
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{where} is {_shown(value)}; expected float"
    elif hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{where} is {_shown(value)}; expected int"
    elif isinstance(hint, type) and not isinstance(value, hint):
        yield f"{where} is {_shown(value)}; expected {_hint_text(hint)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _hint_text(hint: Any) -> str:
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
