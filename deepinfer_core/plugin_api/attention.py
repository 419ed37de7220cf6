"""Attention over a paged KV cache: the descriptor, the batch that it gets, and what it must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import field, frozen

from deepinfer_core.plugin_api.values import CapabilityRange, Device, Stability

if TYPE_CHECKING:
    import torch

AttentionFeature = Literal["mixed_batch", "sliding_window"]


@frozen(kw_only=True)
class AttentionProblem:
    """What a model asks of an attention backend.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads; query head h reads kv head ``h // (heads // kv_heads)``.
        head_dim: Width of one head.
        scale: Softmax scale, usually ``head_dim ** -0.5``.
        sliding_windows: One entry per layer: tokens a query may look back over, itself included; None for all.
        page_size: Tokens of one KV page.
        act_dtype: Dtype of q, k, v and out.
        kv_dtype: Dtype of the stored keys and values: an act dtype, or ``"int8"``.
        device: ``"cuda"`` or ``"cpu"``.
        capability: CUDA compute capability, None on a CPU.
        max_batched_tokens: Most tokens of one step.
        max_requests: Most requests of one step.
        max_model_len: Longest context of one request, in tokens.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    sliding_windows: tuple[int | None, ...]
    page_size: int
    act_dtype: str
    kv_dtype: str
    device: Device
    capability: tuple[int, int] | None = None
    max_batched_tokens: int = 2048
    max_requests: int = 64
    max_model_len: int = 4096

    @property
    def features(self) -> tuple[AttentionFeature, ...]:
        """Features that a backend must have for this model."""
        return ("sliding_window",) if any(w is not None for w in self.sliding_windows) else ()


@frozen(kw_only=True)
class AttentionBatch:
    """The requests of one step, tokens flattened request after request.

    Attributes:
        query_lens: New tokens of each request, on the host.
        kv_lens: Context of each request after this step's tokens, on the host.
        page_table: int32 ``[requests, pages]`` on the device; row r lists the pages of request r in order.
        page_ids: The same on the host, one tuple a request, without padding.
        positions: int64 ``[tokens]`` on the device: position of each token in its request.
        slots: int64 ``[tokens]`` on the device: ``page * page_size + offset`` where each token's KV goes.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table: torch.Tensor = field(eq=False)
    page_ids: tuple[tuple[int, ...], ...]
    positions: torch.Tensor = field(eq=False)
    slots: torch.Tensor = field(eq=False)


class AttentionBackend(Protocol):
    """Owns the arrangement of the KV cache (INT8 scales too) and computes attention over it.

    Made once a model from an `AttentionProblem`; one object serves every layer.
    """

    def kv_tensors(self, pages: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype name) of one layer's cache tensors for this many pages; pages come first.

        Core allocates them (its byte budget rests on these shapes), zeroes them and passes them back as `kv`.
        """
        ...

    def plan_step(self, batch: AttentionBatch) -> Any:
        """Do once a step what does not depend on the layer; the result is passed to `write_kv` and `run`."""
        ...

    def write_kv(self, layer: int, kv: Mapping[str, torch.Tensor], k: torch.Tensor, v: torch.Tensor, meta: Any) -> None:
        """Store the new tokens' ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` at their slots."""
        ...

    def run(self, layer: int, q: torch.Tensor, kv: Mapping[str, torch.Tensor], meta: Any, out: torch.Tensor) -> None:
        """Write ``out`` ``[tokens, heads, head_dim]``: causal attention of q over each request's own context."""
        ...

    def copy_page(self, kv: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one page of one layer's cache."""
        ...

    def workspace_bytes(self) -> int:
        """Return the scratch bytes that the largest step needs; 0 for none."""
        ...

    def warm_up(self, query_lens: Sequence[int]) -> None:
        """Compile everything that these query lengths will need."""
        ...


@frozen(kw_only=True)
class AttentionBackendSpec:
    """An attention backend by name.

    Attributes:
        name: What ``[attention] backend`` selects.
        devices: Where it runs.
        capability: Cards it runs on; None for any.
        act_dtypes: Dtypes of q, k, v.
        kv_dtypes: Dtypes of the cache; ``"int8"`` where it quantizes.
        page_sizes: Page sizes it serves; empty for any.
        head_dims: Head widths it serves; empty for any.
        features: What it can do beyond causal attention of one request.
        graph_safe: May be captured in a CUDA graph.
        priority: Higher wins under ``"auto"``.
        stability: ``"experimental"`` runs only when the config names it.
        factory: ``"module:attribute"`` called with an `AttentionProblem`; returns an `AttentionBackend`.
    """

    name: str
    devices: tuple[Device, ...]
    factory: str
    capability: CapabilityRange | None = None
    act_dtypes: tuple[str, ...] = ("float16",)
    kv_dtypes: tuple[str, ...] = ("float16",)
    page_sizes: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    features: tuple[AttentionFeature, ...] = ()
    graph_safe: bool = False
    priority: int = 0
    stability: Stability = "stable"
