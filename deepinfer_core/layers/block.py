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
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv: Mapping[str, torch.Tensor],
        meta: Any,
    ) -> torch.Tensor:
        """Return the residual stream ``[tokens, hidden]`` after this layer; arguments as `Attention`'s."""
        x = self.attention(self.attention_norm(x), x, cos_sin, kv, meta)
        return self.mlp(self.mlp_norm(x), x)
