"""Measures kernels on one linear problem: random weights in rotating copies, values checked in the same run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from deepinfer_core.kernels.timing import Timing, copies_for, time_calls
from deepinfer_core.registry.catalog import Catalog, Registered, load_factory, make, make_scheme
from deepinfer_core.registry.dispatch import make_kernel

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import LinearKernelSpec, LinearProblem, Tensors

POISON = float("nan")


@frozen(kw_only=True)
class Measured:
    """One kernel at one M.

    Attributes:
        timing: Microseconds a call.
        rel_err: Relative error of the product against float32, norm over norm; NaN where an element was not written.
    """

    timing: Timing
    rel_err: float


class KernelBench:
    """One problem with its random weights on the current CUDA device.

    Attributes:
        problem: What is measured.
        weight: float32 ``[N, K]``: the values that the codes stand for.
        replays: Measured replays of each graph.
        floor_bytes: Bytes of packed codes, scales and zeros: what must be read once a call.
    """

    def __init__(self, catalog: Catalog, problem: LinearProblem, *, seed: int = 0, replays: int = 7) -> None:
        self.problem = problem
        self.replays = replays
        self._catalog = catalog
        generator = torch.Generator("cuda").manual_seed(seed)
        scheme = make_scheme(catalog, problem.scheme)
        self._canonical = _random_canonical(catalog, problem, generator)
        group = problem.group_size
        self.weight = scheme.dequantize(self._canonical, k=problem.k, group_size=group, dtype=torch.float32)
        self.floor_bytes = sum(t.nbytes for t in self._canonical.values())
        self._generator = generator

    def inputs(self, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fresh random x ``[M, K]`` in the act dtype and the float32 product."""
        dtype = getattr(torch, self.problem.act_dtype)
        x = torch.randn(m, self.problem.k, device="cuda", generator=self._generator).to(dtype)
        return x, x.float() @ self.weight.t()

    @contextmanager
    def loaded(self, kernel: Registered[LinearKernelSpec]) -> Iterator[Callable[[int], Measured]]:
        """Pack copies for a kernel's layout and yield what measures it at M; the copies are freed at the end."""
        layout_spec = self._catalog.layout(kernel.spec.layout)
        layout = make(layout_spec.spec.factory, layout_spec)
        bound = make_kernel(kernel, self.problem, layout)
        first = layout.pack(self.problem, self._canonical)
        copies = [first] + [{k: t.clone() for k, t in first.items()} for _ in range(copies_for(self.floor_bytes) - 1)]
        workspace_rule = None if kernel.spec.workspace is None else load_factory(kernel.spec.workspace, kernel)

        def measure(m: int) -> Measured:
            x, expected = self.inputs(m)
            out = torch.full((m, self.problem.n), POISON, device="cuda", dtype=x.dtype)
            scratch = None
            if workspace_rule is not None and (size := workspace_rule(self.problem, m)):
                scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")

            def call(weights: Tensors) -> Callable[[], object]:
                return lambda: bound(x, weights, out, workspace=scratch)

            bound.warm_up([m])
            calls = [call(weights) for weights in copies]
            calls[0]()
            error = relative_error(out, expected)
            timing = time_calls(calls, replays=self.replays)
            # Once more after thousands of replays: a workspace left dirty shows here and not in the first call.
            out.fill_(POISON)
            calls[-1]()
            return Measured(timing=timing, rel_err=max(error, relative_error(out, expected), key=_nan_last))

        try:
            yield measure
        finally:
            copies.clear()
            first.clear()
            gc.collect()
            torch.cuda.empty_cache()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    return float((out.float() - expected).norm() / expected.norm())


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value


def _random_canonical(catalog: Catalog, problem: LinearProblem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw packed bytes and positive scales; random bytes are random codes in every packed form."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in catalog.scheme(problem.scheme).spec.stored(zeros=problem.zeros):
        shape = (problem.n, spec.columns(problem.k, problem.group_size))
        if spec.dtype == "uint8":
            tensors[spec.name] = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8, generator=generator)
        elif spec.name == "zeros":
            tensors[spec.name] = (torch.rand(shape, device="cuda", generator=generator) * 8).half()
        else:
            dtype = getattr(torch, problem.act_dtype if spec.dtype == "act" else spec.dtype)
            tensors[spec.name] = (torch.rand(shape, device="cuda", generator=generator) * 0.01 + 0.002).to(dtype)
    return tensors


def peer_calls(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    """Bind a peer's copy to an input."""
    return lambda: call(x)


def time_peer(calls: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, replays: int) -> Timing:
    """Time a peer the same way as our own kernels."""
    return time_calls([peer_calls(call, x) for call in calls], replays=replays)
