"""``torch.ops.deepinfer.linear``: a resident layer as a torch operator, so that compilers and exporters see one node.

The engine calls `Linear` directly; this is for code that traces a model (torch.compile, torch.export). The low-level
Library API costs about 3 us a call on a CPU where the ``custom_op`` decorator costs about 17.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch

from deepinfer_core.errors import KernelError
from deepinfer_core.layers.linear import Linear

_layers: weakref.WeakValueDictionary[int, Linear] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def as_operator(layer: Linear) -> LinearOperator:
    """Return a callable that runs a layer through the operator; it keeps the layer alive."""
    _library()
    return LinearOperator(layer)


class LinearOperator:
    """Calls ``torch.ops.deepinfer.linear`` for one layer."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer
        self.number = next(_numbers)
        self.n = layer.kernels.problem.n
        _layers[self.number] = layer

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[M, N]`` for x ``[M, K]``; see `Linear`."""
        out: torch.Tensor = torch.ops.deepinfer.linear(x, self.number, self.n, residual)
        return out


@functools.cache
def _library() -> torch.library.Library:
    """Define the operator once a process; torch drops it when the library object dies, so the cache holds it."""
    library = torch.library.Library("deepinfer", "FRAGMENT")
    library.define("linear(Tensor x, int layer, int n, Tensor? residual=None) -> Tensor")
    library.impl("linear", _run, "CPU")
    library.impl("linear", _run, "CUDA")
    torch.library.register_fake("deepinfer::linear", _shape, lib=library)
    return library


def _run(x: torch.Tensor, layer: int, n: int, residual: torch.Tensor | None = None) -> torch.Tensor:
    found = _layers.get(layer)
    if found is None:
        raise KernelError(f"layer {layer} of torch.ops.deepinfer.linear is gone; keep its LinearOperator alive")
    return found(x, residual)


def _shape(x: torch.Tensor, layer: int, n: int, residual: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], n), dtype=x.dtype if residual is None else residual.dtype)
