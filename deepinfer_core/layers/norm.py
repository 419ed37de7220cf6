"""Root-mean-square norm, accumulated in float32 whatever the activations are."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own documentation uses)

from deepinfer_core.kernels.fused_norm import rms_norm
from deepinfer_core.kernels.nvrtc import available
from deepinfer_core.plugin_api import HeadNorm


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    The weight may have leading dimensions, so that one call norms queries and keys with a weight per head.
    """

    def __init__(self, weight: torch.Tensor, eps: float, *, device: torch.device | str, dtype: torch.dtype) -> None:
        """Keep the weight where and as it is used.

        Args:
            weight: ``[..., width]``.
            eps: Added to the mean square.
            device: Where the activations live.
            dtype: Their dtype.
        """
        self._width = weight.shape[-1]
        self._eps = eps
        self._dtype = dtype
        self._on_cpu = torch.device(device).type == "cpu"
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(width * eps)) / sqrt(width): the CPU form keeps both constants.
        self._floor = torch.tensor(math.sqrt(self._width * eps), dtype=torch.float32, device=device)
        if self._on_cpu:
            self._weight = weight.to(device=device, dtype=torch.float32) * math.sqrt(self._width)
        else:
            self._weight = weight.to(device=device, dtype=dtype)
        self._one_launch = (
            not self._on_cpu and weight.dim() == 1 and dtype in (torch.float16, torch.bfloat16) and available()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._weight.nbytes

    @property
    def per_head(self) -> HeadNorm:
        """What a backend needs that norms queries and keys itself; on a card only."""
        assert not self._on_cpu, "the weight on a CPU carries a factor"
        return HeadNorm(weight=self._weight, eps=self._eps)

    def after_add(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add ``delta`` to x in place and return the norm of the sum; one launch on a card.

        Args:
            x: ``[rows, width]``, the residual stream.
            delta: The same shape and dtype, or None.
        """
        if delta is not None and not (self._one_launch and x.dtype == self._dtype):
            return self(x.add_(delta))
        return self(x) if delta is None else rms_norm(x, self._weight, self._eps, delta)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``[..., width]`` in the same dtype; rows may be strided."""
        if self._on_cpu:
            # Four small operations where F.rms_norm takes eight. The length is taken without a square that could
            # overflow float16, the product in float32 and rounded once.
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            return torch.div(x, torch.hypot(length, self._floor)).mul_(self._weight).to(self._dtype)
        if self._one_launch and x.dim() == 2:
            return rms_norm(x, self._weight, self._eps)
        if self._weight.dim() == 1:
            return F.rms_norm(x, (self._width,), self._weight, self._eps)
        return F.rms_norm(x, (self._width,), None, self._eps).mul_(self._weight)
