"""Attention through torch's scaled_dot_product_attention over the paged KV cache: any device, one request at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)
from attrs import field, frozen

from deepinfer_core.errors import KernelError
from deepinfer_core.plugin_api import AttentionBatch, AttentionProblem
from deepinfer_fp16.kv_int8 import dequantize_heads, quantize_heads

INT8 = "int8"


def element_offset(slot: int, kv_heads: int, head_dim: int) -> int:
    """Return where a slot's first element lies in a cache tensor.

    Python integers have no width to overflow; from page 131,072 of 16,384 elements on this is beyond 32 bits.
    """
    return slot * kv_heads * head_dim


@frozen(kw_only=True)
class Span:
    """What one request reads in layers of one window.

    Attributes:
        row: Its first token in the step.
        queries: Its new tokens, the last ones of its context.
        keys: Keys they read; the oldest ones that no query's window reaches are left out.
        slot: First key's slot when the keys lie one after another in the cache, else -1.
        pages: int64 pages to gather when they do not.
        skip: Keys of the first gathered page that lie before the span.
        mask: bool ``[queries, keys]``, or None when no key has to be hidden.
        causal: Queries and keys are the same tokens: the kernel's own causal form will do.
    """

    row: int
    queries: int
    keys: int
    slot: int
    pages: torch.Tensor | None = field(eq=False)
    skip: int
    mask: torch.Tensor | None = field(eq=False)
    causal: bool


@frozen(kw_only=True)
class StepPlan:
    """One step: where new keys go, and per distinct window what each request reads."""

    slots: torch.Tensor = field(eq=False)
    spans: Mapping[int | None, tuple[Span, ...]]


class SdpaAttention:
    """Each request is computed alone, so its values do not depend on what else is in the batch.

    Cache tensors of a layer: ``k`` and ``v`` ``[pages, page_size, kv_heads, head_dim]``; for INT8 also ``k_scale`` and
    ``v_scale`` float32 ``[pages, page_size, kv_heads]``, one scale per token and head.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        """Remember the shape of the model.

        Raises:
            KernelError: The query heads do not divide among the kv heads.
        """
        if problem.heads % problem.kv_heads:
            raise KernelError(f"sdpa: {problem.heads} heads do not divide among {problem.kv_heads} kv heads")
        self._problem = problem
        self._group = problem.heads // problem.kv_heads
        self._act_dtype: torch.dtype = getattr(torch, problem.act_dtype)
        self._int8 = problem.kv_dtype == INT8
        self._casts = not self._int8 and problem.kv_dtype != problem.act_dtype
        self._windows = tuple(dict.fromkeys(problem.sliding_windows))

    def kv_tensors(self, pages: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return one layer's cache tensors for this many pages."""
        problem = self._problem
        tokens = (pages, problem.page_size, problem.kv_heads)
        values = ((*tokens, problem.head_dim), problem.kv_dtype)
        if not self._int8:
            return {"k": values, "v": values}
        return {"k": values, "v": values, "k_scale": (tokens, "float32"), "v_scale": (tokens, "float32")}

    def plan_step(self, batch: AttentionBatch) -> StepPlan:
        """Find for every request and window the keys to read and the mask, once for all layers."""
        spans: dict[int | None, tuple[Span, ...]] = {}
        for window in self._windows:
            row, found = 0, []
            for queries, context, pages in zip(batch.query_lens, batch.kv_lens, batch.page_ids, strict=True):
                if queries:
                    found.append(self._span(row, queries, context, pages, window, batch.slots.device))
                row += queries
            spans[window] = tuple(found)
        return StepPlan(slots=batch.slots, spans=spans)

    def write_kv(
        self, layer: int, kv: Mapping[str, torch.Tensor], k: torch.Tensor, v: torch.Tensor, meta: StepPlan
    ) -> None:
        """Store the new tokens at their slots, quantized for an INT8 cache."""
        for name, values in (("k", k), ("v", v)):
            cache = kv[name]
            if self._int8:
                values, scales = quantize_heads(values)
                _scatter(kv[f"{name}_scale"], meta.slots, scales)
            elif self._casts:
                values = values.to(cache.dtype)
            _scatter(cache, meta.slots, values)

    def run(
        self, layer: int, q: torch.Tensor, kv: Mapping[str, torch.Tensor], meta: StepPlan, out: torch.Tensor
    ) -> None:
        """Attend request by request."""
        problem, group = self._problem, self._group
        shape = (q.shape[0], problem.kv_heads, group, problem.head_dim)
        q, out = q.view(shape), out.view(shape)
        for span in meta.spans[problem.sliding_windows[layer]]:
            keys, values = self._read(kv, "k", span), self._read(kv, "v", span)
            rows = slice(span.row, span.row + span.queries)
            if span.queries == 1:
                # The heads that share a kv head become the rows of one product: no mask, no expanded keys. In BF16 on
                # a CPU 41 us instead of 99 with enable_gqa (9 heads, 3 kv heads, 50 keys; one thread of an AVX2 EPYC,
                # torch 2.13, 2026-11-30).
                out[rows] = F.scaled_dot_product_attention(q[rows], keys, values, scale=problem.scale)
            else:
                # The place in the group becomes a batch dimension over which keys and values are repeated by stride
                # zero, so every backend of torch serves grouped heads without a copy.
                answer = F.scaled_dot_product_attention(
                    q[rows].permute(2, 1, 0, 3),
                    keys.expand(group, -1, -1, -1),
                    values.expand(group, -1, -1, -1),
                    attn_mask=span.mask,
                    is_causal=span.causal,
                    scale=problem.scale,
                )
                out[rows] = answer.permute(2, 1, 0, 3)

    def copy_page(self, kv: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one page of one layer's cache."""
        for cache in kv.values():
            cache[target].copy_(cache[source])

    def workspace_bytes(self) -> int:
        """Return 0: torch allocates what it needs."""
        return 0

    def warm_up(self, query_lens: Sequence[int]) -> None:
        """Do nothing: nothing is compiled here."""

    def _span(
        self, row: int, queries: int, context: int, pages: tuple[int, ...], window: int | None, device: torch.device
    ) -> Span:
        """Place one request's keys: the first ones that a window has left behind are not read at all."""
        size = self._problem.page_size
        first = 0 if window is None else max(0, context - queries - window + 1)
        keys = context - first
        used = pages[first // size : -(-context // size)]
        assert len(used) == -(-context // size) - first // size, f"{len(pages)} pages hold no {context} tokens"
        consecutive = used == tuple(range(used[0], used[0] + len(used)))
        windowed = window is not None and keys > window
        causal = queries > 1 and queries == keys and not windowed
        mask = None
        if queries > 1 and not causal:
            query_at = torch.arange(context - queries, context, device=device)[:, None]
            key_at = torch.arange(first, context, device=device)
            mask = key_at <= query_at
            if windowed:
                assert window is not None
                mask &= key_at > query_at - window
        return Span(
            row=row,
            queries=queries,
            keys=keys,
            slot=used[0] * size + first % size if consecutive else -1,
            pages=None if consecutive else torch.tensor(used, dtype=torch.int64, device=device),
            skip=first % size,
            mask=mask,
            causal=causal,
        )

    def _read(self, kv: Mapping[str, torch.Tensor], name: str, span: Span) -> torch.Tensor:
        """Return ``[1, kv_heads, keys, head_dim]`` in the activations' dtype: a view where the pages allow it."""
        cache = kv[name]
        if span.slot >= 0 and not self._int8:
            _, _, heads, width = cache.shape
            values = cache.as_strided(
                (1, heads, span.keys, width),
                (cache.stride(0), width, heads * width, 1),
                cache.storage_offset() + element_offset(span.slot, heads, width),
            )
        else:
            values = _gather(cache, span)
            if self._int8:
                values = dequantize_heads(values, _gather(kv[f"{name}_scale"], span), self._act_dtype)
            values = values.transpose(0, 1)[None]
        return values.to(self._act_dtype) if self._casts else values


def _scatter(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values [tokens, ...]`` to their slots of ``cache [pages, page_size, ...]``."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)


def _gather(cache: torch.Tensor, span: Span) -> torch.Tensor:
    """Return a span's rows ``[keys, ...]`` of ``cache [pages, page_size, ...]``."""
    if span.pages is None:
        return cache.view(-1, *cache.shape[2:])[span.slot : span.slot + span.keys]
    gathered = cache.index_select(0, span.pages)
    return gathered.view(-1, *cache.shape[2:])[span.skip : span.skip + span.keys]
