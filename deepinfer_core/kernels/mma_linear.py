"""Linear kernels over fragment-order records: tensor cores for few rows, decode + matmul for many."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_core.kernels.accumulation import keep_float32_sums
from deepinfer_core.kernels.cuda import CudaKernel, require_dense_columns
from deepinfer_core.kernels.mma_plan import SHARED_LIMIT, TICKET_BYTES, Plan, Shape, best_plan, stream_plan, tile_plan
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


# The stream's handle alone: `torch.cuda.current_stream` builds an object on every call.
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)


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
        planner: `best_plan`, `stream_plan` or `tile_plan`.
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
        require_dense_columns(f"{self.problem.scheme} tensor-core kernel", x)
        device = x.device.index
        stream = _raw_stream(device)
        for m0 in range(0, x.shape[0], ROWS_A_LAUNCH):
            rows = min(x.shape[0] - m0, ROWS_A_LAUNCH)
            launch = self._launch_for(rows, device)
            args: Any = launch.args
            args.codes = weights["codes"].data_ptr()
            args.groups = weights["groups"].data_ptr()
            args.x = x.data_ptr() + m0 * x.stride(0) * 2
            args.y = out.data_ptr() + m0 * self.problem.n * 2
            args.bias = None if bias is None else bias.data_ptr()
            args.residual = None if residual is None else residual.data_ptr() + m0 * self.problem.n * 2
            args.ldx = x.stride(0)
            if workspace is not None:
                args.ticket = workspace.data_ptr()
                args.part = workspace.data_ptr() + TICKET_BYTES
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
        args.m, args.n, args.k = m, self.problem.n, self.problem.k
        args.tiles16, args.units = self.shape.tiles, self.shape.units
        args.cut0, args.cut1 = plan.cut
        if isinstance(args, _StreamArgs):
            args.early = int(self._dependent)
        launch = StructLaunch(
            int(function.ptr), plan.grid, plan.threads, plan.shared_bytes, args, dependent=self._dependent
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
    "decode_rows",
    "plan_bytes",
    "shape_of",
    "stream_plan",
    "tile_plan",
]
