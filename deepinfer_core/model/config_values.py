"""Reading single values of a config.json: the right type, or an error that names the key and what was found."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from deepinfer_core.errors import ModelError

LARGEST = 2**31 - 1
"""Bound of whole numbers: no size of a model comes near, and what follows from one still fits 64 bits."""


class ConfigValues:
    """A mapping with typed look-ups; a missing key without a default, and a wrong type, are errors that name it.

    Attributes:
        where: File, and perhaps section, for error messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """Return whatever stands there, None when nothing does."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = LARGEST) -> int:
        """Return a whole number."""
        value = self._found(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not at_least <= value <= at_most or value != int(value):
            raise ModelError(
                f"{self.where}: {key} is {reprlib.repr(value)}; it must be a whole number, {at_least} to {at_most}"
            )
        return int(value)

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """Return a positive finite number; 0 too where allowed."""
        value = self._found(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
        if not good or (value == 0 and not zero):
            raise ModelError(f"{self.where}: {key} is {reprlib.repr(value)}; it must be a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._found(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} is {reprlib.repr(value)}; it must be true or false")
        return value

    def section(self, key: str) -> ConfigValues | None:
        """Return the table under the key, None when it is missing, null or empty."""
        value = self._values.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.where}: {key} is {reprlib.repr(value)}; it must be a table of names and values")
        return ConfigValues(value, f"{self.where}: {key}")

    def _found(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.where} has no {key}, which this architecture needs")
        return default
