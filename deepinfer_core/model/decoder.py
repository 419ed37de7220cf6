"""The decoder of every supported family: a flattened batch of tokens in, logits of the wanted rows out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from attrs import field, frozen

from deepinfer_core.layers.block import DecoderLayer
from deepinfer_core.layers.embedding import Embedding
from deepinfer_core.layers.linear import Linear
from deepinfer_core.layers.norm import RMSNorm
from deepinfer_core.layers.rotary import Rotary
from deepinfer_core.model.loading import Loader
from deepinfer_core.model.shapes import LinearSlot
from deepinfer_core.model.source import WeightSource
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import AttentionBackend, AttentionBatch, LinearProblem
from deepinfer_core.registry.select import Selection


@frozen(kw_only=True, eq=False)
class Decoder:
    """A loaded model without state of its own: requests live in the KV cache and in the engine.

    Attributes:
        spec: What it was built from.
        device: Where it lives.
        dtype: Dtype of its activations.
        embedding: Token embedding; a tied dense head shares its storage.
        layers: Decoder layers.
        norm: Final norm.
        head: Projection to the vocabulary.
        rotary: Table of positions; its length is the longest admitted context.
        attention: The backend that owns the KV cache's arrangement.
        linears: Slot name -> (what it is, the layer), in the order in which they run.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Linear
    rotary: Rotary
    attention: AttentionBackend
    linears: Mapping[str, tuple[LinearSlot, Linear]] = field(repr=False)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        checkpoint: WeightSource,
        *,
        select: Callable[[LinearProblem], Selection],
        attention: AttentionBackend,
        device: torch.device | str,
        dtype: torch.dtype,
        m_max: int,
        max_len: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """Load weights layer by layer, each moved to the device and packed before the next is read.

        Args:
            spec: The model.
            checkpoint: Where the weights are.
            select: Chooses layout and kernels of a problem; asked once per distinct problem.
            attention: Made for this model.
            device: Where to load to.
            dtype: Dtype of the activations and of dense weights.
            m_max: Most tokens of one step.
            max_len: Longest context to admit; the model's own limit when None.
            progress: Called with (layers loaded, layers in all), embedding and head counted as one each.

        Raises:
            CheckpointError: A tensor is missing or has another shape than the config says.
            ModelError: ``max_len`` is beyond the model's limit, or a weight does not fit the dtype.
            SelectionError: No kernel serves a layer.
        """
        loader = Loader(
            spec, checkpoint, select=select, device=torch.device(device), dtype=dtype, m_max=m_max, progress=progress
        )
        rotary = loader.rotary(max_len)
        embedding = loader.embedding()
        return cls(
            spec=spec,
            device=torch.device(device),
            dtype=dtype,
            embedding=embedding,
            layers=tuple([loader.layer(index, rotary, attention) for index in range(spec.layers)]),
            norm=loader.final_norm(),
            head=loader.head(embedding),
            rotary=rotary,
            attention=attention,
            linears=loader.linears,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[Mapping[str, torch.Tensor]],
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute one step of any mix of prefill chunks and decodes.

        Args:
            tokens: int64 ``[T]``, request after request, on the device.
            batch: Where each token stands, and the pages of each request.
            kv: Cache tensors of each layer.
            logit_rows: int64 ``[R]`` rows of ``tokens`` whose logits are wanted, on the device; None for all.

        Returns:
            float32 ``[R, vocab]``, an inference tensor: in-place changes need ``torch.inference_mode`` too.

        Raises:
            CapacityError: A context is longer than the positions that the model was loaded for.
            KernelError: More tokens than ``m_max``.
        """
        cos_sin = self.rotary.at(batch.positions, max(batch.kv_lens, default=0))
        meta = self.attention.plan_step(batch)
        x = self.embedding(tokens)
        if self.device.type == "cpu":
            # 16-bit activations, but a float32 residual stream and float32 logits: for SmolLM2 in W4 the likeliest
            # token is that of a float32 run at 98.8 % of 1,536 positions; with both in BF16 at 96.8 % (2026-11-30).
            x = x.float()
        delta = None
        for layer, cache in zip(self.layers, kv, strict=True):
            x, delta = layer(x, delta, cos_sin, cache, meta)
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
            delta = None if delta is None else delta.index_select(0, logit_rows)
        return self.head(self.norm.after_add(x, delta), float32_out=True).float()

    def warm_up(self, ms: Iterable[int], query_lens: Sequence[int] = (1,)) -> None:
        """Let kernels compile what steps of these token counts and query lengths will need.

        Args:
            ms: Tokens of a step; the head runs fewer rows, so 1 should be among them.
            query_lens: New tokens of a single request.
        """
        wanted = sorted(set(ms))
        for kernels in {id(linear.kernels): linear.kernels for _, linear in self.linears.values()}.values():
            kernels.warm_up(wanted)
        self.attention.warm_up(query_lens)

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights; storage that a tied head shares counts once."""
        tensors = [self.embedding.weight]
        for _, linear in self.linears.values():
            tensors += [*linear.weights.values(), *([] if linear.bias is None else [linear.bias])]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        norms = self.norm.nbytes + sum(layer.attention_norm.nbytes + layer.mlp_norm.nbytes for layer in self.layers)
        return sum(storages.values()) + norms + self.rotary.nbytes
