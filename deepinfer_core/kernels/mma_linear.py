"""Linear kernels over fragment-order records: tensor cores for few rows, decode + matmul for many."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepinfer_core.kernels.accumulation import keep_float32_sums
from deepinfer_core.kernels.cuda import CudaKernel, raw_stream, require_dense_columns
from deepinfer_core.kernels.mma_plan import (
    SHARED_LIMIT,
    TICKET_BYTES,
    Plan,
    Shape,
    best_plan,
    cluster_plan,
    stream_plan,
    tile_plan,
)
from deepinfer_core.kernels.struct_launch import StructLaunch, dependent_launch_available

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import LinearProblem, Tensors

ROWS_A_LAUNCH = 512
"""Longer inputs are cut: keeps arrival counters in their place and every index in 32 bits."""

DECODE_BYTES = 64 << 20
"""Values a decode chunk may hold; half of that where the card has little memory."""

_POINTERS = tuple(
    (name, ctypes.c_void_p) for name in ("codes", "groups", "x", "y", "bias", "residual", "part", "ticket")
)
_INTS = ("m", "n", "k", "ldx", "tiles16", "units")
_PER_CALL = struct.Struct("8Q4i")
"""What changes from call to call, at the head of both structs: the pointers, m, n, k and ldx, written by one call."""


class _StreamArgs(ctypes.Structure):
    _fields_ = (*_POINTERS, *((name, ctypes.c_int) for name in (*_INTS, "cut0", "cut1", "early")))


class _TileArgs(ctypes.Structure):
    _fields_ = (*_POINTERS, *((name, ctypes.c_int) for name in (*_INTS, "cut0", "cut1")))


def shape_of(problem: LinearProblem, bits: int) -> Shape:
    """Describe a problem to the planner; without a card, an H200's multiprocessors are assumed."""
    capability = problem.capability or (9, 0)
    cards = torch.cuda.is_available()
    return Shape(
        bits=bits,
        n=problem.n,
        k=problem.k,
        group_size=problem.group_size,
        zeros=problem.zeros,
        bf16=problem.act_dtype == "bfloat16",
        sms=torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count if cards else 132,
        shared_limit=SHARED_LIMIT.get(capability, min(SHARED_LIMIT.values())),
    )


def plan_bytes(planner: Callable[[Shape, int], Plan], shape: Shape, m: int) -> int:
    """Return the workspace that a kernel needs for up to m rows: the tickets and the largest partial sums."""
    top = min(max(m, 1), ROWS_A_LAUNCH)
    sizes = {top, *range(8, min(top, 64) + 1, 8), *range(64, top + 1, 64)}
    return TICKET_BYTES + max(planner(shape, size).partial_bytes for size in sizes)


class MmaLinear:
    """A `LinearKernel` over one planner's variants; compiled per row tile, launches kept per row count.

    Args:
        problem: The layer.
        bits: Bits of a code.
        csrc: Folder of ``mma_stream.cu`` and ``mma_tile.cu``.
        planner: `best_plan`, or one of the plans that it picks from, or `cluster_plan`.
    """

    def __init__(
        self, problem: LinearProblem, bits: int, csrc: Path, planner: Callable[[Shape, int], Plan] = best_plan
    ) -> None:
        self.problem = problem
        self.shape = shape_of(problem, bits)
        self._csrc = csrc
        self._planner = planner
        self._kernels: dict[tuple[tuple[str, int], ...], CudaKernel] = {}
        self._launches: dict[tuple[int, int], StructLaunch] = {}
        self._dependent = dependent_launch_available(problem.capability or (8, 0))

    def workspace_bytes(self, m: int) -> int:
        """Return the bytes needed for any row count up to m."""
        return plan_bytes(self._planner, self.shape, m)

    def warm_up(self, ms: Sequence[int]) -> None:
        """Compile and load what these row counts need, on the current device."""
        device = torch.cuda.current_device()
        for m in ms:
            for rows in {min(m, ROWS_A_LAUNCH), m % ROWS_A_LAUNCH} - {0}:
                self._launch_for(rows, device)

    def __call__(
        self,
        x: torch.Tensor,
        weights: Tensors,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Write ``out = x @ W.T (+ bias) (+ residual)``; see `LinearKernel`."""
        row_stride, column_stride = x.stride()
        if column_stride != 1:
            require_dense_columns(f"{self.problem.scheme} tensor-core kernel", x)
        device = x.get_device()
        stream = raw_stream(device)
        m, n = x.shape[0], self.problem.n
        for m0 in range(0, m, ROWS_A_LAUNCH):
            rows = min(m - m0, ROWS_A_LAUNCH)
            launch = self._launches.get((rows, device)) or self._launch_for(rows, device)
            scratch = 0 if workspace is None else workspace.data_ptr()
            with launch.lock:
                _PER_CALL.pack_into(
                    launch.args,
                    0,
                    weights["codes"].data_ptr(),
                    weights["groups"].data_ptr(),
                    x.data_ptr() + m0 * row_stride * 2,
                    out.data_ptr() + m0 * n * 2,
                    0 if bias is None else bias.data_ptr(),
                    0 if residual is None else residual.data_ptr() + m0 * n * 2,
                    scratch + TICKET_BYTES,
                    scratch,
                    rows,
                    n,
                    self.problem.k,
                    row_stride,
                )
                launch(stream)

    def _launch_for(self, m: int, device: int) -> StructLaunch:
        found = self._launches.get((m, device))
        if found is not None:
            return found
        plan = self._planner(self.shape, m)
        kernel = self._kernels.get(plan.defines)
        if kernel is None:
            kernel = self._kernels[plan.defines] = CudaKernel.from_file(
                self._csrc / f"{plan.kind}.cu",
                plan.kind,
                dict(plan.defines),
                shared_bytes=self.shape.shared_limit - 1024,
            )
        function = kernel.load(device)
        args = _StreamArgs() if plan.kind == "mma_stream" else _TileArgs()
        args.tiles16, args.units = self.shape.tiles, self.shape.units
        args.cut0, args.cut1 = plan.cut
        if isinstance(args, _StreamArgs):
            args.early = int(self._dependent)
        launch = StructLaunch(
            int(function.ptr),
            plan.grid,
            plan.threads,
            plan.shared_bytes,
            args,
            dependent=self._dependent,
            cluster=plan.cluster,
        )
        self._launches[m, device] = launch
        return launch


class MmaDecodeMatmul:
    """A `LinearKernel` for many rows: decodes a bounded chunk of features into the workspace, then cuBLAS.

    Args:
        problem: The layer.
        bits: Bits of a code.
        csrc: Folder of ``mma_dequantize.cu``.
    """

    def __init__(self, problem: LinearProblem, bits: int, csrc: Path) -> None:
        keep_float32_sums()
        self.problem = problem
        self.shape = shape_of(problem, bits)
        self._dtype = getattr(torch, problem.act_dtype)
        self._kernel = CudaKernel.from_file(csrc / "mma_dequantize.cu", "mma_dequantize", self.shape.defines())
        self._rows = decode_rows(problem)

    def workspace_bytes(self, m: int) -> int:
        """Return the bytes of one chunk behind the tickets, which stay untouched."""
        return TICKET_BYTES + self._rows * self.problem.k * 2

    def warm_up(self, ms: Sequence[int]) -> None:
        """Compile and load the decoder on the current device."""
        self._kernel.load()

    def dequantize(self, weights: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Write the values of features ``n0:n1`` into ``out`` ``[n1 - n0, K]`` of the act dtype."""
        import numpy as np

        first, last = n0 // 16, -(-n1 // 16)
        args = [weights["codes"].data_ptr(), weights["groups"].data_ptr(), out.data_ptr()]
        ints = [np.int32(v) for v in (n0, n1, self.problem.k, self.shape.units, out.stride(0))]
        self._kernel.launch((-(-self.shape.units // 4), last - first, 1), (128, 1, 1), [*args, *ints])

    def __call__(
        self,
        x: torch.Tensor,
        weights: Tensors,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Write ``out = x @ W.T (+ bias) (+ residual)``; see `LinearKernel`."""
        if x.shape[0] == 0:
            return
        n, k = self.problem.n, self.problem.k
        if workspace is None:
            chunk = torch.empty((self._rows, k), dtype=self._dtype, device=x.device)
        else:
            chunk = workspace[TICKET_BYTES : TICKET_BYTES + self._rows * k * 2].view(self._dtype).view(self._rows, k)
        for n0 in range(0, n, self._rows):
            n1 = min(n0 + self._rows, n)
            values = chunk[: n1 - n0]
            self.dequantize(weights, n0, n1, values)
            torch.mm(x, values.t(), out=out[:, n0:n1])
        if bias is not None:
            out.add_(bias)
        if residual is not None:
            out.add_(residual)


def decode_rows(problem: LinearProblem) -> int:
    """Return the features of a decode chunk: a multiple of 16 within the byte bound."""
    small = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 8 << 30
    budget = DECODE_BYTES // 2 if small else DECODE_BYTES
    return max(16, min(-(-problem.n // 16) * 16, budget // (problem.k * 2) // 16 * 16))


__all__ = [
    "MmaDecodeMatmul",
    "MmaLinear",
    "best_plan",
    "cluster_plan",
    "decode_rows",
    "plan_bytes",
    "shape_of",
    "stream_plan",
    "tile_plan",
]
