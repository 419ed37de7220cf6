"""Values of a config: sizes, whole numbers, TOML text in and out, and the strict cattrs converter."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import cattrs

from deepinfer_core.errors import nearest

Positive = Annotated[int, "a whole number of at least 1"]
Port = Annotated[int, "a port from 0 (any that is free) to 65535"]
Bytes = Annotated[int, "a size such as 384MiB or 1.2GiB"]

_UNITS = {"": 1, "B": 1} | {f"{p}{s}": b**e for e, p in enumerate("KMGT", 1) for s, b in (("iB", 1024), ("B", 1000))}
MAX_COUNT = 2**31 - 1
"""Tokens, requests, pages: kernels count them in 32 bits."""

MAX_SIZE = 2**63 - 1
"""Bytes that a 64-bit system can speak of."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> int:
    """Return bytes from ``"1.2GiB"``, ``"384 MiB"``, ``"2GB"`` or a whole number of bytes.

    Raises:
        ValueError: It is none of these, or not positive.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = {unit.lower(): factor for unit, factor in _UNITS.items()}.get(match[2].lower()) if match else None
    size = value if type(value) is int else float(match[1]) * factor if match and factor else 0
    if not 1 <= size <= MAX_SIZE:
        raise ValueError("expected a size such as 384MiB or 1.2GiB, or a whole number of bytes")
    return int(size)


def toml_text(value: object) -> str:
    """Return a value as TOML writes it; ``unset`` for None."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        escaped = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        inside = ", ".join(f"{toml_text(str(k))} = {toml_text(v)}" for k, v in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_text(v) for v in value)}]"
    return str(value)


def from_flag(value: object, hint: Any) -> object:
    """Read a flag's text as TOML unless its key holds text; a list may be written with commas."""
    texts = hint is str or (str in get_args(hint) and get_origin(hint) is not Mapping) or get_origin(hint) is Literal
    if not isinstance(value, str) or (texts and get_origin(hint) is not tuple):
        return value
    try:
        parsed: object = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    if get_origin(hint) is tuple and isinstance(parsed, str):
        return [part.strip() for part in parsed.split(",") if part.strip()]
    return parsed


def _checked(expected: str, *types: type) -> Any:
    def structure(value: object, _: Any) -> Any:
        if isinstance(value, types) and not (isinstance(value, bool) and bool not in types):
            return value
        raise ValueError(f"expected {expected}, got {toml_text(value)}")

    return structure


def _positive(value: object, _: Any) -> int:
    if type(value) is int and 1 <= value <= MAX_COUNT:
        return value
    most = f" and at most {MAX_COUNT}" if type(value) is int and value > MAX_COUNT else ""
    raise ValueError(f"expected a whole number of at least 1{most}, got {toml_text(value)}")


def _port(value: object, _: Any) -> int:
    if type(value) is int and 0 <= value <= 65535:
        return value
    raise ValueError(f"expected a port from 0 (any that is free) to 65535, got {toml_text(value)}")


def _size(value: object, _: Any) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, got {toml_text(value)}") from None


def _is_literal(hint: Any) -> bool:
    return get_origin(hint) is Literal


_OTHER_WORDS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "gpu": "cuda"}
"""What people write for our words; only for the hint of an error."""


def _literal(value: object, hint: Any) -> Any:
    options = get_args(hint)
    if value in options:
        return value
    meant = _OTHER_WORDS.get(str(value).lower(), str(value))
    raise ValueError(f"unknown value {toml_text(value)}; {nearest(meant, options)}")


def converter() -> cattrs.Converter:
    """Return a cattrs converter that takes a value only as what its field declares: no text for numbers."""
    made = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    made.register_structure_hook(str, _checked("text", str))
    made.register_structure_hook(bool, _checked("true or false", bool))
    made.register_structure_hook_func(lambda t: t == Positive, _positive)
    made.register_structure_hook_func(lambda t: t == Bytes, _size)
    made.register_structure_hook_func(lambda t: t == Port, _port)
    made.register_structure_hook_func(_is_literal, _literal)
    return made
