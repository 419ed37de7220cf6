"""A linear kernel bound to one problem, with inputs, the expected result, and all that a call must not touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen

from deepinfer_core.plugin_api import (
    LinearKernel,
    LinearKernelSpec,
    Tensors,
    WeightLayoutSpec,
    WeightScheme,
    WeightSchemeSpec,
)
from deepinfer_core.registry.catalog import load_factory, make
from deepinfer_core.testing.guards import check_guards, guarded, same_bits
from deepinfer_core.testing.linear_cases import Case, in_test, sample_weight

TOLERANCE: Mapping[str, float] = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5}
"""Allowed error of an element, in parts of (its size + the root of the sum of its squared products).

An element's size alone would not do: products cancel, and their rounding errors stay. A float16 result is rounded by
up to 2^-11 of its size and a bfloat16 one by 2^-8, and a kernel may do so up to three times (product, bias, residual)
over weights that its layout has rounded once; float32 leaves room for the order of the sum. One product of a
thousand that is left out or taken twice is 3e-2.
"""


@frozen(kw_only=True)
class BoundKernel:
    """Runs a kernel and compares.

    Attributes:
        spec: The kernel's descriptor.
        case: The problem, and whether a residual is added.
        kernel: The kernel under test.
        weights: What its layout packed.
        x: ``[M, K]`` for the largest M.
        bias: ``[N]`` or None.
        residual: ``[M, N]`` or None.
        expected: float32 ``[M, N]``, from the scheme's own values.
        allowed: float32 ``[M, N]``, how far off an element may be.
        workspace: The bytes that the spec's rule asked for, zeroed once, and the guarded buffer around them.
    """

    spec: LinearKernelSpec
    case: Case
    kernel: LinearKernel = field(eq=False)
    weights: Tensors = field(eq=False)
    x: torch.Tensor = field(eq=False)
    bias: torch.Tensor | None = field(eq=False)
    residual: torch.Tensor | None = field(eq=False)
    expected: torch.Tensor = field(eq=False)
    allowed: torch.Tensor = field(eq=False)
    workspace: tuple[torch.Tensor, torch.Tensor] | None = field(eq=False)

    @classmethod
    def make(
        cls,
        spec: LinearKernelSpec,
        layout: WeightLayoutSpec,
        scheme: WeightSchemeSpec,
        case: Case,
        tolerance: Mapping[str, float] = TOLERANCE,
        *,
        weight: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
    ) -> BoundKernel:
        """Quantize, pack, make and warm up, as the engine does.

        Args:
            spec: The kernel.
            layout: Its layout.
            scheme: Its scheme.
            case: The problem, with the capability of the card that is here.
            tolerance: See `TOLERANCE`.
            weight: float32 ``[N, K]``; a sample when None.
            x: ``[M, K]``; a sample for the largest row count of the case when None.
        """
        problem = case.problem
        n, k, device = problem.n, problem.k, problem.device
        act = getattr(torch, problem.act_dtype)
        maker: WeightScheme = make(scheme.factory, in_test(scheme))
        stored = maker.quantize(
            sample_weight(n, k, device) if weight is None else weight.contiguous(),
            group_size=problem.group_size,
            zeros=problem.zeros,
            method="rtn",
        )
        values = maker.dequantize(stored, k=k, group_size=problem.group_size)
        if x is None:
            x = _sample((max(case.ms), k), act, device, seed=1)
        bias = _sample((n,), act, device, seed=2) if problem.bias else None
        residual = _sample((x.shape[0], n), act, device, seed=3) if case.residual else None
        expected, squares = x.float() @ values.t(), x.float().square() @ values.square().t()
        for term in (bias, residual):
            if term is not None:
                expected, squares = expected + term.float(), squares + term.float().square()
        # Below the smallest normal number steps do not get smaller.
        floor = 2 * torch.finfo(act).smallest_normal * torch.finfo(act).eps
        made: LinearKernel = make(spec.factory, in_test(spec), problem)
        made.warm_up(case.ms)
        return cls(
            spec=spec,
            case=case,
            kernel=made,
            weights=make(layout.factory, in_test(layout)).pack(problem, stored),
            x=x,
            bias=bias,
            residual=residual,
            expected=expected,
            allowed=tolerance[problem.act_dtype] * (squares.sqrt() + expected.abs()) + floor,
            workspace=_workspace(spec, case),
        )

    def with_own_workspace(self) -> BoundKernel:
        """Return the same kernel over the same weights with scratch bytes of its own, as on another stream."""
        return evolve(self, workspace=_workspace(self.spec, self.case))

    def label(self, m: int) -> str:
        """Return what a failure begins with."""
        return f"{self.spec.name}, {self.case}, M = {m}"

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Call the kernel with a poisoned out, and fail when it changed anything that is not out's or its own."""
        m = x.shape[0]
        read: dict[str, torch.Tensor | None] = {"x": x, "the bias": self.bias, "the residual": self.residual}
        read |= {f"weights[{name!r}]": tensor for name, tensor in self.weights.items()}
        before = {name: tensor.clone() for name, tensor in read.items() if tensor is not None}
        out, around = guarded((m, self.case.problem.n), x.dtype, x.device, float("nan"))
        self.launch(x, out)
        for name, copy in before.items():
            tensor = read[name]
            assert tensor is not None
            assert same_bits(tensor, copy), f"{self.label(m)}: changed {name}"
        check_guards(around, f"{self.label(m)}: out")
        if self.workspace is not None:
            check_guards(self.workspace[1], f"{self.label(m)}: workspace")
        return out

    def launch(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Call the kernel and compare nothing: no synchronization, so that it fits into a stream or a graph."""
        if out is None:
            out = torch.full((x.shape[0], self.case.problem.n), float("nan"), dtype=x.dtype, device=x.device)
        residual = None if self.residual is None else self.residual[: x.shape[0]]
        workspace = None if self.workspace is None else self.workspace[0]
        self.kernel(x, self.weights, out, bias=self.bias, residual=residual, workspace=workspace)
        return out

    def check(self, out: torch.Tensor, m: int, how: str = "") -> None:
        """Fail with the first element that is off; NaN is."""
        wrong = ~((out.float() - self.expected[:m]).abs() <= self.allowed[:m])
        if not bool(wrong.any()):
            return
        row, feature = (int(i) for i in wrong.nonzero()[0])
        found, right, room = (float(t[row, feature]) for t in (out, self.expected, self.allowed))
        raise AssertionError(
            f"{self.label(m)}{how}: {int(wrong.sum())} of {wrong.numel()} elements are off; the first, row {row} "
            f"feature {feature}, is {found:.7g} where {right:.7g} +- {room:.2g} is right"
        )


def _workspace(spec: LinearKernelSpec, case: Case) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the zeroed bytes for the case's row counts, as the engine allocates them; or None."""
    if spec.workspace is None:
        return None
    bytes_for: Any = load_factory(spec.workspace)
    size = max(int(bytes_for(case.problem, m)) for m in case.ms)
    return guarded((size,), torch.uint8, torch.device(case.problem.device), 0) if size else None


def _sample(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)
