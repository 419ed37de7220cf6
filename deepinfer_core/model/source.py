"""What the decoder asks of a checkpoint, as protocols, so that model and checkpoint stay side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class WeightFormat(Protocol):
    """How one linear layer is stored."""

    @property
    def scheme(self) -> str:
        """Scheme name; ``"fp16"`` for dense weights of any float dtype."""
        ...

    @property
    def group_size(self) -> int:
        """Codes that share a scale; -1 for the whole row, 0 for dense."""
        ...

    @property
    def zeros(self) -> bool:
        """A zero is stored per group."""
        ...


class WeightSource(Protocol):
    """A checkpoint, one tensor in memory at a time."""

    def has(self, name: str) -> bool:
        """True when a tensor of this logical HF name is stored."""
        ...

    def layer_format(self, module: str) -> WeightFormat:
        """Return the stored form of a linear module, such as ``"model.layers.0.mlp.up_proj"``."""
        ...

    def layer_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        """Return a linear module's canonical tensors: ``weight`` when dense, else those of its scheme."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a dense tensor: a norm, an embedding or a bias."""
        ...
