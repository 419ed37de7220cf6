"""The largest prefill chunk that a time allows, as the engine's cost model predicts it."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_core.plugin_api import EngineView, RequestView

FLOOR = 16
"""Tokens of a chunk that are taken whatever they cost: prefill always goes on; beside a weight read they are cheap."""


def largest_chunk(
    view: EngineView, head: RequestView, most: int, budget_ms: float, beside: Iterable[RequestView] = ()
) -> int:
    """Return how many prompt tokens of ``head`` a forward of at most ``budget_ms`` computes, from FLOOR to ``most``.

    Args:
        view: What the plan is made for.
        head: The request whose turn it is; its context stands for the chunk's.
        most: The chunk's limit.
        budget_ms: What the forward may take.
        beside: Requests that decode in the same forward.
    """
    rows = list(beside)
    read = sum(r.start + 1 for r in rows)
    low, high = min(FLOOR, most), most
    while low < high:
        middle = (low + high + 1) // 2
        if view.cost.predict_ms(middle, len(rows), read + head.start + middle) <= budget_ms:
            low = middle
        else:
            high = middle - 1
    return low
