"""``deepinfer explain``: which kernel serves which rows of which layer, and why the others do not."""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import frozen
from rich.markup import escape
from rich.table import Table

from deepinfer_core.cli.console import console
from deepinfer_core.cli.cuda_driver import ask_driver
from deepinfer_core.cli.model_layers import ModelLayers, layers_of_model
from deepinfer_core.cli.options import Backend, ConfigFile, Device, Dtype, SetKeys, overrides, parse_shape
from deepinfer_core.config import Config, ResolvedConfig, load_config
from deepinfer_core.errors import ConfigError, DeepinferError, SelectionError
from deepinfer_core.kernels.cubin_cache import cache_directory
from deepinfer_core.plugin_api import Capability, LinearProblem, parse_capability
from deepinfer_core.plugin_api import Device as DeviceName
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.config_names import check_names
from deepinfer_core.registry.discovery import discover
from deepinfer_core.registry.explain import LinearExplanation, attention_to_json, auto_dtype, explain_linear
from deepinfer_core.registry.select import AttentionSelection, LinearChoice, select_attention
from deepinfer_core.registry.tuning import Timings, timings_path


@frozen(kw_only=True)
class Target:
    """The device that is asked about; it need not be here."""

    device: DeviceName
    capability: Capability | None
    name: str

    def __str__(self) -> str:
        card = "" if self.capability is None else f" sm_{self.capability[0]}{self.capability[1]}"
        return f"{self.device}{card}" + (f" ({self.name})" if self.name else "")


def command(
    model: Annotated[
        Path | None,
        typer.Argument(help="Checkpoint directory (its config.json is enough) or GGUF file.", show_default=False),
    ] = None,
    config: ConfigFile = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="NxK", help="A layer of N outputs and K inputs, no model.")
    ] = None,
    scheme: Annotated[str, typer.Option("--scheme", help="Weight scheme of --shape.")] = "w4a16",
    group_size: Annotated[int, typer.Option("--group-size", help="Group of --shape; -1: the whole row.")] = 128,
    zeros: Annotated[bool, typer.Option("--zeros", help="The layers of --shape store zeros.")] = False,
    capability: Annotated[
        str | None,
        typer.Option("--capability", metavar="CC", help="Compute capability: 86, 8.6 or sm_86. Implies cuda."),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    backend: Backend = None,
    sets: SetKeys = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the dispatch table of every distinct layer shape, and every rejected candidate with its reason.

    Example: deepinfer explain models/m --capability 86 --dtype float16

    Imports neither torch nor CuPy, so it answers for a card that is not here.
    """
    if capability is not None and device is None:
        device = "cuda"
    resolved = load_config(config, overrides(sets=sets, dtype=dtype, device=device, backend=backend))
    settings = resolved.config
    catalog = checked_catalog(resolved)
    target = target_of(settings, capability)
    layers = None if shape else _model_layers(model, settings)

    def linear_in(act_dtype: str) -> list[tuple[str, LinearProblem]]:
        if layers is not None:
            return layers.problems(settings, target.device, target.capability, act_dtype)
        return _shape_problems(shape or [], scheme, group_size, zeros, settings, target, act_dtype)

    def choice_for(name: str) -> LinearChoice:
        return LinearChoice.from_settings(settings.linear_for(name))

    act_dtype: str = settings.dtype
    if act_dtype == "auto":
        act_dtype = auto_dtype(
            catalog,
            lambda name: (p for _, p in linear_in(name) if p.scheme != "fp16"),
            choice_for,
            capability=target.capability if target.device == "cuda" else None,
            model_dtype=layers.spec.dtype if layers is not None else None,
        )
    timings = Timings.read(timings_path(target.name, cache_directory())) if target.name else Timings()
    explained = explain_linear(catalog, linear_in(act_dtype), choice_for, timings)
    attention, attention_error = _attention(catalog, layers, settings, target, act_dtype)
    if json:
        data: dict[str, Any] = {
            "device": target.device,
            "capability": None if target.capability is None else ".".join(map(str, target.capability)),
            "device_name": target.name or None,
            "dtype": act_dtype,
            "tuned": bool(timings.entries),
            "layers": [e.to_json() for e in explained],
            "attention": attention_to_json(attention) if attention is not None else None,
            "attention_error": None if attention_error is None else str(attention_error),
            "faults": [str(fault) for fault in catalog.faults],
        }
        print(json_text.dumps(data, indent=2))
    else:
        console().print(f"{target}, {act_dtype}, {'measured table found' if timings.entries else 'untuned'}")
        _print_linear(explained)
        _print_attention(attention)
    errors = [e.error for e in explained if e.error is not None]
    errors += [attention_error] if attention_error is not None else []
    if errors:
        raise SelectionError("\n".join(dict.fromkeys(str(e) for e in errors))) from errors[0]


def checked_catalog(resolved: ResolvedConfig) -> Catalog:
    """Return what is installed, with every name of the config checked against it."""
    settings = resolved.config
    catalog = Catalog.from_discovery(discover(disable=settings.plugins.disable, strict=settings.plugins.strict))
    check_names(
        catalog,
        linear=settings.linear,
        attention=settings.attention.backend,
        policy=settings.scheduler.policy,
        describe=resolved.describe,
    )
    return catalog


def target_of(settings: Config, capability: str | None) -> Target:
    """Return the device that is asked about.

    Raises:
        ConfigError: The capability is none, contradicts the config's device, or no card is here and none was named.
    """
    if settings.device == "cpu":
        if capability is not None:
            raise ConfigError(f"--capability {capability} asks about a card, and device is 'cpu'; leave one out")
        return Target(device="cpu", capability=None, name="")
    cards = ask_driver().cards
    if capability is None and not cards:
        if settings.device == "cuda":
            raise ConfigError("device = 'cuda', and no card is here; say which one is meant, such as --capability 86")
        return Target(device="cpu", capability=None, name="")
    try:
        wanted = parse_capability(capability) if capability is not None else cards[0].capability
    except ValueError as error:
        raise ConfigError(f"--capability: {error}") from None
    here = next((card.name for card in cards if card.capability == wanted), "")
    return Target(device="cuda", capability=wanted, name=here)


def _model_layers(model: Path | None, settings: Config) -> ModelLayers:
    if model is None and settings.model is None:
        raise ConfigError(
            'nothing to explain: give a model, or a layer such as --shape 4096x4096 --scheme w4a16, or model = "..." '
            "in the config"
        )
    return layers_of_model(model if model is not None else Path(str(settings.model)))


def _shape_problems(
    shapes: Iterable[str],
    scheme: str,
    group_size: int,
    zeros: bool,
    settings: Config,
    target: Target,
    act_dtype: str,
) -> list[tuple[str, LinearProblem]]:
    problems = []
    for text in shapes:
        n, k = parse_shape("--shape", text)
        try:
            problem = LinearProblem(
                n=n,
                k=k,
                m_max=settings.scheduler.max_batched_tokens,
                device=target.device,
                capability=target.capability,
                act_dtype=act_dtype,
                scheme=scheme,
                group_size=0 if scheme == "fp16" else group_size,
                zeros=zeros,
            )
        except ValueError as error:
            raise ConfigError(f"--shape {text}: {error}") from None
        problems.append((text, problem))
    return problems


def _attention(
    catalog: Catalog, layers: ModelLayers | None, settings: Config, target: Target, act_dtype: str
) -> tuple[AttentionSelection | None, DeepinferError | None]:
    if layers is None:
        return None, None
    problem = layers.attention(settings, target.device, target.capability, act_dtype)
    try:
        return select_attention(catalog, problem, settings.attention.backend), None
    except SelectionError as error:
        return None, error


def _print_linear(explained: Iterable[LinearExplanation]) -> None:
    out = console()
    for item in explained:
        p = item.problem
        zeros = ", zeros" if p.zeros else ""
        group = "" if p.group_size == 0 else f", group {'whole row' if p.group_size == -1 else p.group_size}{zeros}"
        out.print(f"\n[bold]{escape(p.scheme)} {p.n} x {p.k}{group}[/bold]  {escape(_layer_names(item.layers))}")
        if item.selection is None:
            out.print(f"  [red]nothing serves it[/red]: {escape(str(item.error))}")
            continue
        table = Table(title=f"layout {item.selection.layout.spec.name}", title_justify="left")
        for heading in ("M", "kernel", "distribution", "version", "us", "why"):
            table.add_column(heading, justify="right" if heading in ("M", "us") else "left")
        for row in item.selection.table.rows:
            us = "" if row.measured_us is None else f"{row.measured_us:.1f}"
            kernel = row.kernel
            cells = (str(row.m), kernel.spec.name, kernel.distribution, kernel.version, us, row.why)
            table.add_row(*(escape(cell) for cell in cells))
        out.print(table)
        for rejection in item.selection.rejected:
            out.print(f"  not {escape(str(rejection))}")
        for warning in item.selection.warnings:
            out.print(f"  [yellow]warning[/yellow]: {escape(warning)}")


def _print_attention(attention: AttentionSelection | None) -> None:
    if attention is None:
        return
    out = console()
    chosen = f"{attention.spec.spec.name} ({attention.spec.origin}), {attention.why}"
    out.print(f"\n[bold]attention[/bold]  {escape(chosen)}")
    for rejection in attention.rejected:
        out.print(f"  not {escape(str(rejection))}")


def _layer_names(names: tuple[str, ...]) -> str:
    """Return ``layers.*.qkv (30)`` for thirty layers of one kind."""
    kinds: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items())
