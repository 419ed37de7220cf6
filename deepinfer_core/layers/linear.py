"""A linear layer: resident weights of one layout, and the kernel that its number of rows asks for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.workspace import Workspaces
from deepinfer_core.plugin_api import LinearKernel, LinearKernelSpec, LinearProblem, Tensors, WeightLayout
from deepinfer_core.registry.catalog import load_factory, make
from deepinfer_core.registry.dispatch import DispatchRow, make_kernel

if TYPE_CHECKING:
    from deepinfer_core.registry.select import Selection


@frozen(kw_only=True)
class BoundKernel:
    """One kernel made for one problem.

    Attributes:
        spec: Its descriptor.
        run: The kernel itself.
        scratch: Where its workspace comes from; None when it needs none.
        adds_residual: It adds a residual itself.
    """

    spec: LinearKernelSpec
    run: LinearKernel = field(eq=False)
    scratch: Workspaces | None = field(eq=False)
    adds_residual: bool

    def workspace(self) -> torch.Tensor | None:
        """Return its scratch bytes on the current stream, zeroed once; None when it needs none."""
        return None if self.scratch is None else self.scratch.get(self.spec.name)


class BoundKernels:
    """The layout and kernels of one selection, made once and shared by every layer with an equal problem."""

    def __init__(
        self, selection: Selection, *, device: torch.device | str, workspaces: Workspaces | None = None
    ) -> None:
        """Import and make what the selection chose.

        Args:
            selection: Layout and dispatch table.
            device: Where the layers live.
            workspaces: The model's scratch memory; a pool of its own when None.

        Raises:
            PluginError: A factory cannot be imported or raises.
        """
        self.selection = selection
        self.problem: LinearProblem = selection.problem
        self.device = torch.device(device)
        self.layout: WeightLayout = make(selection.layout.spec.factory, selection.layout)
        self.workspaces = workspaces or Workspaces(device)
        rows = selection.table.rows
        made = {row.kernel.spec.name: self._bind(row) for row in rows}
        self._rows = tuple(made[row.kernel.spec.name] for row in rows)
        self._highs = tuple(row.m.hi for row in rows)

    def kernel_for(self, m: int) -> BoundKernel:
        """Return what runs ``m >= 1`` rows.

        Raises:
            KernelError: ``m`` is beyond what the selection was made for.
        """
        if m > self._highs[-1]:
            problem = self.problem
            raise KernelError(
                f"{m} rows for a layer of {problem.k} x {problem.n} that was set up for {self._highs[-1]} at most; "
                "raise [scheduler] max_batched_tokens"
            )
        return self._rows[bisect_left(self._highs, m)]

    def warm_up(self, ms: Iterable[int]) -> None:
        """Let each kernel compile what the row counts that fall to it will need."""
        wanted: dict[int, tuple[BoundKernel, list[int]]] = {}
        for m in sorted(set(ms)):
            if 1 <= m <= self._highs[-1]:
                kernel = self.kernel_for(m)
                wanted.setdefault(id(kernel), (kernel, []))[1].append(m)
        for kernel, its_ms in wanted.values():
            kernel.run.warm_up(its_ms)

    def _bind(self, row: DispatchRow) -> BoundKernel:
        spec = row.kernel.spec
        scratch = None
        if spec.workspace is not None:
            bytes_for = load_factory(spec.workspace, row.kernel)
            ranges = [r.m for r in self.selection.table.rows if r.kernel.spec.name == spec.name]
            most = self.problem.m_max
            size = max(int(bytes_for(self.problem, m)) for r in ranges for m in range(r.lo, min(r.hi, most) + 1))
            if size:
                self.workspaces.reserve(spec.name, size)
                scratch = self.workspaces
        return BoundKernel(
            spec=spec,
            run=make_kernel(row.kernel, self.problem, self.layout),
            scratch=scratch,
            adds_residual="residual" in spec.epilogues,
        )


class Linear:
    """``x @ W.T (+ bias) (+ residual)`` over weights that are resident once.

    Attributes:
        kernels: What runs it, shared with the layers of equal problems.
        weights: The layout's resident tensors.
        bias: ``[N]`` in the activations' dtype, or None.
    """

    def __init__(self, kernels: BoundKernels, weights: Tensors, bias: torch.Tensor | None) -> None:
        self.kernels = kernels
        self.weights = weights
        self.bias = bias
        self._n = kernels.problem.n

    @classmethod
    def build(
        cls,
        selection: Selection,
        tensors: Tensors,
        bias: torch.Tensor | None = None,
        *,
        device: torch.device | str,
        kernels: BoundKernels | None = None,
    ) -> Linear:
        """Pack canonical tensors into the selected layout.

        Args:
            selection: Layout and dispatch table.
            tensors: Canonical tensors of the whole layer; merged layers are already joined along N.
            bias: ``[N]`` of any float dtype, or None.
            device: Where the layer lives.
            kernels: What an earlier layer with an equal problem was built with; made here when None.

        Returns:
            The layer; dense tensors that need no repacking are kept by reference.
        """
        kernels = kernels or BoundKernels(selection, device=device)
        problem = kernels.problem
        resident = {name: tensor.to(device) for name, tensor in tensors.items()}
        if bias is not None:
            bias = bias.to(device=device, dtype=getattr(torch, problem.act_dtype)).contiguous()
        assert problem.bias == (bias is not None), f"the problem says bias={problem.bias}"
        return cls(kernels, kernels.layout.pack(problem, resident), bias)

    @property
    def selection(self) -> Selection:
        """What the layer was built from."""
        return self.kernels.selection

    @property
    def nbytes(self) -> int:
        """Resident bytes of weights and bias."""
        return sum(t.nbytes for t in self.weights.values()) + (0 if self.bias is None else self.bias.nbytes)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, float32_out: bool = False
    ) -> torch.Tensor:
        """Return ``[M, N]``; no row, no launch.

        Args:
            x: ``[M, K]`` in the activations' dtype; rows may be strided, columns are contiguous.
            residual: ``[M, N]`` to add, or None; a float32 one under 16-bit activations gives a float32 result.
            float32_out: Return float32 where the kernel can write it, so that nothing is rounded to 16 bits.
        """
        m = x.shape[0]
        kernel = self.kernels.kernel_for(m) if m else None
        wide = residual is not None and residual.dtype != x.dtype
        out_float32 = kernel is not None and kernel.spec.float32_out and (float32_out or wide)
        out = x.new_empty((m, self._n), dtype=torch.float32 if out_float32 else x.dtype)
        if kernel is not None:
            added = residual if kernel.adds_residual and not wide else None
            kernel.run(x, self.weights, out, bias=self.bias, residual=added, workspace=kernel.workspace())
            if residual is not None and added is None:
                return torch.add(residual, out) if wide else out.add_(residual)
        return out if not wide else out.float()
