"""Token embedding: a look-up in the dense table that a tied head shares."""

from __future__ import annotations

import torch


class Embedding:
    """Rows of ``[vocab, hidden]``."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Keep the table by reference; it is already on its device and in the activations' dtype."""
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.weight.nbytes

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a fresh ``[tokens, hidden]`` for int64 ``[tokens]``."""
        return self.weight.index_select(0, tokens)
