"""``deepinfer quantize``: a Hugging Face or GGUF model in, a deepinfer checkpoint and its quality report out."""

from __future__ import annotations

import gc
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_core.cli.console import console
from deepinfer_core.cli.options import ConfigFile, SetKeys, overrides
from deepinfer_core.errors import ConfigError, DeepinferError

if TYPE_CHECKING:
    from deepinfer_core.quantize.report import PerplexityReport, QuantizationReport
    from deepinfer_core.registry.catalog import Catalog

SMALL_MODEL = 500_000_000
"""Weights up to which ``--perplexity auto`` measures: both models are run in float32, about 2 GB at this size."""


class Measure(StrEnum):
    """When to measure perplexity."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Method(StrEnum):
    """How scales are chosen."""

    SEARCH = "search"
    RTN = "rtn"


def command(
    src: Annotated[Path, typer.Argument(help="Model directory (safetensors) or GGUF file.")],
    dst: Annotated[Path, typer.Argument(help="Directory to write; it appears when it is complete.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="w4, w3, mixed, another plugin's, or a TOML file.")],
    group_size: Annotated[
        str, typer.Option(help="auto, or codes that share a scale, such as 32, 64, 128; -1 is the whole row.")
    ] = "auto",
    zeros: Annotated[str, typer.Option(help="auto, on or off: store a zero for each group.")] = "auto",
    method: Annotated[Method, typer.Option(help="search looks for the best scale of each group.")] = Method.SEARCH,
    perplexity: Annotated[Measure, typer.Option(help="Compare both models on a fixed text.")] = Measure.AUTO,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST when it has content.")] = False,
    config: ConfigFile = None,
    sets: SetKeys = None,
) -> None:
    """Convert a model by recipe. Layers that are 4-bit in a GGUF (Q4_0, Q4_1) are carried over bit for bit.

    Example: deepinfer quantize SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-mixed --recipe mixed

    Of a config, [plugins] counts here: which plugins are not loaded, and whether one that fails stops the conversion.
    """
    group, keep_zeros = _group_size(group_size), _zeros(zeros)

    from attrs import evolve

    from deepinfer_core.assemble import catalog_for
    from deepinfer_core.config import load_config
    from deepinfer_core.quantize import quantize, write_report

    catalog = catalog_for(load_config(config, overrides(sets=sets)).config)
    with _progress_bar() as tell:
        report = quantize(
            src,
            dst,
            recipe,
            catalog=catalog,
            group_size=group,
            zeros=keep_zeros,
            method=method.value,
            overwrite=overwrite,
            progress=tell,
        )
    if _worth_measuring(report, perplexity, dst):
        try:
            report = evolve(report, perplexity=_perplexity(src, dst, catalog))
            write_report(report, dst)
        except DeepinferError as error:
            if perplexity is Measure.ON:
                raise
            print(f"{dst} is complete, but perplexity was not measured: {error}", file=sys.stderr)
    _print(report)


def _group_size(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--group-size {text!r}: write auto, a number such as 32, or -1 for the whole row") from None


def _zeros(text: str) -> bool | None:
    known = {"auto": None, "on": True, "off": False}
    if text not in known:
        raise ConfigError(f"--zeros {text!r}: write auto, on or off")
    return known[text]


def _worth_measuring(report: QuantizationReport, measure: Measure, directory: Path) -> bool:
    if measure is not Measure.AUTO:
        return measure is Measure.ON
    has_tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return has_tokenizer and sum(layer.n * layer.k for layer in report.layers) <= SMALL_MODEL


def _perplexity(src: Path, dst: Path, catalog: Catalog) -> PerplexityReport:
    """Score the fixed text with one model after the other, in float32: the formats are compared, not the kernels."""
    from deepinfer_core.llm import LLM
    from deepinfer_core.quantize.perplexity import TEXT_NAME, WINDOW, perplexity, public_domain_text
    from deepinfer_core.quantize.report import PerplexityReport

    found: list[float] = []
    scored = 0
    with console(stderr=True).status("") as status:
        for path in (src, dst):
            status.update(f"measuring perplexity of {path}")
            model = LLM(path, catalog=catalog, dtype="float32")
            window = min(WINDOW, model.running.engine.limits.max_model_len - 1)  # a request leaves room for an answer
            value, scored = perplexity(model.score, model.tokenizer.encode(public_domain_text()), window=window)
            found.append(value)
            del model
            gc.collect()  # two models of float32 weights need not be there at once
    return PerplexityReport(source=found[0], result=found[1], tokens=scored, text=TEXT_NAME)


class _progress_bar:  # noqa: N801 - reads as a function where it is used
    """Draws the conversion's progress on the error stream; a pipe gets nothing."""

    def __enter__(self) -> _progress_bar:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        screen = console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=screen,
            disable=not screen.is_terminal,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("checking", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=what)


def _print(report: QuantizationReport) -> None:
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False)
    for title in ("layers", "format", "count", "mean error", "worst error", "MiB"):
        table.add_column(title, justify="left" if title in ("layers", "format") else "right")
    for row in report.table():
        table.add_row(*map(str, row))
    out.print(table)
    size = f"{report.total_bytes / 2**20:.1f} MiB, {report.linear_bits:.2f} bits a weight"
    out.print(f"{report.destination}: {size}, {report.seconds:.1f} s", soft_wrap=True)
    if report.perplexity is not None:
        measured = report.perplexity
        out.print(
            f"perplexity over {measured.tokens} tokens: source {measured.source:.3f}, "
            f"result {measured.result:.3f} ({measured.ratio:.3f}x)",
            soft_wrap=True,
        )
