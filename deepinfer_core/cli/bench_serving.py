"""``deepinfer bench serving`` and ``bench jitter``: requests through the engine, under each policy, side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_core.cli import options

if TYPE_CHECKING:
    from deepinfer_core.bench.stage import Stage

Model = Annotated[str | None, typer.Argument(help="Checkpoint directory or GGUF file.", show_default=False)]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", help="Policies to compare: repeatable, comma separated, or 'all'.", show_default="the config's"
    ),
]
Iterations = Annotated[int, typer.Option("--iterations", help="Runs of each case, after one to warm up.", min=1)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here as JSON.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw the gaps between tokens here, as PNG.", show_default=False)
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens of every answer.", min=2)]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", help="Tokens of every prompt.", min=1)]
MaxCache = Annotated[
    int | None, typer.Option("--max-cache", help="Model length: longest context in tokens.", min=1, show_default=False)
]
ReserveMb = Annotated[
    int | None, typer.Option("--reserve-memory-mb", help="MiB of the card to leave to others.", min=1)
]
NoPrefixCache = Annotated[bool, typer.Option("--no-prefix-cache", help="Keep no pages of finished requests.")]
NoOverlap = Annotated[
    bool, typer.Option("--no-prefill-decode-overlap", help="One lane, one work after another, under any policy.")
]


def serving(
    model: Model = None,
    policy: Policies = None,
    concurrency: Annotated[str, typer.Option("--concurrency", metavar="N,...", help="Clients.")] = "1,2,4",
    requests: Annotated[int, typer.Option("--requests-per-client", help="One after another.", min=1)] = 2,
    prompt_tokens: PromptTokens = 128,
    max_new_tokens: NewTokens = 64,
    iterations: Iterations = 3,
    prefill_chunk_tokens: Annotated[
        int | None, typer.Option("--prefill-chunk-tokens", help="Prompt tokens of a chunk.", min=1, show_default=False)
    ] = None,
    max_cache: MaxCache = None,
    reserve_memory_mb: ReserveMb = None,
    kv_memory: options.KvMemory = None,
    no_prefix_cache: NoPrefixCache = False,
    no_prefill_decode_overlap: NoOverlap = False,
    backend: options.Backend = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    output: Output = None,
    plot: Plot = None,
    trace: options.Trace = None,
) -> None:
    """Measure tokens/s, TTFT, TPOT, ITL and jitter of clients that send one request after another."""
    from deepinfer_core.bench import serving as bench

    spec = bench.ServingSpec(
        concurrency=options.parse_counts("--concurrency", concurrency),
        prompt_tokens=prompt_tokens,
        new_tokens=max_new_tokens,
        requests_per_client=requests,
        iterations=iterations,
    )
    _check_plot(plot)
    stage = _stage(
        model,
        policy,
        config,
        options.overrides(sets=sets, kv_memory=kv_memory, dtype=dtype, device=device, backend=backend),
        prefill_chunk_tokens=prefill_chunk_tokens,
        max_cache=max_cache,
        reserve_memory_mb=reserve_memory_mb,
        no_prefix_cache=no_prefix_cache,
        no_prefill_decode_overlap=no_prefill_decode_overlap,
    )
    with options.tracing(trace) as stage.attach:
        result = bench.run(stage, spec)
    _keep(result, bench.panels, output, plot)


def jitter(
    model: Model = None,
    policy: Policies = None,
    chunk_sizes: Annotated[
        str, typer.Option("--chunk-sizes", metavar="N,...", help="Prompt tokens of a chunk.")
    ] = "64,256,512",
    long_repeat: Annotated[
        int, typer.Option("--long-repeat", help="Paragraphs (some 30 tokens each) of the long prompt.", min=1)
    ] = 32,
    streams: Annotated[int, typer.Option("--streams", help="Requests that run when it comes.", min=1)] = 4,
    prompt_tokens: PromptTokens = 32,
    max_new_tokens: NewTokens = 96,
    insert_after: Annotated[
        int, typer.Option("--insert-after", help="Tokens that each stream has by then.", min=2)
    ] = 16,
    iterations: Iterations = 3,
    max_cache: MaxCache = None,
    reserve_memory_mb: ReserveMb = None,
    kv_memory: options.KvMemory = None,
    no_prefix_cache: NoPrefixCache = False,
    no_prefill_decode_overlap: NoOverlap = False,
    backend: options.Backend = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Measure what a long prompt does to running streams: their longest gap, p95 - p50, and its own TTFT."""
    from deepinfer_core.bench import jitter as bench

    spec = bench.JitterSpec(
        chunk_sizes=options.parse_counts("--chunk-sizes", chunk_sizes),
        long_repeat=long_repeat,
        streams=streams,
        prompt_tokens=prompt_tokens,
        new_tokens=max_new_tokens,
        insert_after=insert_after,
        iterations=iterations,
    )
    _check_plot(plot)
    stage = _stage(
        model,
        policy,
        config,
        options.overrides(sets=sets, kv_memory=kv_memory, dtype=dtype, device=device, backend=backend),
        max_cache=max_cache,
        reserve_memory_mb=reserve_memory_mb,
        no_prefix_cache=no_prefix_cache,
        no_prefill_decode_overlap=no_prefill_decode_overlap,
    )
    _keep(bench.run(stage, spec), bench.panels, output, plot)


def _stage(
    model: str | None,
    policy: list[str] | None,
    config: Path | None,
    overrides: dict[str, object],
    *,
    max_cache: int | None,
    reserve_memory_mb: int | None,
    no_prefix_cache: bool,
    no_prefill_decode_overlap: bool,
    prefill_chunk_tokens: int | None = None,
) -> Stage:
    from deepinfer_core.assemble import catalog_for
    from deepinfer_core.bench.stage import Stage
    from deepinfer_core.config import load_config

    flags: dict[str, object] = {
        "model": model,
        "cache.max_model_len": max_cache,
        "cache.reserve": None if reserve_memory_mb is None else reserve_memory_mb << 20,
        "cache.prefix_cache": False if no_prefix_cache else None,
        "scheduler.prefill_decode_overlap": False if no_prefill_decode_overlap else None,
        "scheduler.prefill_chunk_tokens": prefill_chunk_tokens,
    }
    resolved = load_config(config, overrides | {key: value for key, value in flags.items() if value is not None})
    names = [name.strip() for text in policy or () for name in text.split(",") if name.strip()]
    return Stage(resolved, catalog_for(resolved.config), names)


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from deepinfer_core.bench.plot import require

        require(plot)


def _keep(result: dict[str, Any], panels: Callable[..., Any], output: Path | None, plot: Path | None) -> None:
    meta = result["meta"]
    if output is not None:
        from deepinfer_core.bench.results import write_result

        write_result(output, result)
        print(f"written to {output}")
    if plot is not None:
        from deepinfer_core.bench.plot import draw

        where = meta["device"] if meta["device"] != "cpu" else f"CPU ({meta['cpu']}, {meta['torch_threads']} threads)"
        draw(plot, panels(result["rows"]), f"{meta['model']['name']}, {meta['dtype']}, {where}, {meta['date']}")
        print(f"drawn to {plot}")
