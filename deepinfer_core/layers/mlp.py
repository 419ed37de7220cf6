"""The gated MLP of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)

from deepinfer_core.layers.linear import Linear


class GatedMLP:
    """``residual + down(silu(gate(x)) * up(x))``."""

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

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, hidden]`` for normed hidden states and the residual, both ``[tokens, hidden]``."""
        if len(self._gate_up) == 1:
            both = self._gate_up[0](x)
            gate, up = both[:, : self._width], both[:, self._width :]
        else:
            gate, up = (linear(x) for linear in self._gate_up)
        return self._down(F.silu(gate).mul_(up), residual)
