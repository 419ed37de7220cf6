"""Config flags that commands share: every config key as a flag, the common ones under short names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import attrs
import typer

from deepinfer_core.config import Config
from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_core.engine.engine import Engine


def config_keys() -> tuple[str, ...]:
    """Return every key of a config file, dotted; ``<scheme>`` stands for a weight scheme."""
    return tuple(_keys(Config, ""))


def _keys(section: Any, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        below = get_args(hint)[1] if get_origin(hint) is Mapping else None
        if attrs.has(hint):
            yield from _keys(hint, f"{prefix}{name}.")
        elif below is not None and attrs.has(below):
            yield from _keys(below, f"{prefix}{name}.<scheme>.")
        else:
            yield f"{prefix}{name}"


_SECTIONS = "|".join(sorted({key.partition(".")[0] for key in config_keys() if "." in key}))
_DOTTED = re.compile(rf"--((?:{_SECTIONS})\.[^\s=]+|batch_invariant)(?:=(.*))?", re.DOTALL)

CONFIG_EPILOG = (
    "Every config key is a flag too: --cache.page_size 32, --attention.kv_dtype int8, --linear.w4a16.backend w4a16; "
    "flags go over the --config file. The keys: "
    + ", ".join(key for key in config_keys() if key != "model")
    + ". deepinfer.example.toml explains each; deepinfer config show prints what is in force."
)

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


def _policies() -> list[str]:
    """Return the names for a shell's completion; nothing is imported but the plugins' descriptors."""
    from deepinfer_core.registry.discovery import discover

    return ["auto", *sorted({spec.name for plugin in discover(quiet=True).plugins for spec in plugin.policies})]


Policy = Annotated[
    str | None,
    typer.Option("--policy", show_default=False, help="Scheduling policy, by name.", autocompletion=_policies),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        show_default=False,
        help="float16, bfloat16, float32 or auto.",
        autocompletion=lambda: ["auto", "float16", "bfloat16", "float32"],
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", show_default=False, help="cuda, cpu or auto.", autocompletion=lambda: ["auto", "cuda", "cpu"]
    ),
]
NoOverlap = Annotated[
    bool, typer.Option("--no-prefill-decode-overlap", help="One lane, one work after another, under any policy.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        show_default=False,
        help="Write every cycle and work for ui.perfetto.dev or chrome://tracing.",
    ),
]
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
    no_prefill_decode_overlap: bool = False,
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
        "scheduler.prefill_decode_overlap": False if no_prefill_decode_overlap else None,
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


@contextmanager
def tracing(path: Path | None) -> Iterator[Callable[[Engine], None]]:
    """Yield what attaches a trace file to an engine, nothing at all without a path; the file is complete at the end.

    Raises:
        ConfigError: The file cannot be created.
    """
    if path is None:
        yield lambda engine: None
        return
    from deepinfer_core.engine.trace import TraceFile

    with TraceFile(path) as file:
        yield lambda engine: engine.trace_to(file)
