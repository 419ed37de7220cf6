"""``deepinfer plan``: where a card's memory would go, before anything is loaded, and which knob to turn."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import evolve, frozen
from rich.markup import escape
from rich.table import Table

from deepinfer_core.cli import options
from deepinfer_core.cli.console import console
from deepinfer_core.config_parsing import parse_size
from deepinfer_core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from deepinfer_core.budget.estimate import Budget
    from deepinfer_core.cli.explain import Target
    from deepinfer_core.cli.model_layers import ModelLayers
    from deepinfer_core.config import Config
    from deepinfer_core.registry.catalog import Catalog

MIB = 2**20


def command(
    model: Annotated[
        Path | None,
        typer.Argument(help="Checkpoint directory (its config.json is enough) or GGUF file.", show_default=False),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option("--vram", metavar="SIZE", help="Memory of the card, such as 4G or 7.5GiB.", show_default=False),
    ] = None,
    capability: Annotated[
        str | None,
        typer.Option(
            "--capability", metavar="CC", help="Compute capability: 86, 8.6 or sm_86. Implies cuda.", show_default=False
        ),
    ] = None,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KvMemory = None,
    policy: options.Policy = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    no_prefill_decode_overlap: options.NoOverlap = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the byte budget of a model before anything is loaded: weights, a step, KV cache, and what to turn.

    Example: deepinfer plan models/m --vram 4G --capability 86 --dtype float16

    serve, chat and generate size themselves by the same numbers. Exit code 7 when it does not fit.
    """
    from deepinfer_core.cli.explain import checked_catalog, target_of
    from deepinfer_core.cli.model_layers import layers_of_model
    from deepinfer_core.config import load_config

    if device is None and capability is not None:
        device = "cuda"
    overrides = options.overrides(
        sets=sets,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        policy=policy,
        dtype=dtype,
        device=device,
        backend=backend,
        no_prefill_decode_overlap=no_prefill_decode_overlap,
    )
    resolved = load_config(config, overrides)
    settings = resolved.config
    path = model if model is not None else Path(settings.model) if settings.model else None
    if path is None:
        raise ConfigError('no model was named: give a path, or model = "PATH" in the config')
    catalog = checked_catalog(resolved)
    target = target_of(settings, capability)
    layers = layers_of_model(path)
    asked = settings.cache.max_model_len
    if asked is not None and asked > layers.spec.max_length:
        raise ConfigError(f"max_model_len = {asked}: {path} allows contexts of up to {layers.spec.max_length} tokens")
    ask = Plan(catalog, layers, target, _memory(vram, target), vram is not None)
    budget = ask.budget(settings)
    knobs = list(_knobs(ask, settings, budget))
    if json:
        print(json_text.dumps(_to_json(path, ask, settings, budget, knobs), indent=2))
    else:
        _print(path, ask, settings, budget, knobs)
    if budget.problem is not None:
        hint = "" if budget.room > 0 else "; fewer bits are the way: deepinfer quantize ... --recipe mixed, or w3"
        raise CapacityError(f"it does not fit: {budget.problem}{hint}")


@frozen
class Plan:
    """What is asked about: a model on a device with so much memory, which a user named where it is ``sized``."""

    catalog: Catalog
    layers: ModelLayers
    target: Target
    total: int
    sized: bool

    def dtype(self, config: Config) -> str:
        """Return the dtype of activations that the config comes to."""
        from deepinfer_core.registry.explain import auto_dtype
        from deepinfer_core.registry.select import LinearChoice

        if config.dtype != "auto":
            return config.dtype
        target = self.target

        def quantized_in(name: str) -> Iterator[Any]:
            problems = self.layers.problems(config, target.device, target.capability, name)
            return (problem for _, problem in problems if problem.scheme != "fp16")

        return auto_dtype(
            self.catalog,
            quantized_in,
            lambda scheme: LinearChoice.from_settings(config.linear_for(scheme)),
            capability=target.capability,
            model_dtype=self.layers.spec.dtype,
        )

    def budget(self, config: Config) -> Budget:
        """Return where the memory goes under a config."""
        from deepinfer_core.budget.estimate import Part, estimate
        from deepinfer_core.budget.kv import CUDA_CONTEXT_BYTES, reserve_bytes
        from deepinfer_core.kernels.cubin_cache import cache_directory
        from deepinfer_core.registry.catalog import make
        from deepinfer_core.registry.policy import resolve_policy
        from deepinfer_core.registry.select import LinearChoice, select_attention, select_linear
        from deepinfer_core.registry.tuning import Timings, timings_path

        target, name = self.target, self.target.name
        timings = Timings.read(timings_path(name, cache_directory())) if name else Timings()
        attention = select_attention(
            self.catalog,
            self.layers.attention(config, target.device, target.capability, self.dtype(config)),
            config.attention.backend,
        )
        cuda = target.device == "cuda"
        kept = [Part(what="CUDA context and libraries", nbytes=CUDA_CONTEXT_BYTES)] if cuda else []
        reserve = reserve_bytes(config) if cuda else config.cache.reserve or 0
        kept.append(Part(what="reserve for the display and other programs", nbytes=reserve))
        free = cuda or self.sized or config.cache.reserve is not None or config.cache.memory is not None
        lanes = len(resolve_policy(self.catalog, config.scheduler.policy).spec.lanes)
        found = estimate(
            config,
            self.layers.spec,
            self.layers.format_of,
            select=lambda problem: select_linear(
                self.catalog, problem, LinearChoice.from_settings(config.linear_for(problem.scheme)), timings
            ),
            backend=make(attention.spec.spec.factory, attention.spec, attention.problem),
            attention=attention.problem,
            total=self.total,
            kept=kept,
            lanes=lanes if cuda and config.scheduler.prefill_decode_overlap else 1,
        )
        return found if free else found.by_default_on_a_cpu(config, self.layers.spec.max_length)


@frozen
class Knob:
    """A setting that would leave more room for keys and values."""

    flag: str
    tokens: int
    gained: int


def _memory(vram: str | None, target: Target) -> int:
    if vram is not None:
        try:
            # Cards are sold in powers of two: who says 4G means the 4 GiB card.
            return parse_size(vram.strip() + "iB" if vram.strip()[-1:].upper() in "KMGT" else vram)
        except ValueError as error:
            raise ConfigError(f"--vram {vram!r}: {error}") from None
    if target.device == "cuda":
        from deepinfer_core.cli.cuda_driver import ask_driver

        memory = next((card.memory for card in ask_driver().cards if card.name == target.name), None)
        if memory is None:
            raise ConfigError("that card is not here, so say how much memory it has, such as --vram 4G")
        return memory
    from deepinfer_core.budget.system import available_memory

    free = available_memory()
    if free is None:
        raise ConfigError("this system does not say how much memory is free; say how much to plan with: --vram 8G")
    return free


def _tokens(budget: Budget) -> int:
    return 0 if budget.kv is None else budget.kv.pages * budget.page_size


def _knobs(ask: Plan, config: Config, budget: Budget) -> Iterator[Knob]:
    """Yield settings that gain room, the most first; each is computed, not guessed."""
    from deepinfer_core.errors import DeepinferError

    cache, scheduler = config.cache, config.scheduler
    tries: list[tuple[str, Callable[[], Config]]] = []
    if config.attention.kv_dtype != "int8":
        tries.append(
            ("--attention.kv_dtype int8", lambda: evolve(config, attention=evolve(config.attention, kv_dtype="int8")))
        )
    tries.extend(
        (f"--scheduler.max_requests {requests}", _with(config, "scheduler", max_requests=requests))
        for requests in (16, 4)
        if scheduler.max_requests > requests
    )
    if scheduler.max_batched_tokens > 512:
        flags = "--scheduler.max_batched_tokens 512 --scheduler.prefill_chunk_tokens 512"
        tries.append((flags, _with(config, "scheduler", max_batched_tokens=512, prefill_chunk_tokens=512)))
    if scheduler.prefill_decode_overlap and budget.step.overlapped:
        tries.append(("--no-prefill-decode-overlap", _with(config, "scheduler", prefill_decode_overlap=False)))
    if ask.target.device == "cuda" and cache.memory is None and cache.reserve is None:
        tries.append(("--cache.reserve 128MiB (no display on the card)", _with(config, "cache", reserve=128 << 20)))
    if cache.memory is not None:
        tries.append(("no [cache] memory: what is free, less the reserve", _with(config, "cache", memory=None)))
    if budget.kv is None and cache.max_model_len is not None:
        tries.append(("no --max-model-len: the longest that fits", _with(config, "cache", max_model_len=None)))
    now = _tokens(budget)
    found = []
    for flag, changed in tries:
        try:
            then = ask.budget(changed())
        except DeepinferError:
            continue  # the backend that is in force does not offer it
        gained = int(_tokens(then) * then.token_bytes - now * budget.token_bytes)
        if _tokens(then) > now:
            found.append(Knob(flag=flag, tokens=_tokens(then), gained=gained))
    yield from sorted(found, key=lambda knob: -knob.tokens)


def _with(config: Config, section: str, **changes: Any) -> Callable[[], Config]:
    return lambda: evolve(config, **{section: evolve(getattr(config, section), **changes)})


def _print(path: Path, ask: Plan, config: Config, budget: Budget, knobs: list[Knob]) -> None:
    out, spec = console(), ask.layers.spec
    memory = f"{ask.total / 2**30:.2f} GiB"
    device = f"{ask.target}, {ask.dtype(config)}, {memory}"
    out.print(f"[bold]{escape(str(path))}[/bold]: {spec.architecture}, {spec.layers} layers, on {escape(device)}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_column(justify="right")
    for group, rows in _rows(config, budget):
        for index, (what, nbytes) in enumerate(rows):
            table.add_row("" if index else group, escape(what), f"{nbytes / MIB:,.1f} MiB")
    out.print(table)
    for line in budget_lines(budget, config):
        out.print(line, soft_wrap=True)
    if knobs:
        out.print("\nTo make more room:")
        knob_table = Table(box=None, pad_edge=False, show_header=False)
        for knob in knobs:
            gain = f"{knob.gained / MIB:+,.1f} MiB of KV" if abs(knob.gained) > MIB / 20 else ""
            knob_table.add_row(f"  {escape(knob.flag)}", f"{knob.tokens:,} tokens of KV", gain)
        out.print(knob_table)


def _rows(config: Config, budget: Budget) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    step, scheduler = budget.step, config.scheduler
    length = budget.longest or config.cache.max_model_len or 0
    yield "weights", [(part.what, part.nbytes) for part in budget.weights]
    layers = step.activations + step.attention + step.attention_per_token * length
    rows = [
        (f"activations and attention of {scheduler.max_batched_tokens:,} tokens", layers),
        (f"logits and sampling of {min(scheduler.max_requests, scheduler.max_batched_tokens)} requests", step.logits),
        ("workspaces of kernels", step.kernels),
        ("CUDA graphs", step.graphs),
    ]
    if not step.overlapped:
        rows.append(("of the first two only the larger counts: not at the same time", -min(layers, step.logits)))
    yield "a step", [(what, nbytes) for what, nbytes in rows if nbytes]
    yield "left alone", [(part.what, part.nbytes) for part in budget.kept if part.nbytes]
    if budget.kv is not None:
        yield "keys and values", [(f"{budget.kv.pages:,} pages of {budget.page_size} tokens", budget.kv.nbytes)]


def budget_lines(budget: Budget, config: Config) -> Iterator[str]:
    """Yield what a budget comes to, as `plan` and `serve` say it."""
    kv = budget.kv
    if kv is None:
        return
    step = budget.step.total(kv.max_model_len)
    yield f"weights: {budget.weight_bytes / MIB:,.1f} MiB; the largest step: {step / MIB:,.1f} MiB"
    tokens = kv.pages * budget.page_size
    yield (
        f"KV cache: {budget.kv_dtype}, {budget.token_bytes / 2**10:,.1f} KiB a token; {tokens:,} tokens in "
        f"{kv.nbytes / MIB:,.1f} MiB"
    )
    if kv.shrunk:
        yield f"context: {kv.max_model_len:,} tokens, shrunk from the model's {kv.wanted:,} to what fits"
    else:
        whose = "the model's own" if config.cache.max_model_len is None else "as asked"
        yield f"context: {kv.max_model_len:,} tokens, {whose}"
    together = min(config.scheduler.max_requests, tokens // kv.max_model_len)
    if together < config.scheduler.max_requests:
        share = tokens // config.scheduler.max_requests
        yield (
            f"together: {together} request{'s' * (together > 1)} of {kv.max_model_len:,} tokens, or all "
            f"{config.scheduler.max_requests} at "
            f"{share:,}; what does not fit at a time waits"
        )
    if budget.warning is not None:
        yield f"warning: {budget.warning}"


def _to_json(path: Path, ask: Plan, config: Config, budget: Budget, knobs: list[Knob]) -> dict[str, Any]:
    from attrs import asdict

    target, kv = ask.target, budget.kv
    return {
        "model": str(path),
        "device": target.device,
        "capability": None if target.capability is None else ".".join(map(str, target.capability)),
        "dtype": ask.dtype(config),
        "total": budget.total,
        "weights": {part.what: part.nbytes for part in budget.weights},
        "weight_bytes": budget.weight_bytes,
        "step": {**asdict(budget.step), "total": budget.step.total(budget.longest)},
        "kept": {part.what: part.nbytes for part in budget.kept},
        "kv": None if kv is None else {**asdict(kv), "dtype": budget.kv_dtype, "bytes_per_token": budget.token_bytes},
        "problem": budget.problem,
        "warning": budget.warning,
        "knobs": [asdict(knob) for knob in knobs],
    }
