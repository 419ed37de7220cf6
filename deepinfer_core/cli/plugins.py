"""``deepinfer plugins list``: what is installed, what each plugin brings, and what was held back."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from deepinfer_core.cli.console import console
from deepinfer_core.cli.options import ConfigFile
from deepinfer_core.config import load_config
from deepinfer_core.errors import PluginError
from deepinfer_core.registry.discovery import Discovery, LoadedPlugin, discover

EXAMPLE = "Example: deepinfer plugins list"

app = typer.Typer(no_args_is_help=True, help="Installed plugins and the names that they register.", epilog=EXAMPLE)


@app.callback()
def plugins() -> None:
    """Installed plugins and the names that they register."""


@app.command("list")
def plugins_list(
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail when a plugin was held back.")] = False,
) -> None:
    """List plugins with everything that they register; broken ones with their cause. Imports neither torch nor CuPy.

    Example: deepinfer plugins list --config deepinfer.toml
    """
    settings = load_config(config).config.plugins
    found = discover(disable=settings.disable, quiet=True)
    if json:
        print(json_text.dumps(to_json(found), indent=2))
    else:
        _print(found)
    if found.faults and (strict or settings.strict):
        raise PluginError(f"strict mode, and {len(found.faults)} plugin(s) were held back") from found.faults[0].error


def to_json(found: Discovery) -> dict[str, Any]:
    """Return plain data about plugins and faults."""
    return {
        "plugins": [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "entry_point": plugin.entry_point,
                **names_by_kind(plugin),
            }
            for plugin in found.plugins
        ],
        "faults": [
            {
                "name": fault.name,
                "distribution": fault.distribution,
                "version": fault.version,
                "stage": fault.stage,
                "cause": fault.cause,
            }
            for fault in found.faults
        ],
        "disabled": list(found.disabled),
    }


def names_by_kind(plugin: LoadedPlugin) -> dict[str, list[str]]:
    """Return kind -> names that a plugin registers, every kind present."""
    backends = plugin.backends
    return {
        "backends": [b.name for b in backends],
        "schemes": [s.name for b in backends for s in b.schemes],
        "layouts": [s.name for b in backends for s in b.layouts],
        "kernels": [s.name for b in backends for s in b.kernels],
        "experimental": [s.name for b in backends for s in b.kernels if s.stability == "experimental"],
        "recipes": [s.name for b in backends for s in b.recipes],
        "attention": [s.name for s in plugin.attention],
        "policies": [s.name for s in plugin.policies],
    }


def _print(found: Discovery) -> None:
    out = console()
    if not found.plugins:
        out.print("no plugin is loaded; to begin: pip install deepinfer-plugin-w4a16")
    else:
        table = Table(show_lines=True)
        for heading in ("plugin", "distribution", "registers"):
            table.add_column(heading)
        for plugin in found.plugins:
            kinds = names_by_kind(plugin)
            experimental = set(kinds.pop("experimental"))
            lines = [
                f"{kind}: {', '.join(f'{n} (experimental)' if n in experimental else n for n in names)}"
                for kind, names in kinds.items()
                if names
            ]
            registers = "\n".join(lines) or "nothing in this release"
            table.add_row(escape(plugin.name), escape(f"{plugin.distribution} {plugin.version}"), escape(registers))
        out.print(table)
    for name in found.disabled:
        out.print(f"disabled by the config: {escape(name)}")
    for fault in found.faults:
        out.print(f"[red]fault[/red]: {escape(str(fault))}")
