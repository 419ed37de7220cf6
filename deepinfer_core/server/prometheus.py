"""``/metrics``: the engine's own counters and histograms under names of the field's habit; every label is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deepinfer_core import __version__
from deepinfer_core.engine.metrics import Histogram
from deepinfer_core.kernels.nvrtc import compilations
from deepinfer_core.server.service import ServedModel, Service

HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft_seconds", "From submission to the first token."),
    "time_per_output_token_seconds": ("tpot_seconds", "(last - first token) / (n - 1) of each answer."),
    "inter_token_latency_seconds": ("itl_seconds", "Gaps between tokens."),
    "inter_token_jitter_seconds": ("jitter_seconds", "p95 - p50 of the gaps of each answer."),
    "request_queue_time_seconds": ("queue_seconds", "From submission to the first work."),
    "prefill_chunk_seconds": ("prefill_chunk_seconds", "A work that prefills."),
    "decode_step_seconds": ("decode_step_seconds", "A work that decodes."),
    "mixed_step_seconds": ("mixed_step_seconds", "A work that does both."),
}
"""Name here -> name in `EngineMetrics`, and help."""

COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of admitted requests."),
    "generation_tokens": ("generated_tokens_total", "Tokens generated."),
    "prefix_cache_hit_tokens": ("cached_tokens_total", "Prompt tokens that the prefix cache had."),
    "requests": ("requests_total", "Requests that the engine took."),
    "num_preemptions": ("preemptions_total", "Requests whose pages were taken and computed again."),
    "out_of_memory": ("out_of_memory_total", "Times that memory ran short."),
    "prefill_steps": ("prefill_steps_total", "(request, chunk) items computed."),
    "prefill_decode_overlap_steps": ("prefill_decode_overlap_steps", "Cycles that had both kinds of work."),
    "prefill_decode_stream_overlap_steps": (
        "prefill_decode_stream_overlap_steps",
        "Launches on one CUDA stream while the other kind was unfinished on another.",
    ),
    "engine_cycles": ("cycles", "Cycles of the engine."),
}
"""Name here, without ``_total`` -> name in `EngineMetrics`, and help."""


def exposition(service: Service) -> tuple[bytes, str]:
    """Return the text that Prometheus reads, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("up_state", "1 for the state that the server is in.", {("state", service.state): 1})
        http = CounterMetricFamily("deepinfer:http_requests", "Answers given.", labels=("route", "method", "status"))
        for (route, method, status), count in service.http.copy().items():
            http.add_metric((route, method, str(status)), count)
        yield http
        yield CounterMetricFamily(
            "deepinfer:client_disconnects", "Clients that went before the end.", value=service.disconnects
        )
        yield _gauge("live_requests", "Generations of HTTP requests under way.", {None: len(service.generations)})
        if service.loaded is not None:
            yield from _engine(service.loaded)


def _engine(model: ServedModel) -> Iterator[Metric]:
    engine, metrics = model.engine, model.engine.metrics
    status = engine.status()
    for name, (source, text) in HISTOGRAMS.items():
        yield _histogram(name, text, getattr(metrics, source))
    for name, (source, text) in COUNTERS.items():
        yield CounterMetricFamily(f"deepinfer:{name}", text, value=getattr(metrics, source))
    ended = CounterMetricFamily("deepinfer:request_success", "Answers that ended.", labels=("finished_reason",))
    for reason, count in status["finished"].items():
        ended.add_metric((reason,), count)
    yield ended
    queues, pool = status["queues"], status["pool"]
    yield _gauge("num_requests_running", "Requests in work.", {None: queues["prefilling"] + queues["decoding"]})
    yield _gauge("num_requests_waiting", "Requests that wait.", {None: queues["waiting"]})
    total, free = pool["total_pages"], pool["available_pages"]
    yield _gauge("kv_cache_usage_ratio", "Share of KV pages that running requests hold.", {None: 1 - free / total})
    pages: dict[tuple[str, str] | None, float] = {
        ("state", "total"): total,
        ("state", "available"): free,
        ("state", "cached"): pool["cached_pages"],
    }
    yield _gauge("kv_cache_pages", "KV pages.", pages)
    faults = CounterMetricFamily("deepinfer:policy_faults", "Plans that broke a rule.", labels=("kind",))
    for kind, count in status["policy_faults"].items():
        faults.add_metric((str(kind)[:80],), count)
    yield faults
    yield CounterMetricFamily(
        "deepinfer:compilations_after_ready", "Kernels compiled while serving.", value=compilations() - model.compiled
    )
    info = {
        "version": __version__,
        "model": model.name,
        "policy": str(status["policy"]),
        "prefill_decode_overlap": str(status["prefill_decode_overlap"]).lower(),
        **{key: str(model.about[key]) for key in ("device", "dtype", "attention") if key in model.about},
    }
    about = GaugeMetricFamily("deepinfer:info", "What serves.", labels=tuple(info))
    about.add_metric(tuple(info.values()), 1)
    yield about
    if model.kernels:
        names = tuple(model.kernels[0])
        chosen = GaugeMetricFamily("deepinfer:kernel_info", "The kernel of each shape and range of M.", labels=names)
        for row in model.kernels:
            chosen.add_metric(tuple(row[name] for name in names), 1)
        yield chosen


def _gauge(name: str, text: str, values: dict[tuple[str, str] | None, float]) -> GaugeMetricFamily:
    labels = tuple({key[0] for key in values if key is not None})
    found = GaugeMetricFamily(f"deepinfer:{name}", text, labels=labels)
    for key, value in values.items():
        found.add_metric(() if key is None else (key[1],), value)
    return found


def _histogram(name: str, text: str, source: Histogram) -> HistogramMetricFamily:
    counts, above = list(source.buckets), 0.0
    buckets: list[tuple[str, float]] = []
    for edge, count in zip((*source.edges, float("inf")), counts, strict=True):
        above += count
        buckets.append(("+Inf" if edge == float("inf") else f"{edge:.6g}", above))
    found = HistogramMetricFamily(f"deepinfer:{name}", text)
    found.add_metric((), buckets, source.total)
    return found
