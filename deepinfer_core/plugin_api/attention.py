"""Attention over a paged KV cache: the descriptor, the batch that it gets, and what it must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import Factory, field, frozen

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
        batch_invariant: What a request gets must not depend on what else is in the batch: a context is always cut
            at the same places.
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
    batch_invariant: bool = False

    @property
    def features(self) -> tuple[AttentionFeature, ...]:
        """Features that a backend must have for this model."""
        return ("sliding_window",) if any(w is not None for w in self.sliding_windows) else ()


def _int32_on_device(values: tuple[int, ...], near: torch.Tensor) -> torch.Tensor:
    import torch  # this module is imported without it

    return torch.tensor(values, dtype=torch.int32).to(near.device)


def _lens(batch: AttentionBatch) -> torch.Tensor:
    return _int32_on_device(batch.kv_lens, batch.positions)


def _query_starts(batch: AttentionBatch) -> torch.Tensor:
    return _int32_on_device((0, *accumulate(batch.query_lens)), batch.positions)


@frozen(kw_only=True)
class AttentionBatch:
    """The requests of one step, tokens flattened request after request.

    The tuples on the host are what an eager step is built from. A captured graph reads the tensors alone: for the same
    number of requests, number of tokens, width of the page table and ``max_kv_len``, a backend that is ``graph_safe``
    launches the same grids on the same addresses, so a graph may be replayed after its tensors got new values. Then
    ``query_lens`` and ``kv_lens`` are those of the capture, with one exception to what may change: a step with as many
    tokens as requests has one token of each, at capture and at every replay.

    A padded row has a slot of -1 and, as a request of its own, a length of 0 with one token: nothing is written for
    it, and its output is zeros.

    Attributes:
        query_lens: New tokens of each request, on the host.
        kv_lens: Context of each request after this step's tokens, on the host.
        page_table: int32 ``[requests, pages]`` on the device; row r lists the pages of request r in order.
        page_ids: The same on the host, one tuple a request, without padding.
        positions: int64 ``[tokens]`` on the device: position of each token in its request.
        slots: int64 ``[tokens]`` on the device: ``page * page_size + offset`` where each token's KV goes; -1: nowhere.
        lens: int32 ``[requests]`` on the device: ``kv_lens``; made from it when left out.
        query_starts: int32 ``[requests + 1]`` on the device: first token of each request, and their number; made from
            ``query_lens`` when left out.
        max_kv_len: No length in ``lens`` is beyond it, at this step and at every replay; the longest of ``kv_lens``
            when left out.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table: torch.Tensor = field(eq=False)
    page_ids: tuple[tuple[int, ...], ...]
    positions: torch.Tensor = field(eq=False)
    slots: torch.Tensor = field(eq=False)
    lens: torch.Tensor = field(eq=False, default=Factory(_lens, takes_self=True))
    query_starts: torch.Tensor = field(eq=False, default=Factory(_query_starts, takes_self=True))
    max_kv_len: int = Factory(lambda batch: max(batch.kv_lens, default=0), takes_self=True)


@frozen(kw_only=True)
class HeadNorm:
    """Root-mean-square norm of each query and key head.

    Attributes:
        weight: ``[heads + kv_heads, head_dim]`` in the activations' dtype.
        eps: Added to the mean square.
    """

    weight: torch.Tensor = field(eq=False)
    eps: float


class AttentionBackend(Protocol):
    """Owns the arrangement of the KV cache (INT8 scales too) and computes attention over it.

    Made once a model from an `AttentionProblem`; one object serves every layer. A backend that can rotate while it
    writes is a `RotatingBackend` too.
    """

    def kv_tensors(self, pages: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype name) of one layer's cache tensors for this many pages; pages come first.

        Core allocates them (its byte budget rests on these shapes), zeroes them and passes them back as `kv`.
        """
        ...

    def plan_step(self, batch: AttentionBatch) -> Any:
        """Do once a step what does not depend on the layer; the result is passed to `write_kv` and `run`.

        On a card a ``graph_safe`` backend neither waits for the device nor copies to it here.
        """
        ...

    def write_kv(self, layer: int, kv: Mapping[str, torch.Tensor], k: torch.Tensor, v: torch.Tensor, meta: Any) -> None:
        """Store the new tokens' ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` at their slots.

        Core calls it, with rotated keys, for backends that are no `RotatingBackend`.
        """
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


@runtime_checkable
class RotatingBackend(Protocol):
    """What an `AttentionBackend` has besides when one launch can norm, rotate and store.

    Core then hands it q, k and v as the projection left them and calls neither its own rotation nor `write_kv`.
    """

    def rotate_and_write(
        self,
        layer: int,
        kv: Mapping[str, torch.Tensor],
        qkv: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        meta: Any,
        norm: HeadNorm | None = None,
    ) -> None:
        """Norm and rotate queries in place; norm, rotate and store keys; store values.

        Args:
            layer: Index of the layer.
            kv: The layer's cache tensors.
            qkv: ``[tokens, heads + 2 * kv_heads, head_dim]``: queries, keys, values. Afterwards its queries are what
                `run` takes, its keys and values are undefined.
            cos_sin: Cosine and sine of the tokens' positions, each ``[tokens, 1, head_dim]``: the second half of a
                head repeats the first, with the sine's sign turned in the first half.
            meta: What `plan_step` returned.
            norm: Norm of queries and keys before the rotation, or None.
        """
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
        graph_safe: May be captured in a CUDA graph; see `AttentionBatch` for what that asks of it.
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
