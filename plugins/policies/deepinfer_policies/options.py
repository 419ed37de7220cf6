"""Checks of option values that the policies share; what is wrong is named with its option."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from attrs import Attribute


def tokens(_: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a whole number of at least 1, or None.

    Raises:
        ConfigError: It is neither.
    """
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"[scheduler.options] {attribute.name} = {value!r}: it must be a whole number of at least 1")


def milliseconds(_: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a number above 0, or None.

    Raises:
        ConfigError: It is neither.
    """
    if value is None:
        return
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise ConfigError(f"[scheduler.options] {attribute.name} = {value!r}: it must be milliseconds above 0")


def share(_: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a number above 0 and at most 1.

    Raises:
        ConfigError: It is none.
    """
    if type(value) not in (int, float) or not 0 < value <= 1:  # type: ignore[operator]
        raise ConfigError(f"[scheduler.options] {attribute.name} = {value!r}: it must be above 0 and at most 1")


def given(_: object, attribute: Attribute[Any], value: object) -> None:
    """Accept anything but None.

    Raises:
        ConfigError: It is None.
    """
    if value is None:
        raise ConfigError(f"[scheduler.options] {attribute.name} = None: this policy cannot do without it")


def one_of(*names: str) -> Callable[[object, Attribute[Any], object], None]:
    """Return a check that accepts one of these names and raises ConfigError for others."""

    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if value not in names:
            known = ", ".join(names)
            raise ConfigError(f"[scheduler.options] {attribute.name} = {value!r}: it must be one of {known}")

    return check
