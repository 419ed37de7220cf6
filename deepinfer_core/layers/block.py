"""One decoder layer: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from deepinfer_core.layers.attention import Attention
from deepinfer_core.layers.mlp import GatedMLP
from deepinfer_core.layers.norm import RMSNorm


@frozen(kw_only=True, eq=False)
class DecoderLayer:
    """The parts of one layer, in the order in which they run."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv: Mapping[str, torch.Tensor],
        meta: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream ``[tokens, hidden]`` after this layer, and what is still to be added to it.

        On a card each addition is left to the norm that comes next, which does both in one launch; the last one is the
        caller's. On a CPU the projections add to the (wider) stream themselves and nothing is left.

        Args:
            x: The residual stream; may be changed in place on a card.
            delta: What the layer before left to be added, or None.
            cos_sin: As `Attention`'s, like the others.
            kv: The layer's cache tensors.
            meta: What the backend planned for this step.
        """
        if x.device.type == "cpu":
            x = self.attention(self.attention_norm.after_add(x, delta), x, cos_sin, kv, meta)
            return self.mlp(self.mlp_norm(x), x), None
        delta = self.attention(self.attention_norm.after_add(x, delta), None, cos_sin, kv, meta)
        return x, self.mlp(self.mlp_norm.after_add(x, delta))
