"""``deepinfer bench``: honest measurements, each with a JSON file that says which path ran and on what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_core.cli import bench_serving
from deepinfer_core.cli.bench_serving import Output
from deepinfer_core.cli.options import Backend, ConfigFile, SetKeys, overrides, parse_counts, parse_shape
from deepinfer_core.errors import ConfigError

app = typer.Typer(
    help="Measure kernels and serving; every result names device, versions and the path taken.",
    epilog="Example: deepinfer bench serving models/m --policy all --output result.json",
)

app.command("serving")(bench_serving.serving)
app.command("jitter")(bench_serving.jitter)

KERNEL_SHAPES = "2560x2048,2048x2048,22016x2048,2048x11008,4608x3584,3584x3584,37888x3584,3584x18944"


@app.command("linear")
def linear(
    scheme: Annotated[str, typer.Option("--scheme", help="Weight schemes, comma separated.")] = "w4a16,w3a16",
    shapes: Annotated[str, typer.Option("--shapes", metavar="NxK,...", help="Layers: outputs x inputs.")] = (
        KERNEL_SHAPES
    ),
    ms: Annotated[str, typer.Option("--m", metavar="M,...", help="Row counts.")] = "1,8,16,32",
    group_size: Annotated[int, typer.Option("--group-size", help="Codes a scale; -1: the whole row.")] = 128,
    zeros: Annotated[bool, typer.Option("--zeros", help="Layers store a zero per group.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="Activation dtype.")] = "float16",
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Measure this kernel, not the selected one; repeatable.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure other people's kernels too.")] = True,
    full: Annotated[
        bool,
        typer.Option("--full", help="All row counts and shapes that `bench.bounds` judges, instead of --m, --shapes."),
    ] = False,
    replays: Annotated[int, typer.Option("--replays", min=1, help="Measured replays of each graph.")] = 7,
    merge: Annotated[
        bool, typer.Option("--merge", help="Keep the rows of --output that this run does not measure.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result (.png, .svg, .pdf).")] = None,
    config: ConfigFile = None,
    backend: Backend = None,
    sets: SetKeys = None,
    output: Output = None,
) -> None:
    """Time our kernels, the fallback, cuBLAS, tinygemm and humming side by side on this card."""
    from deepinfer_core.assemble import catalog_for
    from deepinfer_core.bench import linear as bench
    from deepinfer_core.bench.linear_plot import draw
    from deepinfer_core.bench.plot import require
    from deepinfer_core.bench.results import write_result
    from deepinfer_core.config import load_config
    from deepinfer_core.registry.select import LinearChoice

    if merge and output is None:
        raise ConfigError("--merge keeps rows of a file: name it with --output")
    if plot is not None:
        require(plot)
    settings = load_config(config, overrides(sets=sets, backend=backend)).config
    schemes = tuple(s for s in scheme.split(",") if s)
    if not schemes:
        raise ConfigError(f"--scheme {scheme!r} names none; write it like w4a16,w3a16")
    spec = bench.LinearBenchSpec(
        schemes=schemes,
        shapes=bench.FULL_SHAPES if full else tuple(parse_shape("--shapes", s) for s in shapes.split(",") if s),
        ms=bench.FULL_MS if full else parse_counts("--m", ms),
        group_size=group_size,
        zeros=zeros,
        act_dtype=dtype,
        choice_for=lambda name: LinearChoice.from_settings(settings.linear_for(name)),
        kernels=tuple(kernel or ()),
        peers=peers,
        replays=replays,
    )
    result = bench.run(catalog_for(settings), spec)
    bench.require_right(result)
    if merge and output is not None and output.exists():
        result = bench.merged(json.loads(output.read_text(encoding="utf-8")), result)
    if plot is not None:
        draw(plot, result)
    if output is not None:
        write_result(output, result)
        print(f"written to {output}")
