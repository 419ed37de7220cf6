"""Prefix cache: full pages found again by the tokens in them, shared without a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from attrs import define, field

from deepinfer_core.kvcache.allocator import PagePool


def page_key(tokens: tuple[int, ...]) -> int:
    """Return the hash that a page is looked up by; equal hashes are not yet equal pages (see `PrefixCache.match`)."""
    return hash(tokens)


@define(eq=False)
class Node:
    """One cached page: its tokens, and by its parent chain all tokens before them; ``key`` is of roots alone."""

    parent: Node | None
    tokens: tuple[int, ...]
    page: int
    children: dict[int, Node] = field(factory=dict)
    key: Hashable = None


class PrefixCache:
    """A tree of full pages. The cache holds one reference to each of its pages; every sequence that reads it another.

    Two rules keep it simple. A sequence that holds a node holds all its ancestors (`insert` swaps a page computed twice
    for the one that is cached). A sequence lets go of its deepest node first. So of the pages that nobody reads, the
    one that was let go longest ago never has a child: evicting in that order is least-recently-used and leaves no hole.

    Args:
        pool: Where the pages come from.
        namespace: What, beside the salt, two prompts must share: model and KV dtype.
    """

    def __init__(self, pool: PagePool, namespace: Hashable = ()) -> None:
        self._pool = pool
        self._namespace = namespace
        self._roots: dict[Hashable, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()  # pages without a reader, least recently used first
        self.pages = 0
        self.evictions = 0

    @property
    def reclaimable(self) -> int:
        """Pages that `evict` can free right now."""
        return len(self._idle)

    def root(self, salt: Hashable = None) -> Node:
        """Return the empty prefix of a salt; prompts under different salts never share a page."""
        key = (self._namespace, salt)
        return self._roots.setdefault(key, Node(None, (), -1, key=key))

    def match(self, tokens: Sequence[int], page_size: int, salt: Hashable = None) -> list[Node]:
        """Return the longest cached chain of full pages, with a reference taken on each page.

        A hash alone proves nothing: the tokens of each page are compared, those before it by the chain itself. The
        last token is never matched, so that there is one to compute and logits to sample from.
        """
        node, found = self._roots.get((self._namespace, salt)), list[Node]()
        if node is None:
            return found
        for start in range(0, len(tokens) - page_size, page_size):
            wanted = tuple(tokens[start : start + page_size])
            child = node.children.get(page_key(wanted))
            if child is None or child.tokens != wanted:
                break
            self._pool.share(child.page)
            self._idle.pop(child, None)
            found.append(child)
            node = child
        return found

    def insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node | None:
        """Cache a full page behind its parent; returns the node that the caller's reference now stands for.

        When the same tokens are cached already, the caller's page is freed and its reference moves to the cached one.
        None when another page has the same hash: the page stays uncached, which costs a hit and never an answer.
        """
        node = parent.children.get(page_key(tokens))
        if node is None:
            node = Node(parent, tokens, page)
            parent.children[page_key(tokens)] = node
            self._pool.share(page)
            self.pages += 1
        elif node.tokens != tokens:
            return None
        elif node.page != page:
            self._pool.share(node.page)
            self._idle.pop(node, None)
            self._pool.free(page)
        return node

    def release(self, node: Node) -> None:
        """Let go of a page; call it for the deepest node of a sequence first."""
        if self._pool.free(node.page) == 1:
            self._idle[node] = None

    def evict(self, pages: int) -> int:
        """Drop up to this many unread pages, least recently used first; returns how many were freed."""
        count = min(pages, len(self._idle))
        for _ in range(count):
            node, _ = self._idle.popitem(last=False)
            assert not node.children, "a page with cached pages behind it must not be evicted before them"
            assert node.parent is not None
            del node.parent.children[page_key(node.tokens)]
            if node.parent.parent is None and not node.parent.children:
                del self._roots[node.parent.key]  # a salt that is used once must not be kept for ever
            left = self._pool.free(node.page)
            assert left == 0, f"evicted page {node.page} still has {left} readers"
        self.pages -= count
        self.evictions += count
        return count

    def clear(self) -> None:
        """Drop every page that nobody reads."""
        self.evict(len(self._idle))
