"""The engine's state as plain data, for `/status`, benches and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_core.engine.metrics import EngineMetrics
from deepinfer_core.engine.planner import Planner
from deepinfer_core.engine.request import Queues
from deepinfer_core.kvcache.manager import KVCache


def describe(
    planner: Planner,
    queues: Queues,
    kv: KVCache,
    metrics: EngineMetrics,
    *,
    overlap: bool,
    streams: int,
    lanes: Sequence[str],
    inbox: int,
) -> dict[str, Any]:
    """Return policy, flag, counters, queues and pool. Plain reads: safe from any thread, exact between cycles."""
    prefix = kv.prefix
    return {
        "policy": planner.name,
        "prefill_decode_overlap": overlap,
        "streams": streams,
        "lanes": {name: {"busy_seconds": metrics.lane_seconds.get(name, 0.0)} for name in lanes},
        **metrics.counters,
        "finished": dict(metrics.finished),
        "policy_faults": dict(planner.faults),
        "last_policy_fault": planner.last_fault,
        "queues": {
            "waiting": len(queues.waiting) + inbox,
            "prefilling": len(queues.prefilling),
            "decoding": len(queues.decoding),
        },
        "pool": {
            "page_size": kv.page_size,
            "total_pages": kv.total_pages,
            "available_pages": kv.available_pages,
            "cached_pages": prefix.pages if prefix else 0,
            "evicted_pages": prefix.evictions if prefix else 0,
            "bytes": kv.nbytes,
        },
        "latency": {name: histogram.summary() for name, histogram in metrics.histograms.items()},
    }
