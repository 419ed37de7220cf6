"""Config, plugins and checkpoint become a running model: the one place that knows everybody."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, fields, frozen, has

from deepinfer_core.budget.estimate import Budget, Part, estimate
from deepinfer_core.budget.kv import KVFit, fit_kv, reserve_bytes
from deepinfer_core.budget.system import available_memory
from deepinfer_core.checkpoint.base import Checkpoint
from deepinfer_core.checkpoint.reader import open_checkpoint
from deepinfer_core.config import Config
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import CapacityError, ConfigError, PluginError, nearest
from deepinfer_core.kernels.cubin_cache import cache_directory
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.model.decoder import Decoder
from deepinfer_core.model.hf_config import model_spec_from_hf
from deepinfer_core.model.shapes import attention_problem, linear_modules, linear_slots, required_tensors
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import (
    AttentionBackend,
    AttentionProblem,
    Capability,
    LaneSpec,
    Limits,
    LinearProblem,
    SchedulingPolicy,
)
from deepinfer_core.plugin_api import Device as DeviceName
from deepinfer_core.registry.catalog import Catalog, load_factory, make
from deepinfer_core.registry.config_names import check_names
from deepinfer_core.registry.discovery import discover
from deepinfer_core.registry.explain import auto_dtype
from deepinfer_core.registry.policy import resolve_policy
from deepinfer_core.registry.select import AttentionSelection, LinearChoice, Selection, select_attention, select_linear
from deepinfer_core.registry.tuning import Timings, timings_path
from deepinfer_core.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("deepinfer")

Progress = Callable[[int, int], None]


@frozen(kw_only=True)
class Place:
    """Where and in what a model runs: the config's "auto" resolved.

    Attributes:
        device: torch's device.
        capability: The card's compute capability, None on a CPU.
        dtype: Dtype of the activations.
    """

    device: torch.device
    capability: Capability | None
    dtype: torch.dtype

    @property
    def device_name(self) -> DeviceName:
        """The device as descriptors name it."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def dtype_name(self) -> str:
        """The dtype as descriptors name it."""
        return str(self.dtype).removeprefix("torch.")


@frozen(kw_only=True)
class ChosenPolicy:
    """A scheduling policy ready to plan."""

    name: str
    lanes: tuple[LaneSpec, ...]
    planner: SchedulingPolicy = field(eq=False)


@frozen(kw_only=True, eq=False)
class RunningModel:
    """Everything that a loaded model consists of.

    Attributes:
        config: What was asked.
        place: Device and dtype, resolved.
        spec: The model's shape.
        decoder: Its weights and forward pass.
        cache: Its KV cache.
        tokenizer: Its tokenizer, with the end tokens of all its files.
        engine: What runs requests.
        attention: The attention backend that was chosen, and why.
        selections: What serves each distinct linear problem.
        budget: Where its memory goes.
    """

    config: Config
    place: Place
    spec: ModelSpec
    decoder: Decoder
    cache: KVCache
    tokenizer: Tokenizer
    engine: Engine
    attention: AttentionSelection
    selections: Mapping[LinearProblem, Selection] = field(repr=False)
    budget: Budget = field(repr=False)


class LinearSelector:
    """Selects kernels as the config asks, once per distinct problem; remembers what it chose."""

    def __init__(self, catalog: Catalog, config: Config, timings: Timings) -> None:
        self._catalog = catalog
        self._config = config
        self._timings = timings
        self.chosen: dict[LinearProblem, Selection] = {}

    def __call__(self, problem: LinearProblem) -> Selection:
        """Return layout and kernels for a problem.

        Raises:
            SelectionError: The config's names cannot serve it, or nothing can.
        """
        if problem not in self.chosen:
            choice = _choice(self._config, problem.scheme)
            self.chosen[problem] = select_linear(self._catalog, problem, choice, self._timings)
        return self.chosen[problem]

    def report(self) -> None:
        """Log the dispatch table of every problem, and each distinct warning once."""
        for problem, selection in self.chosen.items():
            rows = ", ".join(f"M {row.m}: {row.kernel.spec.name}" for row in selection.table.rows)
            log.info("%s %d x %d (%s): %s", problem.scheme, problem.n, problem.k, problem.act_dtype, rows)
        for warning in dict.fromkeys(w for selection in self.chosen.values() for w in selection.warnings):
            log.warning("%s", warning)


def catalog_for(config: Config) -> Catalog:
    """Return what the installed plugins bring, without those that the config disables."""
    return Catalog.from_discovery(discover(disable=config.plugins.disable, strict=config.plugins.strict))


def assemble(
    config: Config,
    *,
    catalog: Catalog | None = None,
    progress: Progress | None = None,
    describe: Callable[[str], str] = lambda key: f"config: {key}",
) -> RunningModel:
    """Load the model that a config names, ready to run.

    Args:
        config: Resolved config; ``config.model`` is the path.
        catalog: What is installed; found anew when None.
        progress: Called with (parts loaded, parts in all).
        describe: Dotted config key -> how a message names it; ``ResolvedConfig.describe`` adds file and value.

    Raises:
        DeepinferError: A name, a file, a shape or a size that cannot be; nothing is allocated before the files,
            the names and the sizes that are known by then were checked.
    """
    if not config.model:
        raise ConfigError('no model was named: give a path, or model = "PATH" in the config')
    catalog = catalog_for(config) if catalog is None else catalog
    check_names(
        catalog,
        linear=config.linear,
        attention=config.attention.backend,
        policy=config.scheduler.policy,
        describe=describe,
    )
    policy = choose_policy(config, catalog, describe)
    checkpoint = open_checkpoint(Path(config.model))
    spec = model_spec_from_hf(checkpoint.hf_config, str(checkpoint.config_file))
    asked = config.cache.max_model_len
    if asked is not None and asked > spec.max_length:
        raise ConfigError(
            f"{describe('cache.max_model_len')}: {checkpoint.config_file} allows contexts of up to {spec.max_length} "
            "tokens; lower max_model_len, or leave it out for the model's own"
        )
    _verify(checkpoint, spec, catalog)
    place = resolve_place(config, spec, checkpoint, catalog)
    select = LinearSelector(catalog, config, _measured_table(place))
    attention = select_attention(catalog, _attention_problem(config, spec, place), config.attention.backend)
    backend: AttentionBackend = make(attention.spec.spec.factory, attention.spec, attention.problem)
    budget = _estimate(
        config,
        spec,
        checkpoint,
        place,
        select=select,
        backend=backend,
        attention=attention.problem,
        lanes=policy.lanes,
    )
    tokenizer = load_tokenizer(checkpoint)
    decoder = Decoder.load(
        spec,
        checkpoint,
        select=select,
        attention=backend,
        device=place.device,
        dtype=place.dtype,
        m_max=config.scheduler.max_batched_tokens,
        max_len=budget.longest if _sized_by_now(config, place) else attention.problem.max_model_len,
        progress=progress,
    )
    select.report()
    kv = _fit_what_is_left(config, spec, place, budget)
    pages, max_model_len = kv.pages, kv.max_model_len
    if kv.shrunk:
        log.warning("max_model_len is %d, not the model's %d: the KV budget holds no more", max_model_len, kv.wanted)
    cache = KVCache(
        backend,
        layers=spec.layers,
        page_size=config.cache.page_size,
        pages=pages,
        device=place.device,
        prefix_cache=config.cache.prefix_cache,
        namespace=(str(checkpoint.path), attention.problem.kv_dtype),
    )
    engine = Engine(
        decoder,
        cache,
        Limits(
            max_batched_tokens=config.scheduler.max_batched_tokens,
            max_requests=min(config.scheduler.max_requests, config.scheduler.max_batched_tokens),
            prefill_chunk_tokens=min(config.scheduler.prefill_chunk_tokens, config.scheduler.max_batched_tokens),
            page_size=config.cache.page_size,
            max_model_len=max_model_len,
            overlap=config.scheduler.prefill_decode_overlap,
        ),
        vocab_size=spec.vocab_size,
        policy=policy.planner,
        policy_name=policy.name,
        lanes=policy.lanes,
        tokenizer=tokenizer,
        end_ids=tokenizer.eos_ids,
        row_tile=1 if config.batch_invariant else None,
    )
    log.info(
        "%s on %s in %s, attention %s, policy %s, weights %.1f MiB, KV of %d pages x %d tokens, max_model_len %d",
        spec.architecture, place.device, place.dtype_name, attention.spec.spec.name, policy.name,
        decoder.nbytes / 2**20, pages, config.cache.page_size, max_model_len,
    )  # fmt: skip
    return RunningModel(
        config=config,
        place=place,
        spec=spec,
        decoder=decoder,
        cache=cache,
        tokenizer=tokenizer,
        engine=engine,
        attention=attention,
        selections=select.chosen,
        budget=evolve(budget, kv=kv),
    )


def choose_policy(config: Config, catalog: Catalog, describe: Callable[[str], str]) -> ChosenPolicy:
    """Make the policy that a config names.

    Raises:
        SelectionError: No installed plugin brings it.
        ConfigError: An option is unknown, or of a kind that the policy does not take.
    """
    chosen = resolve_policy(catalog, config.scheduler.policy)
    spec, given = chosen.spec, dict(config.scheduler.options)
    if spec.options is None:
        if given:
            raise ConfigError(f"{describe('scheduler.options')}: policy {spec.name!r} has no options")
        return ChosenPolicy(name=spec.name, lanes=spec.lanes, planner=make(spec.factory, chosen))
    options = load_factory(spec.options, chosen)
    if not has(options):
        raise PluginError(
            f"policy {spec.name!r} ({chosen.distribution} {chosen.version}): options = {spec.options!r} must name an "
            "attrs class, whose fields are the policy's options"
        )
    known = [attribute.name for attribute in fields(options)]
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{describe('scheduler.options')}: policy {spec.name!r} has no {key!r}; {nearest(key, known)}"
            )
    try:
        filled = options(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{describe('scheduler.options')}: policy {spec.name!r}: {error}") from error
    return ChosenPolicy(name=spec.name, lanes=spec.lanes, planner=make(spec.factory, chosen, filled))


def resolve_place(config: Config, spec: ModelSpec, checkpoint: Checkpoint, catalog: Catalog) -> Place:
    """Resolve device and dtype; what "auto" means for the dtype is the registry's `auto_dtype`.

    Raises:
        ConfigError: A card was asked for that is not there.
    """
    available = torch.cuda.is_available()
    device = torch.device(config.device if config.device != "auto" else "cuda" if available else "cpu")
    if device.type == "cuda" and not available:
        raise ConfigError("device = 'cuda', but torch finds no card; use device = 'cpu' or run `deepinfer doctor`")
    place = Place(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=torch.float32,
    )
    slots = [s for s in linear_slots(spec, checkpoint.layer_format) if s.format.scheme != "fp16"]

    def quantized_in(name: str) -> list[LinearProblem]:
        m_max = config.scheduler.max_batched_tokens
        at: dict[str, Any] = {"device": place.device_name, "capability": place.capability, "act_dtype": name}
        return [slot.problem(m_max=m_max, **at) for slot in slots]

    name: str = config.dtype
    if name == "auto":
        choice = partial(_choice, config)
        name = auto_dtype(catalog, quantized_in, choice, capability=place.capability, model_dtype=spec.dtype)
    return evolve(place, dtype=getattr(torch, name))


def _choice(config: Config, scheme: str) -> LinearChoice:
    return LinearChoice.from_settings(config.linear_for(scheme))


def _measured_table(place: Place) -> Timings:
    """Return what `deepinfer tune` measured on this card; an empty table on a CPU and on an untuned card."""
    if place.device.type != "cuda":
        return Timings()
    return Timings.read(timings_path(torch.cuda.get_device_name(place.device), cache_directory()))


def _verify(checkpoint: Checkpoint, spec: ModelSpec, catalog: Catalog) -> None:
    """Check schemes, names and shapes before anything is allocated."""
    for form in dict.fromkeys(checkpoint.layer_format(m.name) for m in linear_modules(spec)):
        catalog.scheme(form.scheme, distribution=form.distribution)
    schemes = {name: registered.spec for name, registered in catalog.schemes.items()}
    checkpoint.verify(required_tensors(spec), schemes=schemes)


def _attention_problem(config: Config, spec: ModelSpec, place: Place) -> AttentionProblem:
    return attention_problem(
        spec,
        page_size=config.cache.page_size,
        act_dtype=place.dtype_name,
        kv_dtype=place.dtype_name if config.attention.kv_dtype == "auto" else config.attention.kv_dtype,
        device=place.device_name,
        capability=place.capability,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        max_requests=config.scheduler.max_requests,
        max_model_len=config.cache.max_model_len or spec.max_length,
    )


def _estimate(
    config: Config,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    place: Place,
    *,
    select: LinearSelector,
    backend: AttentionBackend,
    attention: AttentionProblem,
    lanes: Sequence[LaneSpec],
) -> Budget:
    """Return where the memory that is free now will go; what cannot fit is said before the weights are read.

    Raises:
        CapacityError: Weights, one step and a context of the length that the config asks for are more than there is.
    """
    cache = config.cache
    overlapped = place.device.type == "cuda" and config.scheduler.prefill_decode_overlap
    if place.device.type == "cuda":
        total: int | None = torch.cuda.mem_get_info(place.device)[0]
        reserve = reserve_bytes(config)
    else:
        total = available_memory() if cache.reserve is not None else None
        reserve = cache.reserve or 0
    found = estimate(
        config,
        spec,
        checkpoint.layer_format,
        select=select,
        backend=backend,
        attention=attention,
        total=sys.maxsize if total is None else total,
        kept=(Part(what="reserve", nbytes=reserve),),
        lanes=len(lanes) if overlapped else 1,
    )
    if total is None and cache.memory is None:
        found = found.by_default_on_a_cpu(config, spec.max_length)
    if found.kv is None:
        raise CapacityError(str(found.problem))
    if found.warning is not None:
        log.warning("%s", found.warning)
    return found


def _sized_by_now(config: Config, place: Place) -> bool:
    """Return whether the KV cache is settled before the weights are loaded."""
    return place.device.type != "cuda" or config.cache.memory is not None


def _fit_what_is_left(config: Config, spec: ModelSpec, place: Place, budget: Budget) -> KVFit:
    """Return the cache for the memory that is really free once the weights are there.

    Raises:
        CapacityError: It does not hold one context of the length that the config asks for.
    """
    assert budget.kv is not None
    if _sized_by_now(config, place):
        return budget.kv
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(place.device)
    room = free - sum(part.nbytes for part in budget.kept)
    return fit_kv(config, spec.max_length, budget.page_bytes, room, budget.step)
