"""The gated MLP of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)

from deepinfer_core.kernels.nvrtc import available
from deepinfer_core.kernels.silu_mul import silu_mul
from deepinfer_core.layers.linear import Linear


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``, and a residual where one is given."""

    def __init__(self, gate_up: Sequence[Linear], down: Linear, *, width: int) -> None:
        """Hold the parts.

        Args:
            gate_up: One merged projection, or gate and up where they are stored in different forms.
            down: Output projection.
            width: Output features of gate, and of up.
        """
        self._gate_up = tuple(gate_up)
        self._down = down
        self._width = width

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[tokens, hidden]`` for normed hidden states and a residual to add, both ``[tokens, hidden]``."""
        if len(self._gate_up) == 1:
            both = self._gate_up[0](x)
            gate, up = both[:, : self._width], both[:, self._width :]
        else:
            gate, up = (linear(x) for linear in self._gate_up)
        if gate.is_cuda and gate.dtype in (torch.float16, torch.bfloat16) and available():
            return self._down(silu_mul(gate, up), residual)
        return self._down(F.silu(gate).mul_(up), residual)
