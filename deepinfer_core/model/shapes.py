"""Every tensor and every linear problem that follows from a spec and the stored formats; no torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import frozen

from deepinfer_core.model.source import WeightFormat
from deepinfer_core.model.spec import ModelSpec
from deepinfer_core.plugin_api import AttentionProblem, Capability, Device, LinearProblem

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"


@frozen(kw_only=True)
class LinearModule:
    """One linear module of the HF model.

    Attributes:
        name: Such as ``"model.layers.0.self_attn.q_proj"``.
        n: Output features.
        k: Input features.
        bias: A ``<name>.bias`` of n belongs to it.
    """

    name: str
    n: int
    k: int
    bias: bool


@frozen(kw_only=True)
class LinearSlot:
    """One linear layer as it is run: a single module, or several merged along their outputs.

    Attributes:
        name: Such as ``"layers.0.qkv"``; stays the same for every checkpoint that merges the same way.
        modules: HF modules, in the order of their outputs.
        ns: Output features of each.
        k: Input features.
        bias: Every module has a bias.
        format: The stored form that all of them share.
    """

    name: str
    modules: tuple[str, ...]
    ns: tuple[int, ...]
    k: int
    bias: bool
    format: WeightFormat

    def problem(
        self, *, m_max: int, device: Device, capability: Capability | None = None, act_dtype: str
    ) -> LinearProblem:
        """Return what this layer asks of a kernel.

        Args:
            m_max: Most rows of one step.
            device: Where it runs.
            capability: The card's compute capability; None on a CPU.
            act_dtype: Dtype of the activations.
        """
        return LinearProblem(
            n=sum(self.ns),
            k=self.k,
            m_max=m_max,
            device=device,
            capability=capability,
            act_dtype=act_dtype,
            scheme=self.format.scheme,
            group_size=self.format.group_size,
            zeros=self.format.zeros,
            bias=self.bias,
            parts=self.ns if len(self.ns) > 1 else (),
        )


def linear_modules(spec: ModelSpec) -> tuple[LinearModule, ...]:
    """Return every linear module, layer after layer, the head last."""
    return (*(m for layer in range(spec.layers) for _, group in _layer_groups(spec, layer) for m in group), _head(spec))


def dense_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of everything that is no linear weight: embedding, norms, biases.

    The embedding is listed for tied models too; `Decoder.load` also takes a tied pair that is stored under the head's
    name alone.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (spec.hidden_size,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (spec.hidden_size,)
        if spec.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes[FINAL_NORM] = (spec.hidden_size,)
    shapes |= {f"{module.name}.bias": (module.n,) for module in linear_modules(spec) if module.bias}
    return shapes


def required_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all that the model needs, as of a dense checkpoint: what a checkpoint is verified by."""
    return dense_tensors(spec) | {f"{module.name}.weight": (module.n, module.k) for module in linear_modules(spec)}


def linear_slots(spec: ModelSpec, formats: Callable[[str], WeightFormat]) -> tuple[LinearSlot, ...]:
    """Return the linear layers as they are run, layer after layer, the head last.

    q, k and v become one slot, gate and up another, where all parts are stored in the same form; parts that differ
    (a recipe, or a GGUF that mixes types) stay apart.

    Args:
        spec: The model.
        formats: Stored form of a module by its HF name.
    """
    slots = [slot for layer in range(spec.layers) for slot in _layer_slots(spec, layer, formats)]
    head = _head(spec)
    return (*slots, _slot(HEAD, (head,), formats(head.name)))


def attention_problem(
    spec: ModelSpec,
    *,
    page_size: int,
    act_dtype: str,
    kv_dtype: str,
    device: Device,
    capability: Capability | None = None,
    max_batched_tokens: int,
    max_requests: int,
    max_model_len: int,
) -> AttentionProblem:
    """Return what the model asks of an attention backend; the arguments are `AttentionProblem`'s fields."""
    return AttentionProblem(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        sliding_windows=spec.sliding_windows,
        page_size=page_size,
        act_dtype=act_dtype,
        kv_dtype=kv_dtype,
        device=device,
        capability=capability,
        max_batched_tokens=max_batched_tokens,
        max_requests=max_requests,
        max_model_len=max_model_len,
    )


def _layer_groups(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[LinearModule, ...]]]:
    """Yield (slot name, modules that may merge) in the order in which the layer runs them."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    hidden, wide = spec.hidden_size, spec.intermediate_size

    def module(name: str, n: int, k: int, bias: bool) -> LinearModule:
        return LinearModule(name=name, n=n, k=k, bias=bias)

    yield (
        "qkv",
        (
            module(f"{attention}.q_proj", spec.q_size, hidden, spec.qkv_bias),
            module(f"{attention}.k_proj", spec.kv_size, hidden, spec.qkv_bias),
            module(f"{attention}.v_proj", spec.kv_size, hidden, spec.qkv_bias),
        ),
    )
    yield "o", (module(f"{attention}.o_proj", hidden, spec.q_size, spec.o_bias),)
    yield (
        "gate_up",
        (
            module(f"{mlp}.gate_proj", wide, hidden, spec.mlp_bias),
            module(f"{mlp}.up_proj", wide, hidden, spec.mlp_bias),
        ),
    )
    yield "down", (module(f"{mlp}.down_proj", hidden, wide, spec.mlp_bias),)


def _layer_slots(spec: ModelSpec, layer: int, formats: Callable[[str], WeightFormat]) -> Iterator[LinearSlot]:
    for name, modules in _layer_groups(spec, layer):
        stored = [formats(module.name) for module in modules]
        if len({(form.scheme, form.group_size, form.zeros) for form in stored}) == 1:
            yield _slot(f"layers.{layer}.{name}", modules, stored[0])
        else:
            for module, form in zip(modules, stored, strict=True):
                short = module.name.rpartition(".")[2].removesuffix("_proj")
                yield _slot(f"layers.{layer}.{short}", (module,), form)


def _slot(name: str, modules: tuple[LinearModule, ...], form: WeightFormat) -> LinearSlot:
    return LinearSlot(
        name=name,
        modules=tuple(m.name for m in modules),
        ns=tuple(m.n for m in modules),
        k=modules[0].k,
        bias=modules[0].bias,
        format=form,
    )


def _head(spec: ModelSpec) -> LinearModule:
    return LinearModule(name=HEAD, n=spec.vocab_size, k=spec.hidden_size, bias=False)
