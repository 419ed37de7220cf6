"""Config flags that commands share: every config key as a flag, the common ones under short names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_core.errors import ConfigError

_DOTTED = re.compile(r"--((?:linear|attention|scheduler|cache|plugins)\.[^\s=]+)(?:=(.*))?", re.DOTALL)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML config file.", show_default=False, metavar="FILE")
]
SetKeys = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="Any config key; --cache.page_size 32 also."),
]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", show_default=False, help="Longest context, in tokens.", min=1)
]
KvMemory = Annotated[
    str | None, typer.Option("--kv-memory", show_default=False, help="Memory for the KV cache, such as 1.2GiB.")
]
Policy = Annotated[str | None, typer.Option("--policy", show_default=False, help="Scheduling policy, by name.")]
Dtype = Annotated[str | None, typer.Option("--dtype", show_default=False, help="float16, bfloat16, float32 or auto.")]
Device = Annotated[str | None, typer.Option("--device", show_default=False, help="cuda, cpu or auto.")]
Backend = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="SCHEME=NAME",
        show_default=False,
        help="Backend of a weight scheme, such as w4a16=acme-w4, or of attention: attention=sdpa.",
    ),
]


def dotted_to_set(argv: Iterable[str]) -> list[str]:
    """Rewrite ``--linear.w4a16.backend x`` (or ``...=x``) as ``--set linear.w4a16.backend=x``.

    Raises:
        ConfigError: The last flag has no value.
    """
    out: list[str] = []
    words = iter(argv)
    for word in words:
        match = _DOTTED.fullmatch(word)
        if match is None:
            out.append(word)
            continue
        value = match[2] if match[2] is not None else next(words, None)
        if value is None:
            raise ConfigError(f"{word} needs a value: {word} VALUE")
        out += ["--set", f"{match[1]}={value}"]
    return out


def overrides(
    *,
    sets: Sequence[str] | None = None,
    max_model_len: int | None = None,
    kv_memory: str | None = None,
    policy: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    backend: Sequence[str] | None = None,
) -> dict[str, object]:
    """Return flags as config overrides, dotted key -> value; what was not given is not there.

    Raises:
        ConfigError: A ``--set`` or ``--backend`` is not KEY=VALUE.
    """
    found: dict[str, object] = {}
    for name in backend or ():
        scheme, value = _pair("--backend", name, "SCHEME=NAME")
        found["attention.backend" if scheme == "attention" else f"linear.{scheme}.backend"] = value
    for text in sets or ():
        key, value = _pair("--set", text, "KEY=VALUE")
        found[key] = value
    named = {
        "cache.max_model_len": max_model_len,
        "cache.memory": kv_memory,
        "scheduler.policy": policy,
        "dtype": dtype,
        "device": device,
    }
    return found | {key: value for key, value in named.items() if value is not None}


def parse_shape(flag: str, text: str) -> tuple[int, int]:
    """Read ``NxK``.

    Raises:
        ConfigError: The text is not two positive numbers around an x.
    """
    match = re.fullmatch(r"\s*([1-9]\d*)\s*[xX]\s*([1-9]\d*)\s*", text)
    if match is None:
        raise ConfigError(f"{flag} {text!r} is not a shape; write outputs x inputs, like 4096x2048")
    return int(match[1]), int(match[2])


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Read positive numbers with commas between them.

    Raises:
        ConfigError: One is not, or there is none.
    """
    counts = tuple(parse_count(flag, part) for part in text.split(",") if part.strip())
    if not counts:
        raise ConfigError(f"{flag} is empty; write numbers with commas, like 1,2,4")
    return tuple(dict.fromkeys(counts))


def parse_count(flag: str, text: str) -> int:
    """Read a positive number.

    Raises:
        ConfigError: It is not one.
    """
    if not re.fullmatch(r"\s*[1-9]\d*\s*", text):
        raise ConfigError(f"{flag} {text!r} is not a positive whole number")
    return int(text)


def _pair(flag: str, text: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{flag} {text!r}: write it as {form}")
    return key.strip(), value
