"""The attention block of one layer: projections, head norms and rotation around a registered backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer_core.layers.linear import Linear
from deepinfer_core.layers.norm import RMSNorm
from deepinfer_core.layers.rotary import Rotary
from deepinfer_core.plugin_api import AttentionBackend, HeadNorm, RotatingBackend


class Attention:
    """q, k and v stay in one buffer ``[tokens, heads + 2 * kv_heads, head_dim]``: each small step is one call."""

    def __init__(
        self,
        layer: int,
        *,
        qkv: Sequence[Linear],
        o: Linear,
        qk_norm: RMSNorm | None,
        rotary: Rotary,
        backend: AttentionBackend,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        """Hold the parts.

        Args:
            layer: Index of the layer, which the backend is told.
            qkv: One merged projection, or q, k and v where they are stored in different forms.
            o: Output projection.
            qk_norm: Norm with a weight ``[heads + kv_heads, head_dim]``, or None.
            rotary: Rotation of queries and keys.
            backend: Owner of the KV cache's arrangement.
            heads: Query heads.
            kv_heads: Key and value heads.
            head_dim: Width of one head.
        """
        self._layer = layer
        self._qkv = tuple(qkv)
        self._o = o
        self._qk_norm = qk_norm
        self._rotary = rotary
        self._backend = backend
        self._rotating = backend if isinstance(backend, RotatingBackend) else None
        self._head_norm: HeadNorm | None = None
        if self._rotating is not None and qk_norm is not None:
            self._head_norm = qk_norm.per_head
        self._heads = heads
        self._rotated = heads + kv_heads
        self._shape = (-1, heads + 2 * kv_heads, head_dim)
        self._q_size = heads * head_dim

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv: Mapping[str, torch.Tensor],
        meta: Any,
    ) -> torch.Tensor:
        """Return ``o(attention(x))`` ``[tokens, hidden]``, plus a residual, and store the new keys and values.

        Args:
            x: Normed hidden states ``[tokens, hidden]``.
            residual: ``[tokens, hidden]`` to add, or None.
            cos_sin: What `Rotary.at` gave for the tokens' positions.
            kv: The layer's cache tensors.
            meta: What the backend planned for this step.
        """
        qkv = self._qkv[0](x) if len(self._qkv) == 1 else torch.cat([linear(x) for linear in self._qkv], dim=1)
        heads = qkv.view(self._shape)
        if self._rotating is not None:
            self._rotating.rotate_and_write(self._layer, kv, heads, cos_sin, meta, self._head_norm)
            q = heads[:, : self._heads]
        else:
            rotated = heads[:, : self._rotated]
            if self._qk_norm is not None:
                rotated = self._qk_norm(rotated)
            self._rotary.rotate_(rotated, cos_sin)
            q, k = rotated[:, : self._heads], rotated[:, self._heads :]
            self._backend.write_kv(self._layer, kv, k, heads[:, self._rotated :], meta)
        out = x.new_empty(q.shape)
        self._backend.run(self._layer, q, kv, meta, out)
        return self._o(out.view(-1, self._q_size), residual)
