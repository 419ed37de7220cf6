"""The immutable view that a policy plans on."""

from __future__ import annotations

from deepinfer_core.engine.request import Queues
from deepinfer_core.kvcache.manager import KVCache
from deepinfer_core.plugin_api import CostModel, EngineView, LaneView, Limits


def build_view(
    queues: Queues, kv: KVCache, lanes: tuple[LaneView, ...], limits: Limits, cost: CostModel, now: float
) -> EngineView:
    """Return what a policy may know; nothing in it changes when the engine goes on.

    Order: waiting by arrival, prefilling by admission, decoding by when decoding began.
    """
    return EngineView(
        now=now,
        waiting=tuple([request.view(kv) for request in queues.waiting.values()]),
        prefilling=tuple([request.view(kv) for request in queues.prefilling.values()]),
        decoding=tuple([request.view(kv) for request in queues.decoding.values()]),
        lanes=lanes,
        free_pages=kv.available_pages,
        total_pages=kv.total_pages,
        limits=limits,
        cost=cost,
    )
