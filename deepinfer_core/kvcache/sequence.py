"""A request's share of the KV cache: its pages in order, and how much of them is computed."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
from attrs import define, field

from deepinfer_core.kvcache.prefix import Node


@define(eq=False)
class KVSequence:
    """Pages of one token sequence. Only `KVCache` changes it.

    Attributes:
        pages: Page numbers in order of position.
        length: Tokens whose keys and values are stored.
        cached: How many of them came from the prefix cache.
        salt: Keeps its prefix apart from those of other salts.
        nodes: Its pages in the prefix cache, from the first on: ``nodes[i].page == pages[i]``.
        cacheable: False once a page of it could not be cached, or when it must not be.
        table: ``pages`` once more, as int32 with room to grow, so that a page table is built by copying rows.
    """

    pages: list[int] = field(factory=list)
    length: int = 0
    cached: int = 0
    salt: Hashable = None
    nodes: list[Node] = field(factory=list)
    cacheable: bool = True
    table: npt.NDArray[np.int32] = field(factory=lambda: np.zeros(8, dtype=np.int32))

    def append(self, pages: list[int]) -> None:
        """Put pages behind those it has."""
        held = len(self.pages)
        self.pages.extend(pages)
        if len(self.pages) > self.table.size:
            grown = np.zeros(max(2 * self.table.size, len(self.pages)), dtype=np.int32)
            grown[:held] = self.table[:held]
            self.table = grown
        self.table[held : len(self.pages)] = pages

    def swap(self, index: int, page: int) -> None:
        """Let position ``index`` of the page table name another page with the same content."""
        self.pages[index] = page
        self.table[index] = page
