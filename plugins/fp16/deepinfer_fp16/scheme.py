"""Scheme `fp16`: a dense weight in whatever floating dtype the checkpoint holds."""

from __future__ import annotations

import torch

from deepinfer_core.errors import ConfigError
from deepinfer_core.plugin_api import QuantMethod, Tensors


class Dense:
    """One tensor ``weight`` ``[N, K]``, float16, bfloat16 or float32; nothing is quantized."""

    def quantize(
        self, weight: torch.Tensor, *, group_size: int, zeros: bool, method: QuantMethod = "search"
    ) -> dict[str, torch.Tensor]:
        """Return the weight as it is.

        Raises:
            ConfigError: Groups or zeros were asked for.
        """
        if group_size != 0 or zeros:
            raise ConfigError(f"fp16 has neither groups nor zeros; group_size={group_size} zeros={zeros} was asked")
        return {"weight": weight}

    def pack(self, codes: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        """Return the values: they are their own codes."""
        return codes

    def unpack(self, packed: torch.Tensor, k: int, *, zeros: bool) -> torch.Tensor:
        """Return the values: they are their own codes."""
        return packed

    def dequantize(
        self, tensors: Tensors, *, k: int, group_size: int = 0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return ``[N, K]`` in ``dtype`` (float32 when None)."""
        return tensors["weight"].to(torch.float32 if dtype is None else dtype)

    def slice_n(self, tensors: Tensors, n0: int, n1: int) -> dict[str, torch.Tensor]:
        """Return rows ``n0:n1``."""
        return {"weight": tensors["weight"][n0:n1]}

    def slice_k(self, tensors: Tensors, k0: int, k1: int, *, k: int, group_size: int = 0) -> dict[str, torch.Tensor]:
        """Return columns ``k0:k1``; there are no groups, so every edge will do."""
        if not 0 <= k0 < k1 <= k:
            raise ValueError(f"columns {k0}:{k1} are not a part of 0:{k}")
        return {"weight": tensors["weight"][:, k0:k1]}
