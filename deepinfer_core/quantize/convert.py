"""Offline conversion: a dense or GGUF model in, a deepinfer checkpoint out, one tensor in memory at a time."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_core.checkpoint import Checkpoint, LayerPatterns, open_checkpoint
from deepinfer_core.checkpoint.atomic_directory import atomic_directory, check_destination
from deepinfer_core.checkpoint.writer import PlannedTensor, TensorWriter
from deepinfer_core.errors import CapacityError, CheckpointError, ConfigError, DeepinferError, nearest
from deepinfer_core.model.hf_config import model_spec_from_hf
from deepinfer_core.model.shapes import HEAD, dense_tensors, linear_modules, required_tensors
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import QuantMethod, WeightScheme
from deepinfer_core.quantize.layer_plan import LayerPlan, Overrides, plan_layers
from deepinfer_core.quantize.recipes import find_recipe
from deepinfer_core.quantize.report import LayerReport, QuantizationReport, write_report
from deepinfer_core.quantize.tokenizer_files import carry_tokenizer
from deepinfer_core.registry.catalog import Catalog, make_scheme

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("deepinfer")

CHUNK_ELEMENTS = 8 << 20
"""Weights quantized at once: 32 MiB in float32, so that a search over scales needs a few times that, not more."""

METHODS: tuple[QuantMethod, ...] = ("search", "rtn")

Progress = Callable[[int, int, str], None]
"""Called as (bytes written, bytes in all, what is being written)."""


def quantize(
    src: str | Path,
    dst: str | Path,
    recipe: str,
    *,
    catalog: Catalog,
    group_size: int | None = None,
    zeros: bool | None = None,
    method: QuantMethod = "search",
    overwrite: bool = False,
    progress: Progress | None = None,
    save_tokenizer: Callable[[Checkpoint, Path], None] = carry_tokenizer,
) -> QuantizationReport:
    """Convert a model.

    Everything that can be refused is refused before the first tensor is read. Layers that are in the wanted form
    already (GGUF Q4_0 and Q4_1 under ``w4a16``) are carried over bit for bit.

    Args:
        src: What `open_checkpoint` opens.
        dst: Directory to make; it appears when it is complete.
        recipe: A registered name or a TOML file.
        catalog: Installed schemes and recipes.
        group_size: Instead of the recipe's group sizes; None leaves them.
        zeros: Instead of the recipe's zeros; None leaves them.
        method: ``"search"`` (least-squares search of each scale) or ``"rtn"``.
        overwrite: Replace a destination that has content; it is kept until the new one is complete.
        progress: Called before and after each tensor.
        save_tokenizer: Writes the tokenizer's files into a directory.

    Raises:
        CheckpointError: The source cannot be read, or the destination would lose something.
        ModelError: The source's architecture is not supported.
        SelectionError: A scheme or recipe is not installed.
        ConfigError: The recipe does not fit the model.
        CapacityError: The disk has no room.
    """
    begun = time.perf_counter()
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    source, destination = open_checkpoint(src), _real_path(dst)
    try:
        check_destination(destination, overwrite=overwrite)
        _check_apart(source, destination)
        found = find_recipe(recipe, catalog)
        spec = model_spec_from_hf(source.hf_config, str(source.config_file))
        source.verify(
            required_tensors(spec),
            schemes={name: registered.spec for name, registered in catalog.schemes.items()},
        )
        overrides = Overrides(group_size=group_size, zeros=zeros)
        layers = plan_layers(linear_modules(spec), source, found, catalog, overrides)
        dense = [PlannedTensor(n, source.written_dtype(n), source.shape(n)) for n in dense_tensors(spec)]
        schemes = _schemes(layers, catalog)
        with atomic_directory(destination, overwrite=overwrite) as partial:
            writer = TensorWriter(partial, _in_file_order(dense, layers, spec))
            _check_room(partial, writer.total_bytes)
            reports = _write_tensors(writer, source, dense, layers, schemes, method, progress)
            save_tokenizer(source, partial)
            report = QuantizationReport(
                source=str(src),
                destination=str(dst),
                recipe=recipe,
                method=method,
                layers=reports,
                total_bytes=writer.total_bytes,
                linear_bits=_average_bits(reports),
                seconds=round(time.perf_counter() - begun, 3),
            )
            write_report(report, partial)
            _write_configs(source, layers, partial)
    finally:
        source.close()
    return report


def _real_path(dst: str | Path) -> Path:
    try:
        return Path(dst).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # a loop of symbolic links
        raise CheckpointError(f"{dst} cannot be written to: {error}") from error


def _check_apart(source: Checkpoint, destination: Path) -> None:
    origin = source.path.resolve()
    if destination == origin or destination in origin.parents:
        raise CheckpointError(f"the result cannot be written to {destination}: the source {origin} is there")


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CapacityError(
            f"{directory.parent}: the result takes {needed / 2**20:.0f} MiB, the disk has {free / 2**20:.0f} MiB free"
        )


def _schemes(layers: tuple[LayerPlan, ...], catalog: Catalog) -> dict[str, WeightScheme]:
    """Make every scheme that is quantized to, or dequantized from."""
    changed = [layer for layer in layers if not layer.carried]
    owners = {form.scheme: form.distribution for layer in changed for form in (layer.source, layer.target)}
    return {
        name: make_scheme(catalog, name, distribution=distribution)
        for name, distribution in owners.items()
        if name != "fp16"
    }


def _in_file_order(dense: list[PlannedTensor], layers: tuple[LayerPlan, ...], spec: ModelSpec) -> list[PlannedTensor]:
    """Embedding, then layer after layer with its norms, then the final norm and head: what is read together is near."""
    tensors = [*dense, *(tensor for layer in layers for tensor in layer.tensors)]
    order = {"embed_tokens": -1, "norm": spec.layers, HEAD: spec.layers + 1}

    def place(tensor: PlannedTensor) -> int:
        parts = tensor.name.split(".")
        return int(parts[2]) if parts[1] == "layers" else order[parts[0] if parts[0] == HEAD else parts[1]]

    return sorted(tensors, key=place)


def _write_tensors(
    writer: TensorWriter,
    source: Checkpoint,
    dense: list[PlannedTensor],
    layers: tuple[LayerPlan, ...],
    schemes: dict[str, WeightScheme],
    method: QuantMethod,
    progress: Progress | None,
) -> tuple[LayerReport, ...]:
    tell = progress or (lambda done, total, what: None)
    done, reports = 0, []
    with writer:
        for planned in dense:
            tell(done, writer.total_bytes, planned.name)
            writer.put(planned.name, _as_planned(source.tensor(planned.name), planned, source))
            done += planned.nbytes
        for layer in layers:
            tell(done, writer.total_bytes, layer.module)
            error = _write_layer(writer, source, layer, schemes, method)
            nbytes = sum(t.nbytes for t in layer.tensors)
            done += nbytes
            reports.append(
                LayerReport(
                    module=layer.module,
                    n=layer.n,
                    k=layer.k,
                    source=str(layer.source),
                    scheme=layer.target.scheme,
                    group_size=layer.target.group_size,
                    zeros=layer.target.zeros,
                    carried=layer.carried,
                    relative_error=error,
                    nbytes=nbytes,
                )
            )
    tell(done, writer.total_bytes, "done")
    return tuple(reports)


def _write_layer(
    writer: TensorWriter,
    source: Checkpoint,
    layer: LayerPlan,
    schemes: dict[str, WeightScheme],
    method: QuantMethod,
) -> float:
    """Write one layer; returns its relative error."""
    if not layer.tensors:
        return 0.0
    stored = source.layer_tensors(layer.module)
    if layer.carried:
        for planned in layer.tensors:
            writer.put(planned.name, _as_planned(stored[planned.name.rpartition(".")[2]], planned, source))
        return 0.0
    import torch

    target = layer.target
    scheme = schemes[target.scheme]
    parts: list[dict[str, torch.Tensor]] = []
    wrong = norm = 0.0
    for weight in _weight_chunks(stored, layer, schemes):
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(f"{source.path}: {layer.module}.weight holds NaN or infinity; it cannot be quantized")
        try:
            part = scheme.quantize(weight, group_size=target.group_size, zeros=target.zeros, method=method)
        except DeepinferError as error:
            raise type(error)(f"{source.path}: {layer.module}.weight as {target}: {error}") from error
        values = scheme.dequantize(part, k=layer.k, group_size=target.group_size, dtype=torch.float32)
        wrong += float((values - weight).square().sum(dtype=torch.float64))
        norm += float(weight.square().sum(dtype=torch.float64))
        parts.append(part)
    for planned in layer.tensors:
        name = planned.name.rpartition(".")[2]
        writer.put(planned.name, torch.cat([part[name] for part in parts]))
    return (wrong / norm) ** 0.5 if norm else 0.0


def _weight_chunks(
    stored: dict[str, torch.Tensor], layer: LayerPlan, schemes: dict[str, WeightScheme]
) -> Iterator[torch.Tensor]:
    """Yield a layer's values in float32, some rows at a time."""
    rows = max(1, CHUNK_ELEMENTS // layer.k)
    for begin in range(0, layer.n, rows):
        if layer.source.dense:
            yield stored["weight"][begin : begin + rows].float()
        else:
            scheme = schemes[layer.source.scheme]
            part = scheme.slice_n(stored, begin, min(begin + rows, layer.n))
            yield scheme.dequantize(part, k=layer.k, group_size=layer.source.group_size)


def _as_planned(tensor: torch.Tensor, planned: PlannedTensor, source: Checkpoint) -> torch.Tensor:
    """Round a dense tensor to its planned dtype; a value that does not fit is an error, not infinity."""
    import torch

    converted = tensor.to(getattr(torch, planned.dtype))
    if converted.is_floating_point() and not bool(torch.isfinite(converted).all()):
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{source.path}: {planned.name} holds NaN or infinity; the model is damaged")
        raise CheckpointError(f"{source.path}: {planned.name} has values that {planned.dtype} cannot hold")
    return converted


def _average_bits(reports: tuple[LayerReport, ...]) -> float:
    weights = sum(r.n * r.k for r in reports if r.nbytes)
    return round(8 * sum(r.nbytes for r in reports) / weights, 4) if weights else 0.0


def _write_configs(source: Checkpoint, layers: tuple[LayerPlan, ...], directory: Path) -> None:
    """Write generation_config.json and, last of all files, config.json."""
    if source.generation_config:
        _write_json(directory / "generation_config.json", source.generation_config)
    formats = {layer.module: layer.target for layer in layers}
    patterns = LayerPatterns.folded(formats)
    config = dict(source.hf_config)
    if not formats[HEAD].dense:
        config["tie_word_embeddings"] = False  # the head has tensors of its own now
    config["quantization_config"] = patterns.to_config()
    assert all(patterns.format_of(m) == form for m, form in formats.items()), "patterns say something else"
    _write_json(directory / "config.json", config)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
