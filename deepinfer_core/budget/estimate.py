"""What a model's memory goes to, byte by byte, before anything is loaded; `plan` prints it and `serve` sizes by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from deepinfer_core.budget.kv import CPU_KV_BYTES, KVFit, StepMemory, fit_kv
from deepinfer_core.config import Config
from deepinfer_core.errors import CapacityError
from deepinfer_core.kernels.fallback import CHUNK_BYTES
from deepinfer_core.kvcache.manager import page_bytes
from deepinfer_core.model.shapes import EMBEDDING, HEAD, LinearSlot, dense_tensors, linear_slots
from deepinfer_core.model.source import WeightFormat
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import AttentionBackend, AttentionProblem, LinearProblem
from deepinfer_core.registry.catalog import load_factory, make
from deepinfer_core.registry.dispatch import FALLBACK
from deepinfer_core.registry.select import Selection

DENSE = "fp16"
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}

SAMPLING_BYTES = 44
"""Scratch for each logit of a row that is sampled with top-k or top-p: the row sorted, its weights summed in double.
Counted from the tensors of `engine.sampler`, not measured."""


@frozen(kw_only=True)
class Part:
    """One line of a budget.

    Attributes:
        what: What the bytes are for.
        nbytes: How many.
    """

    what: str
    nbytes: int


def estimate(
    config: Config,
    spec: ModelSpec,
    format_of: Callable[[str], WeightFormat],
    *,
    select: Callable[[LinearProblem], Selection],
    backend: AttentionBackend,
    attention: AttentionProblem,
    total: int,
    kept: Iterable[Part] = (),
    lanes: int = 1,
) -> Budget:
    """Return where a model's memory will go; no tensor is read.

    Args:
        config: Limits and sizes.
        spec: The model.
        format_of: Stored form of a module by its HF name.
        select: Chooses layout and kernels of a problem.
        backend: The attention backend, made for ``attention``.
        attention: What the model asks of it; device, capability and dtypes are taken from here.
        total: Bytes that there are.
        kept: What is left to others.
        lanes: Streams that may run works at once.

    Raises:
        SelectionError: Nothing serves a layer.
    """
    slots = linear_slots(spec, format_of)
    problem_of = {
        slot.name: slot.problem(
            m_max=config.scheduler.max_batched_tokens,
            device=attention.device,
            capability=attention.capability,
            act_dtype=attention.act_dtype,
        )
        for slot in slots
    }
    selections = {problem: select(problem) for problem in dict.fromkeys(problem_of.values())}
    itemsize = ITEMSIZE[attention.act_dtype]
    norms = itemsize if attention.device == "cuda" else ITEMSIZE["float32"]  # the residual stream is float32 there
    return Budget(
        total=total,
        weights=weight_parts(
            spec,
            slots,
            selections,
            problem_of,
            itemsize=itemsize,
            norm_itemsize=norms,
            positions=attention.max_model_len,
        ),
        step=step_memory(
            spec,
            config,
            selections.values(),
            device=attention.device,
            itemsize=itemsize,
            attention_bytes=backend.workspace_bytes(),
            lanes=lanes,
        ),
        kept=tuple(kept),
        kv_dtype=attention.kv_dtype,
        page_bytes=page_bytes(backend, spec.layers),
        page_size=config.cache.page_size,
    ).fitted(config, spec.max_length)


def weight_parts(
    spec: ModelSpec,
    slots: Iterable[LinearSlot],
    selections: Mapping[LinearProblem, Selection],
    problem_of: Mapping[str, LinearProblem],
    *,
    itemsize: int,
    norm_itemsize: int,
    positions: int,
) -> tuple[Part, ...]:
    """Return what the weights take in the layouts that were chosen, by scheme and group.

    Args:
        spec: The model.
        slots: Its linear layers.
        selections: What serves each problem.
        problem_of: Slot name -> its problem.
        itemsize: Bytes of an activation.
        norm_itemsize: Bytes of a norm's weight.
        positions: Length of the table of positions.
    """
    layouts: dict[LinearProblem, Any] = {}
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    tied = ""
    for slot in slots:
        problem = problem_of[slot.name]
        if problem not in layouts:
            layout = selections[problem].layout
            layouts[problem] = make(layout.spec.factory, layout)
        if slot.name == HEAD and spec.tie_word_embeddings and slot.format.scheme == DENSE:
            if _keeps_the_weight(layouts[problem], problem):
                tied = " (the head is the same)"
                continue
            tied = " (the head is a copy of it in another layout)"
        name = _form(problem)
        sizes[name] = sizes.get(name, 0) + int(layouts[problem].nbytes(problem))
        counts[name] = counts.get(name, 0) + len(slot.modules)
    parts = [Part(what=f"{name}, {counts[name]} layers", nbytes=size) for name, size in sizes.items()]
    embedding = spec.vocab_size * spec.hidden_size * itemsize
    rest = 2 * positions * spec.head_dim * itemsize
    for name, shape in dense_tensors(spec).items():
        if name != EMBEDDING:
            rest += math.prod(shape) * (itemsize if name.endswith(".bias") else norm_itemsize)
    parts.append(Part(what=f"embedding{tied}", nbytes=embedding))
    parts.append(Part(what=f"norms, biases, table of {positions:,} positions", nbytes=rest))
    return tuple(parts)


def _keeps_the_weight(layout: Any, problem: LinearProblem) -> bool:
    """Return whether a dense layout takes a weight by reference; tried on a tensor without storage."""
    weight = torch.empty(problem.n, problem.k, dtype=getattr(torch, problem.act_dtype), device="meta")
    try:
        return any(tensor is weight for tensor in layout.pack(problem, {"weight": weight}).values())
    except (RuntimeError, NotImplementedError):
        return False


def step_memory(
    spec: ModelSpec,
    config: Config,
    selections: Iterable[Selection],
    *,
    device: str,
    itemsize: int,
    attention_bytes: int = 0,
    lanes: int = 1,
) -> StepMemory:
    """Return what a step takes at the config's limits.

    The widths are those of `layers.attention` and `layers.mlp`, at the moment when most tensors are alive.

    Args:
        spec: The model.
        config: Limits of a step.
        selections: What serves the linear layers.
        device: ``"cuda"`` or ``"cpu"``.
        itemsize: Bytes of an activation.
        attention_bytes: What the attention backend asks for; 0: torch's own, whose gathers and masks are counted here.
        lanes: Streams that may run works at once.
    """
    scheduler = config.scheduler
    tokens = scheduler.max_batched_tokens
    q, kv, hidden, wide = spec.q_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
    normed = q + kv if spec.qk_norm else 0
    in_attention = 2 * hidden + (q + 2 * kv) + normed + max(q + kv, q + hidden)
    in_mlp = 4 * hidden + 3 * wide
    per_token = (max(in_attention, in_mlp) + 2 * spec.head_dim) * itemsize
    rows = min(scheduler.max_requests, tokens)
    chunk = min(scheduler.prefill_chunk_tokens, tokens)
    gathered = 0 if attention_bytes else 2 * kv * itemsize + chunk * (1 + itemsize)
    return StepMemory(
        activations=per_token * (tokens + (rows if lanes > 1 else 0)),
        logits=rows * spec.vocab_size * (4 + itemsize + SAMPLING_BYTES),
        kernels=lanes * kernel_workspaces(selections, device),
        attention=lanes * attention_bytes,
        attention_per_token=gathered,
        overlapped=lanes > 1,
    )


def kernel_workspaces(selections: Iterable[Selection], device: str) -> int:
    """Return the scratch bytes of all kernels on one stream: a buffer a kernel, as large as its layers ask for."""
    sizes: dict[str, int] = {}
    fallback = 0
    for selection in selections:
        problem = selection.problem
        for row in selection.table.rows:
            spec = row.kernel.spec
            if spec.name == FALLBACK:
                fallback = CHUNK_BYTES[device]
            if spec.workspace is not None:
                bytes_for = load_factory(spec.workspace, row.kernel)
                most = max(int(bytes_for(problem, m)) for m in range(row.m.lo, min(row.m.hi, problem.m_max) + 1))
                sizes[spec.name] = max(most, sizes.get(spec.name, 0))
    return sum(sizes.values()) + fallback


def _form(problem: LinearProblem) -> str:
    if problem.group_size == 0:
        return f"dense {problem.act_dtype}" if problem.scheme == DENSE else problem.scheme
    group = "whole rows" if problem.group_size == -1 else f"groups of {problem.group_size}"
    return f"{problem.scheme} in {group}{' with zeros' if problem.zeros else ''}"


@frozen(kw_only=True)
class Budget:
    """A whole plan: what there is, what is taken, and what is left for keys and values.

    Attributes:
        total: Bytes that there are.
        weights: Line by line.
        step: What a step takes.
        kept: What is left to others, line by line: CUDA's own, and the reserve.
        kv_dtype: Of the cache.
        page_bytes: Of a page over all layers.
        page_size: Tokens of a page.
        kv: The cache that fits; None where none does.
        problem: Why none does.
        warning: What fits only for as long as no step is as large as the limits allow.
    """

    total: int
    weights: tuple[Part, ...]
    step: StepMemory
    kept: tuple[Part, ...]
    kv_dtype: str
    page_bytes: int
    page_size: int
    kv: KVFit | None = None
    problem: str | None = None
    warning: str | None = None

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(part.nbytes for part in self.weights)

    @property
    def usable(self) -> int:
        """What there is, without what is left to others."""
        return self.total - sum(part.nbytes for part in self.kept)

    @property
    def room(self) -> int:
        """What is left for a step and the KV cache; negative where the weights alone are too much."""
        return self.usable - self.weight_bytes

    @property
    def token_bytes(self) -> float:
        """KV bytes of one token over all layers."""
        return self.page_bytes / self.page_size

    @property
    def longest(self) -> int:
        """Longest context of the cache that fits; 0 where none does."""
        return 0 if self.kv is None else self.kv.max_model_len

    def fitted(self, config: Config, model_length: int) -> Budget:
        """Return the budget with the KV cache that fits, or with the reason why none does."""
        memory = config.cache.memory
        try:
            if memory is None:
                return evolve(self, kv=fit_kv(config, model_length, self.page_bytes, self.room, self.step))
            kv = fit_kv(config, model_length, self.page_bytes, memory)
        except CapacityError as error:
            short = self.room < 0 and memory is None
            return evolve(self, problem=self._too_many(self.weight_bytes, "the weights") if short else str(error))
        taken, step = self.weight_bytes + kv.nbytes, self.step.total(kv.max_model_len)
        if taken > self.usable:
            return evolve(self, problem=self._too_many(taken, "weights and [cache] memory together"))
        if taken + step > self.usable:
            text = self._too_many(taken + step, "weights, [cache] memory and the largest step together")
            return evolve(self, kv=kv, warning=f"{text}; steps may have to be split, or the driver will swap")
        return evolve(self, kv=kv)

    def by_default_on_a_cpu(self, config: Config, model_length: int) -> Budget:
        """Return the budget of a CPU where the config gives neither memory nor reserve: a fixed cache, or as asked.

        Its memory is taken as it is needed, so that a plan larger than the machine does no harm by itself.
        """
        cache = config.cache
        needed = -(-(cache.max_model_len or 0) // cache.page_size) * self.page_bytes
        kv = fit_kv(config, model_length, self.page_bytes, max(CPU_KV_BYTES, needed))
        return evolve(self, kv=kv, problem=None)

    def _too_many(self, nbytes: int, what: str) -> str:
        return (
            f"{what} take {nbytes / 2**20:,.1f} MiB and there are {self.usable / 2**20:,.1f} MiB to use, "
            f"{(nbytes - self.usable) / 2**20:,.1f} MiB too few"
        )
