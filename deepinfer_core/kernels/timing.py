"""How a kernel is timed: CUDA-graph replay over rotating weight copies, queued behind a spin; median and spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import frozen

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.cuda import CudaKernel

COPIES_BYTES = 320 << 20
"""Weights are rotated among copies of this many bytes in all, so that none is found in the L2 (60 MB on an H200)."""

SPIN_CYCLES = 200_000
"""About 0.1 ms of spinning in front of a replay: the graph's own launch is queued, not counted."""


@frozen(kw_only=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        us: Median over the replays.
        spread: (slowest - fastest) / median of the replays.
        replays: How many replays there were.
    """

    us: float
    spread: float
    replays: int


def copies_for(nbytes: int) -> int:
    """Return how many copies of a weight push each of them out of the cache before its next turn."""
    return max(2, -(-COPIES_BYTES // max(nbytes, 1)))


def time_calls(calls: Sequence[Callable[[], object]], *, replays: int = 7, min_ms: float = 1.0) -> Timing:
    """Time the calls, which do the same work on different copies, as one CUDA graph.

    Args:
        calls: One a copy; each launches on torch's current stream and does not synchronize.
        replays: Measured replays of the graph.
        min_ms: A replay holds so many rounds that it lasts at least this long.

    Raises:
        KernelError: There is no CUDA device, or a call cannot be captured.
    """
    if not torch.cuda.is_available():
        raise KernelError("kernels are timed on a CUDA device and none is here")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        once = _replay_ms(_capture(calls, 1, stream), stream)
        rounds = max(1, int(min_ms / max(once, 1e-3)) + 1)
        graph = _capture(calls, rounds, stream)
        _replay_ms(graph, stream)
        per_call = [_replay_ms(graph, stream) * 1e3 / (rounds * len(calls)) for _ in range(replays)]
    median = statistics.median(per_call)
    return Timing(us=median, spread=(max(per_call) - min(per_call)) / median, replays=replays)


def _capture(calls: Sequence[Callable[[], object]], rounds: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture on the current stream.

    Torch's context manager empties the allocator's cache each time, which takes longer than what is measured.
    """
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    graph.capture_begin()
    try:
        for _ in range(rounds):
            for call in calls:
                call()
    finally:
        graph.capture_end()
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SPIN_CYCLES)
    start.record(stream)
    graph.replay()
    end.record(stream)
    stream.synchronize()
    return float(start.elapsed_time(end))


def read_bandwidth_gbs(nbytes: int = 2 << 30) -> float:
    """Measure the read ceiling of the current device in GB/s: 16-byte loads over ``nbytes``, nothing written."""
    buffer = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda").random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = CudaKernel.from_file(Path(__file__).parent / "csrc" / "read_ceiling.cu", "read_all")
    blocks = torch.cuda.get_device_properties(buffer.device).multi_processor_count * 16
    count = np.int64(nbytes // 16)
    call = lambda: kernel.launch((blocks,), (512,), (buffer.data_ptr(), count, sink.data_ptr()))
    return nbytes / time_calls([call]).us / 1e3
