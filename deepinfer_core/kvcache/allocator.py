"""Page pool: who holds which page of the KV cache, in O(1) a page."""

from __future__ import annotations

from deepinfer_core.errors import CapacityError


class OutOfPagesError(CapacityError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """Numbers of pages, with a reference count each; it knows nothing of tensors.

    Elastic: a page that was never used is taken only when no used page is free, so `high_water` is the most pages that
    were ever held at once, and memory behind the pool needs to reach no further.

    Args:
        total: Pages that the byte budget allows.
    """

    __slots__ = ("_free", "_refs", "high_water", "total")

    def __init__(self, total: int) -> None:
        assert total >= 0, total
        self.total = total
        self.high_water = 0
        self._refs: list[int] = []  # by page number, up to high_water
        self._free: list[int] = []  # a stack: the page freed last is the warmest

    @property
    def free_pages(self) -> int:
        """Pages that `alloc` can hand out."""
        return self.total - self.high_water + len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages with at least one reference."""
        return self.high_water - len(self._free)

    def alloc(self, n: int = 1) -> list[int]:
        """Take n pages with one reference each, all or none.

        Raises:
            OutOfPagesError: Fewer than n pages are free.
        """
        if n > self.free_pages:
            raise OutOfPagesError(f"{n} KV pages asked for, {self.free_pages} of {self.total} free")
        again = min(n, len(self._free))
        pages = [self._free.pop() for _ in range(again)]
        for page in pages:
            self._refs[page] = 1
        if again < n:
            first, self.high_water = self.high_water, self.high_water + n - again
            pages.extend(range(first, self.high_water))
            self._refs.extend([1] * (n - again))
        return pages

    def refs(self, page: int) -> int:
        """Return how many hold the page; 0 when it is free."""
        return self._refs[page] if page < self.high_water else 0

    def share(self, page: int) -> int:
        """Add a reference to a page in use; returns how many there are now."""
        assert self._refs[page] > 0, f"page {page} is free and cannot be shared"
        self._refs[page] += 1
        return self._refs[page]

    def free(self, page: int) -> int:
        """Drop one reference; returns how many are left, at 0 the page can be taken again."""
        left = self._refs[page] - 1
        assert left >= 0, f"page {page} was freed twice"
        self._refs[page] = left
        if not left:
            self._free.append(page)
        return left
