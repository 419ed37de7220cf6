"""Builds a decoder from a checkpoint: one layer at a time, each tensor checked, cast, moved and packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from deepinfer_core.errors import CheckpointError, ModelError
from deepinfer_core.kernels.workspace import Workspaces
from deepinfer_core.layers.attention import Attention
from deepinfer_core.layers.block import DecoderLayer
from deepinfer_core.layers.embedding import Embedding
from deepinfer_core.layers.linear import BoundKernels, Linear
from deepinfer_core.layers.mlp import GatedMLP
from deepinfer_core.layers.norm import RMSNorm
from deepinfer_core.layers.rotary import Rotary
from deepinfer_core.model.shapes import EMBEDDING, FINAL_NORM, HEAD, LinearSlot, linear_slots
from deepinfer_core.model.source import WeightSource
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import AttentionBackend, Capability, LinearProblem
from deepinfer_core.registry.select import Selection

DENSE = "fp16"
HEAD_WEIGHT = f"{HEAD}.weight"


class Loader:
    """State of one loading.

    Attributes:
        linears: Slot name -> (what it is, the layer), filled as layers are built.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        select: Callable[[LinearProblem], Selection],
        device: torch.device,
        dtype: torch.dtype,
        m_max: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Take `Decoder.load`'s arguments."""
        self._spec = spec
        self._source = source
        self._select = select
        self._device = device
        self._dtype = dtype
        self._m_max = m_max
        self._progress = progress
        self._workspaces = Workspaces(device)
        self._bound: dict[LinearProblem, BoundKernels] = {}
        self._slots = {slot.name: slot for slot in linear_slots(spec, source.layer_format)}
        self._loaded = 0
        self.linears: dict[str, tuple[LinearSlot, Linear]] = {}

    def rotary(self, max_len: int | None) -> Rotary:
        """Return the table of positions for a context of ``max_len``, the model's own limit when None.

        Raises:
            ModelError: The model does not allow that length.
        """
        spec = self._spec
        length = spec.max_length if max_len is None else max_len
        if not 1 <= length <= spec.max_length:
            raise ModelError(
                f"a context of {length} tokens was asked for; this {spec.architecture} allows 1 to {spec.max_length}"
            )
        return Rotary(spec.rope, spec.head_dim, length, device=self._device, dtype=self._dtype)

    def layer(self, index: int, rotary: Rotary, backend: AttentionBackend) -> DecoderLayer:
        """Return one decoder layer."""
        spec, prefix = self._spec, f"model.layers.{index}."
        layer = DecoderLayer(
            attention_norm=self._norm(f"{prefix}input_layernorm.weight", spec.hidden_size),
            attention=Attention(
                index,
                qkv=self._merged(index, "qkv", ("q", "k", "v")),
                o=self._linear(f"layers.{index}.o"),
                qk_norm=self._qk_norm(f"{prefix}self_attn.") if spec.qk_norm else None,
                rotary=rotary,
                backend=backend,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
            ),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm.weight", spec.hidden_size),
            mlp=GatedMLP(
                self._merged(index, "gate_up", ("gate", "up")),
                self._linear(f"layers.{index}.down"),
                width=spec.intermediate_size,
            ),
        )
        self._report()
        return layer

    def embedding(self) -> Embedding:
        """Return the embedding; a tied pair may be stored under either name."""
        name = EMBEDDING
        if not self._source.has(name) and self._spec.tie_word_embeddings and self._source.has(HEAD_WEIGHT):
            name = HEAD_WEIGHT
        table = self._dense(name, (self._spec.vocab_size, self._spec.hidden_size))
        self._report()
        return Embedding(table)

    def final_norm(self) -> RMSNorm:
        """Return the norm before the head."""
        return self._norm(FINAL_NORM, self._spec.hidden_size)

    def head(self, embedding: Embedding) -> Linear:
        """Return the head: quantized when the checkpoint has it so, else the embedding itself when tied."""
        slot = self._slots[HEAD]
        dense = slot.format.scheme == DENSE
        if dense and self._spec.tie_word_embeddings:
            head = self._build(slot, {"weight": embedding.weight}, None)
        elif dense and not self._source.has(HEAD_WEIGHT):
            raise CheckpointError(
                f"the checkpoint has no {HEAD_WEIGHT}, and config.json does not tie the head to the embedding "
                "(tie_word_embeddings is false); the file is incomplete, or its config is another model's"
            )
        else:
            head = self._linear(HEAD)
        self._report()
        return head

    def _report(self) -> None:
        self._loaded += 1
        if self._progress is not None:
            self._progress(self._loaded, self._spec.layers + 2)

    def _merged(self, index: int, name: str, parts: tuple[str, ...]) -> tuple[Linear, ...]:
        if f"layers.{index}.{name}" in self._slots:
            return (self._linear(f"layers.{index}.{name}"),)
        return tuple(self._linear(f"layers.{index}.{part}") for part in parts)

    def _linear(self, name: str) -> Linear:
        slot = self._slots[name]
        stored = [self._source.layer_tensors(module) for module in slot.modules]
        for module, n, tensors in zip(slot.modules, slot.ns, stored, strict=True):
            self._check_rows(module, n, slot.k, tensors)
        joined = {
            key: torch.cat([part[key] for part in stored]) if len(stored) > 1 else stored[0][key] for key in stored[0]
        }
        if slot.format.scheme == DENSE:
            joined["weight"] = self._cast(" + ".join(slot.modules), joined["weight"])
        bias = None
        if slot.bias:
            each = zip(slot.modules, slot.ns, strict=True)
            bias = torch.cat([self._dense(f"{module}.bias", (n,)) for module, n in each])
        return self._build(slot, joined, bias)

    def _build(self, slot: LinearSlot, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> Linear:
        problem = slot.problem(
            m_max=self._m_max,
            device="cuda" if self._device.type == "cuda" else "cpu",
            capability=_capability(self._device),
            act_dtype=str(self._dtype).removeprefix("torch."),
        )
        if problem not in self._bound:
            self._bound[problem] = BoundKernels(self._select(problem), device=self._device, workspaces=self._workspaces)
        kernels = self._bound[problem]
        linear = Linear.build(kernels.selection, tensors, bias, device=self._device, kernels=kernels)
        self.linears[slot.name] = slot, linear
        return linear

    def _norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self._stored(name, (width,)), self._spec.rms_eps, device=self._device, dtype=self._dtype)

    def _qk_norm(self, prefix: str) -> RMSNorm:
        """Return one norm over queries and keys together, its weight repeated per head."""
        spec = self._spec
        q = self._stored(f"{prefix}q_norm.weight", (spec.head_dim,)).expand(spec.heads, -1)
        k = self._stored(f"{prefix}k_norm.weight", (spec.head_dim,)).expand(spec.kv_heads, -1)
        return RMSNorm(torch.cat((q, k)), spec.rms_eps, device=self._device, dtype=self._dtype)

    def _dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._cast(name, self._stored(name, shape))

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}; config.json makes it {shape}")
        return tensor

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.to(device=self._device, dtype=self._dtype)
        if self._dtype == torch.float16 and tensor.dtype != torch.float16 and not torch.isfinite(cast).all():
            raise ModelError(f"{name} holds values beyond float16's 65,504; load the model with --dtype bfloat16")
        return cast

    @staticmethod
    def _check_rows(module: str, n: int, k: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            expected = (n, k) if name == "weight" else (n, *tensor.shape[1:])
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{module}.{name} has shape {tuple(tensor.shape)}; config.json makes the layer [{n}, {k}]"
                )


def _capability(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
