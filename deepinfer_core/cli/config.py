"""``deepinfer config show``: every value in force, and whether a default, the file or a flag set it."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from deepinfer_core.cli.options import (
    Backend,
    ConfigFile,
    Device,
    Dtype,
    KvMemory,
    MaxModelLen,
    Policy,
    SetKeys,
    overrides,
)
from deepinfer_core.config import ResolvedConfig, load_config
from deepinfer_core.config_parsing import toml_text

EXAMPLE = "Example: deepinfer config show --config deepinfer.toml"

app = typer.Typer(no_args_is_help=True, help="The config that is in force.", epilog=EXAMPLE)


@app.callback()
def config() -> None:
    """The config that is in force."""


@app.command("show")
def config_show(
    config: ConfigFile = None,
    sets: SetKeys = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    policy: Policy = None,
    dtype: Dtype = None,
    device: Device = None,
    backend: Backend = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the resolved config as TOML, each line with its origin: default, file or flag.

    Example: deepinfer config show --config deepinfer.toml --cache.page_size 32
    """
    flags = overrides(
        sets=sets,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        policy=policy,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    resolved = load_config(config, flags)
    if json:
        rows = {".".join(path): {"value": value, "origin": origin} for path, value, origin in resolved.rows()}
        print(json_text.dumps(rows, indent=2, default=_plain))
    else:
        for line in toml_lines(resolved):
            print(line)


def toml_lines(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a TOML document that gives the same config when it is read again, with origins as comments."""
    section: tuple[str, ...] = ()
    for path, value, origin in resolved.rows():
        if path[:-1] != section:
            section = path[:-1]
            yield ""
            yield f"[{'.'.join(_key(part) for part in section)}]"
        line = f"{_key(path[-1])} = {toml_text(value)}"
        if value is None:
            line = f"# {line}"
        yield f"{line:<48} # {origin}"


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _key(name: str) -> str:
    plain = name.replace("_", "").replace("-", "")
    return name if plain.isascii() and plain.isalnum() else toml_text(name)
