"""What a conversion did, layer by layer: printed as a table, kept as JSON beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from deepinfer_core.checkpoint.atomic_directory import rename

REPORT_NAME = "quantization_report.json"


@frozen(kw_only=True)
class LayerReport:
    """One linear layer.

    Attributes:
        module: HF module name.
        n: Outputs.
        k: Inputs.
        source: Format before, as text.
        scheme: Scheme after; ``"fp16"`` is dense.
        group_size: Group after.
        zeros: Zeros after.
        carried: Tensors copied bit for bit.
        relative_error: ``|W - Q| / |W|`` over the source's values, Frobenius norm; 0 when carried.
        nbytes: Bytes after.
    """

    module: str
    n: int
    k: int
    source: str
    scheme: str
    group_size: int
    zeros: bool
    carried: bool
    relative_error: float
    nbytes: int


@frozen(kw_only=True)
class PerplexityReport:
    """Perplexity of source and result over the same tokens of a fixed text.

    Attributes:
        source: Of the model that was converted.
        result: Of the converted model.
        tokens: Scored tokens.
        text: Name of the text.
    """

    source: float
    result: float
    tokens: int
    text: str

    @property
    def ratio(self) -> float:
        """How many times the source's perplexity the result has."""
        return self.result / self.source


@frozen(kw_only=True)
class QuantizationReport:
    """A whole conversion.

    Attributes:
        source: Path that was read.
        destination: Directory that was written.
        recipe: Name or file of the recipe.
        method: ``"rtn"`` or ``"search"``.
        layers: Linear layers in order.
        total_bytes: Bytes of all tensors written.
        linear_bits: Average bits per weight of all linear layers that are stored, scales and zeros included.
        seconds: Wall-clock time of the conversion.
        perplexity: None when it was not measured.
    """

    source: str
    destination: str
    recipe: str
    method: str
    layers: tuple[LayerReport, ...]
    total_bytes: int
    linear_bits: float
    seconds: float
    perplexity: PerplexityReport | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        data = asdict(self)
        if self.perplexity is not None:
            data["perplexity"]["ratio"] = self.perplexity.ratio
        return data

    def table(self) -> list[tuple[str, str, int, str, str, str]]:
        """Return rows (kind of layer, format, layers, mean error, largest error, MiB), for printing.

        Layers of the same projection and format make one row.
        """
        groups: dict[tuple[str, str], list[LayerReport]] = {}
        for layer in self.layers:
            kind = ".".join("*" if part.isdigit() else part for part in layer.module.split("."))
            groups.setdefault((kind, _format_text(layer)), []).append(layer)
        rows = []
        for (kind, form), members in groups.items():
            errors = [m.relative_error for m in members]
            size = sum(m.nbytes for m in members) / 2**20
            mean, worst = f"{sum(errors) / len(errors):.4f}", f"{max(errors):.4f}"
            rows.append((kind, form, len(members), mean, worst, f"{size:.1f}"))
        return rows


def write_report(report: QuantizationReport, directory: Path) -> None:
    """Write ``quantization_report.json``, whole or not at all."""
    target = directory / REPORT_NAME
    fresh = target.with_name(target.name + ".new")
    fresh.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    rename(fresh, target)


def _format_text(layer: LayerReport) -> str:
    if layer.scheme == "fp16":
        return "dense"
    group = "row" if layer.group_size == -1 else f"g{layer.group_size}"
    return f"{layer.scheme} {group}{' zeros' if layer.zeros else ''}{' (carried over)' if layer.carried else ''}"
