"""KV cache of one model: pages behind tensors, page tables for its sequences, batches for attention."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deepinfer_core.kvcache.allocator import OutOfPagesError, PagePool
from deepinfer_core.kvcache.prefix import PrefixCache
from deepinfer_core.kvcache.sequence import KVSequence
from deepinfer_core.plugin_api import AttentionBackend, AttentionBatch

FIRST_PAGES = 64
"""Pages that get memory at once on a CPU; from there the tensors double when sequences need more."""


class KVCache:
    """Pages for every sequence of a model; one manager for every scheduling policy.

    The life of a sequence: `open`, then for each step `extend`, `batch`, the forward, `commit`; at its end `free`.
    Nothing here may be called by two threads at once, and a sequence must not be freed while a forward reads it.

    Memory is elastic on a CPU: tensors start small and double, up to the budget. On a card everything is allocated at
    once: what the budget promises must be there when it is needed, and addresses stay what captured graphs hold.

    Args:
        backend: Names the tensors of a layer and their shapes.
        layers: Layers of the model.
        page_size: Tokens of a page.
        pages: Most pages that may ever exist.
        device: Where the tensors live.
        prefix_cache: Keep full pages of finished sequences and find them again.
        namespace: What two prompts must share beside their tokens and salt: model and KV dtype.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        layers: int,
        page_size: int,
        pages: int,
        device: torch.device | str = "cpu",
        prefix_cache: bool = True,
        namespace: Hashable = (),
    ) -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self.page_bytes = page_bytes(backend, layers)
        self.pool = PagePool(pages)
        self.prefix = PrefixCache(self.pool, namespace) if prefix_cache else None
        self.open_sequences = 0
        self._backend = backend
        self._reserved = 0
        self.tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]
        self._reserve(pages if self.device.type != "cpu" else min(pages, FIRST_PAGES))

    @property
    def total_pages(self) -> int:
        """Pages that the budget allows."""
        return self.pool.total

    @property
    def available_pages(self) -> int:
        """Pages that a sequence can get now: free ones, and cached ones that nobody reads."""
        return self.pool.free_pages + (self.prefix.reclaimable if self.prefix else 0)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors hold now."""
        return self._reserved * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Return the pages that a sequence of this many tokens takes."""
        return -(-tokens // self.page_size)

    def shared_pages(self, seq: KVSequence) -> int:
        """Return how many of a sequence's pages another sequence reads too; freeing it would not free those.

        Who shares a page shares all before it, so the shared ones come first; the last of them is found by bisection.
        """
        refs, cached = self.pool.refs, len(seq.nodes)
        low, high = 0, len(seq.pages)
        if not high or refs(seq.pages[0]) <= (1 + (cached > 0)):
            return 0
        while low < high:
            middle = (low + high) // 2
            if refs(seq.pages[middle]) > 1 + (middle < cached):
                low = middle + 1
            else:
                high = middle
        return low

    def open(self, tokens: Sequence[int] = (), *, salt: Hashable = None, reuse: bool = True) -> KVSequence:
        """Start a sequence, with as much of ``tokens`` as the prefix cache holds (never the last one) already computed.

        Args:
            tokens: What the sequence will begin with.
            salt: Prompts under different salts never share pages.
            reuse: False computes everything, for callers who need the logits of every position.
        """
        seq = KVSequence(salt=salt)
        self.open_sequences += 1
        if self.prefix is None or not reuse:
            return seq
        seq.nodes = self.prefix.match(tokens, self.page_size, salt)
        seq.append([node.page for node in seq.nodes])
        seq.length = seq.cached = len(seq.nodes) * self.page_size
        return seq

    def extend(self, seq: KVSequence, tokens: int) -> None:
        """Give the sequence pages for this many tokens more than it has computed.

        Raises:
            OutOfPagesError: There are too few; the sequence keeps what it had.
        """
        if seq.length + tokens > len(seq.pages) * self.page_size:
            seq.append(self._take(self.pages_for(seq.length + tokens) - len(seq.pages)))

    def commit(self, seq: KVSequence, tokens: int) -> None:
        """Count this many tokens, which a forward has just stored, as computed."""
        seq.length += tokens
        assert seq.length <= len(seq.pages) * self.page_size, "more tokens stored than the pages hold"

    def rollback(self, seq: KVSequence, tokens: int) -> None:
        """Count the last tokens as not computed; they must lie behind what `remember` has offered."""
        seq.length -= tokens
        assert seq.length >= len(seq.nodes) * self.page_size, "a cached page cannot be computed again"

    def remember(self, seq: KVSequence, tokens: Sequence[int]) -> None:
        """Offer the sequence's full pages to the prefix cache; ``tokens`` are its tokens from the first on.

        Call it only for pages that are known to be good (their logits were finite), with no forward under way that
        reads the sequence: a page that another sequence computed too is swapped for the one already cached.
        """
        if self.prefix is None or not seq.cacheable:
            return
        for i in range(len(seq.nodes), seq.length // self.page_size):
            parent = seq.nodes[-1] if seq.nodes else self.prefix.root(seq.salt)
            start = i * self.page_size
            node = self.prefix.insert(parent, tuple(tokens[start : start + self.page_size]), seq.pages[i])
            if node is None:
                seq.cacheable = False
                return
            seq.nodes.append(node)
            seq.swap(i, node.page)

    def fork(self, seq: KVSequence) -> KVSequence:
        """Return a second sequence with the same content: full pages are shared, a page in use is copied.

        Raises:
            OutOfPagesError: There is no page for the copy.
        """
        full, rest = divmod(seq.length, self.page_size)
        copied = self._take(1) if rest else []
        twin = KVSequence(length=seq.length, cached=full * self.page_size, salt=seq.salt, nodes=seq.nodes[:full])
        twin.cacheable = seq.cacheable and len(twin.nodes) == full  # a shared page outside the cache stays outside
        seq.cacheable = twin.cacheable
        for page in seq.pages[:full]:
            self.pool.share(page)
        twin.append(seq.pages[:full] + copied)
        for page in copied:
            for layer in self.tensors:
                self._backend.copy_page(layer, seq.pages[full], page)
        self.open_sequences += 1
        return twin

    def free(self, seq: KVSequence, *, scrub: bool = False) -> None:
        """End a sequence; its full pages stay in the prefix cache until they are needed.

        Args:
            seq: The sequence; it must not be used again.
            scrub: Zero what it wrote alone: its values may be NaN, which a masked position of the next owner of the
                page would not hide (0 * NaN is NaN).
        """
        cached = len(seq.nodes)
        dirty = [page for page in reversed(seq.pages[cached:]) if not self.pool.free(page)]
        for node in reversed(seq.nodes):
            assert self.prefix is not None
            self.prefix.release(node)
        if scrub and dirty:
            index = torch.tensor(dirty, device=self.device)
            for layer in self.tensors:
                for tensor in layer.values():
                    tensor.index_fill_(0, index, 0)
        seq.pages, seq.nodes, seq.length = [], [], 0
        self.open_sequences -= 1

    def batch(self, items: Sequence[tuple[KVSequence, int]]) -> AttentionBatch:
        """Describe a step that computes the next n tokens of each sequence; `extend` must have made room."""
        return self.batch_at([(seq, seq.length, n) for seq, n in items])

    def batch_at(self, spans: Sequence[tuple[KVSequence, int, int]]) -> AttentionBatch:
        """Describe a step over (sequence, first position, tokens) spans; what lies before a span must be stored."""
        starts = np.array([start for _, start, _ in spans], dtype=np.int64)
        lens = [n for _, _, n in spans]
        ends = [start + n for _, start, n in spans]
        held = [-(-end // self.page_size) for end in ends]
        table = np.zeros((len(spans), max(held, default=0)), dtype=np.int32)
        for row, (seq, _, _) in enumerate(spans):
            table[row, : held[row]] = seq.table[: held[row]]
        total = sum(lens)
        if total == len(spans):  # a token each: decodes
            positions, pages = starts, table[np.arange(total), starts // self.page_size]
        else:
            counts = np.array(lens, dtype=np.int64)
            rows = np.repeat(np.arange(len(spans)), counts)
            positions = np.arange(total) - (np.cumsum(counts) - counts)[rows] + starts[rows]
            pages = table[rows, positions // self.page_size]
        slots = pages * np.int64(self.page_size) + positions % self.page_size
        return AttentionBatch(
            query_lens=tuple(lens),
            kv_lens=tuple(ends),
            page_table=self._on_device(table),
            page_ids=tuple([tuple(seq.pages[:n]) for (seq, _, _), n in zip(spans, held, strict=True)]),
            positions=self._on_device(positions),
            slots=self._on_device(slots),
        )

    def assert_no_leaks(self) -> None:
        """Check that no sequence is open and every page is free, or cached and unread."""
        cached = self.prefix.pages if self.prefix else 0
        idle = self.prefix.reclaimable if self.prefix else 0
        assert self.open_sequences == 0, f"{self.open_sequences} sequences are still open"
        assert self.pool.used_pages == cached, f"{self.pool.used_pages} pages in use, {cached} cached"
        assert idle == cached, f"{cached - idle} cached pages still have readers"
        held = sum(self.pool.refs(page) for page in range(self.pool.high_water))
        assert held == cached, f"{held} references on {cached} cached pages"

    def _on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _take(self, pages: int) -> list[int]:
        short = pages - self.pool.free_pages
        if short > 0:
            if pages > self.available_pages:
                raise OutOfPagesError(
                    f"{pages} KV pages asked for, {self.available_pages} of {self.total_pages} can be had"
                )
            assert self.prefix is not None
            self.prefix.evict(short)
        taken = self.pool.alloc(pages)
        try:
            self._reserve(self.pool.high_water)
        except BaseException:
            for page in taken:
                self.pool.free(page)
            raise
        return taken

    def _reserve(self, pages: int) -> None:
        if pages <= self._reserved:
            return
        target = min(self.total_pages, max(pages, 2 * self._reserved))
        shapes = self._backend.kv_tensors(target)
        for layer in self.tensors:  # one layer after another: at most one is there twice
            for name, (shape, dtype) in shapes.items():
                assert shape[0] == target, f"KV tensor {name!r} must have pages first, got shape {shape}"
                with torch.inference_mode(False):  # so that it may be written in either mode
                    grown = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
                if name in layer:
                    grown[: layer[name].shape[0]] = layer[name]
                layer[name] = grown
        self._reserved = target


def page_bytes(backend: AttentionBackend, layers: int) -> int:
    """Return the bytes of one page over all layers."""
    shapes: Mapping[str, tuple[tuple[int, ...], str]] = backend.kv_tensors(1)
    sizes = [math.prod(shape) * int(getattr(torch, dtype).itemsize) for shape, dtype in shapes.values()]
    return layers * sum(sizes)
