"""What a step may hold after one has found no memory: halves first, and back up when enough has gone well."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.engine.batch import Item

RECOVERY_WORKS = 16
"""Works that must go well before the limit doubles again."""

FLOOR = 16
"""Tokens below which a work is not shrunk: what so few need hardly depends on how many they are."""


class Headroom:
    """The token limit of a work, as experience has it."""

    def __init__(self, max_batched_tokens: int) -> None:
        self.tokens = self._most = max_batched_tokens
        self._good = 0

    def shrink(self, tried: int) -> None:
        """Learn that a work of so many tokens found no memory."""
        self.tokens = min(self.tokens, max(FLOOR, tried // 2))
        self._good = 0

    def worked(self) -> None:
        """Learn that a work went well."""
        if self.tokens < self._most:
            self._good += 1
            if self._good >= RECOVERY_WORKS:
                self.tokens, self._good = min(self._most, 2 * self.tokens), 0


def halves(items: Sequence[Item]) -> list[list[Item]]:
    """Split a work: by requests, then by tokens of the one that is left; one token of one request cannot be split.

    Of a single request only the first half comes back; a later plan takes up the rest.
    """
    if len(items) > 1:
        middle = len(items) // 2
        return [list(items[:middle]), list(items[middle:])]
    only = items[0]
    return [[Item.of(only.request, only.tokens // 2)]] if only.tokens > 1 else []
