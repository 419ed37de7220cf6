"""Linear layers: weight schemes, resident layouts, kernels, recipes and the backend that bundles them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from attrs import evolve, field, frozen

from deepinfer_core.plugin_api.values import (
    DTYPES,
    WHOLE_ROW,
    Capability,
    CapabilityRange,
    Device,
    MRange,
    Stability,
)

if TYPE_CHECKING:
    import torch

Epilogue = Literal["none", "residual", "silu_mul"]
QuantMethod = Literal["rtn", "search"]
"""``rtn``: round to nearest with the group's own range. ``search``: least-squares search of the scale."""

Tensors = Mapping[str, "torch.Tensor"]


@frozen(kw_only=True)
class TensorSpec:
    """One canonical tensor of a scheme: ``[N, columns]``, where columns follow from K.

    Attributes:
        name: Suffix in the checkpoint: the tensor is stored as ``<layer>.<name>``.
        dtype: torch dtype name, or ``"act"`` for whatever floating dtype the checkpoint holds.
        per: Codes along K that ``elements`` entries stand for; ``"group"`` means one per group.
        elements: Entries per ``per`` codes. W3 packs 8 codes into 3 bytes: ``per=8, elements=3``.
        needs_zeros: The tensor exists only when the layer stores zeros.
    """

    name: str
    dtype: str
    per: int | Literal["group"] = 1
    elements: int = 1
    needs_zeros: bool = False

    def columns(self, k: int, group_size: int) -> int:
        """Return the number of columns for K inputs in groups of ``group_size`` (-1: the whole row)."""
        per = group_width(k, group_size) if self.per == "group" else self.per
        return self.elements * -(-k // per)


def group_width(k: int, group_size: int) -> int:
    """Return the codes in a full group: ``group_size``, or K when the group is the whole row."""
    return max(k, 1) if group_size == WHOLE_ROW else group_size


@frozen(kw_only=True)
class LinearProblem:
    """What one linear layer asks of a kernel; two layers with equal problems share one dispatch table.

    Attributes:
        n: Output features, all parts together.
        k: Input features.
        m_max: Largest number of rows that will be launched (the batched-token limit).
        device: ``"cuda"`` or ``"cpu"``.
        capability: CUDA compute capability, None on a CPU.
        act_dtype: Dtype of x and out, one of ``DTYPES``.
        scheme: Weight scheme name.
        group_size: Codes along K that share a scale; -1 for the whole row; 0 for schemes without groups.
        zeros: The layer stores a zero per group.
        bias: A bias of N follows.
        parts: Widths of the layers merged into this one along N (``(q, k, v)``); empty when it is a single layer.
        epilogue: What is fused behind the product.
    """

    n: int
    k: int
    m_max: int
    device: Device
    capability: Capability | None = None
    act_dtype: str = field(default="float16")
    scheme: str = field()
    group_size: int = 0
    zeros: bool = False
    bias: bool = False
    parts: tuple[int, ...] = ()
    epilogue: Epilogue = "none"

    @act_dtype.validator
    def _known_dtype(self, _: object, value: str) -> None:
        if value not in DTYPES:
            raise ValueError(f"act_dtype {value!r} is not one of {', '.join(DTYPES)}")

    def __attrs_post_init__(self) -> None:
        if self.n < 1 or self.k < 1 or self.m_max < 1:
            raise ValueError(f"a linear problem needs n, k, m_max >= 1, got {self.n}, {self.k}, {self.m_max}")
        if self.parts and sum(self.parts) != self.n:
            raise ValueError(f"parts {self.parts} do not add up to n = {self.n}")

    @property
    def groups(self) -> int:
        """Groups along K, the last one possibly short; 0 for schemes without groups."""
        return 0 if self.group_size == 0 else -(-self.k // group_width(self.k, self.group_size))

    @property
    def short_last_group(self) -> bool:
        """True when K is not a multiple of the group size."""
        return self.group_size > 0 and self.k % self.group_size != 0

    def with_shape(self, n: int, k: int) -> LinearProblem:
        """Return the same problem for another shape, unmerged."""
        return evolve(self, n=n, k=k, parts=())


class WeightScheme(Protocol):
    """How values become codes and codes become bytes in a checkpoint; plain torch, any device.

    Canonical tensors all have N first, so slicing and joining along N is the same for every scheme.
    """

    def quantize(
        self,
        weight: torch.Tensor,
        *,
        group_size: int,
        zeros: bool,
        method: QuantMethod = "search",
    ) -> dict[str, torch.Tensor]:
        """Quantize a floating ``[N, K]`` weight into canonical tensors; every stored scale is finite."""
        ...

    def pack(self, codes: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        """Pack integer codes ``[N, K]`` (signed without zeros, unsigned with) into the ``packed`` tensor."""
        ...

    def unpack(self, packed: torch.Tensor, k: int, *, zeros: bool) -> torch.Tensor:
        """Return int8 codes ``[N, K]``: signed without zeros, unsigned with."""
        ...

    def dequantize(
        self, tensors: Tensors, *, k: int, group_size: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return ``[N, K]`` values in ``dtype`` (float32 when None), computed in float32 and rounded once."""
        ...

    def slice_n(self, tensors: Tensors, n0: int, n1: int) -> dict[str, torch.Tensor]:
        """Return rows ``n0:n1`` of every tensor."""
        ...

    def slice_k(self, tensors: Tensors, k0: int, k1: int, *, k: int, group_size: int) -> dict[str, torch.Tensor]:
        """Return columns ``k0:k1``; both must lie on group edges (or at K).

        Raises:
            ValueError: An edge is inside a group.
        """
        ...


@frozen(kw_only=True)
class WeightSchemeSpec:
    """A weight format by name.

    Attributes:
        name: What ``quantization_config`` and recipes call it, such as ``"w4a16"``.
        bits: Bits of one code.
        tensors: Canonical tensors.
        group_sizes: Legal group sizes; empty for schemes without groups.
        zeros: Whether a layer may store zeros.
        factory: ``"module:attribute"`` called without arguments; returns a `WeightScheme`.
    """

    name: str
    bits: int
    tensors: tuple[TensorSpec, ...]
    factory: str
    group_sizes: tuple[int, ...] = ()
    zeros: bool = False

    def stored(self, *, zeros: bool) -> tuple[TensorSpec, ...]:
        """Return the tensors that a layer with or without zeros stores."""
        return tuple(t for t in self.tensors if zeros or not t.needs_zeros)


class WeightLayout(Protocol):
    """A resident form of one scheme's weights, shared by every kernel that names it."""

    def nbytes(self, problem: LinearProblem) -> int:
        """Return the device bytes that `pack` will hold, from the problem alone."""
        ...

    def pack(self, problem: LinearProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Turn canonical tensors, already on the target device, into resident ones."""
        ...

    def unpack(self, problem: LinearProblem, packed: Tensors) -> dict[str, torch.Tensor]:
        """Return the canonical tensors: the inverse of `pack`, bit for bit where the layout is lossless."""
        ...

    def concat_n(self, problems: Sequence[LinearProblem], packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join resident tensors of layers that share everything but N (merged qkv, gate_up)."""
        ...

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Write the values of output features ``n0:n1`` into ``out`` ``[n1 - n0, K]`` in out's dtype.

        Core makes a kernel for any M from this, so an author may ship one kernel alone without leaving a gap.
        """
        ...


@frozen(kw_only=True)
class WeightLayoutSpec:
    """A resident weight layout by name.

    Attributes:
        name: With a version, such as ``"w4a16.mma16.v1"``; its bytes are documented by its module.
        scheme: The scheme whose weights it holds.
        devices: Where it can live.
        lossless: `unpack` returns the canonical tensors bit for bit (False: a widened or rounded form).
        act_dtypes: Activation dtypes that it can serve; a layout that stores BF16 scales serves BF16 alone.
        factory: ``"module:attribute"`` called without arguments; returns a `WeightLayout`.
    """

    name: str
    scheme: str
    factory: str
    devices: tuple[Device, ...] = ("cuda",)
    act_dtypes: tuple[str, ...] = DTYPES
    lossless: bool = True


class LinearKernel(Protocol):
    """A kernel bound to one problem: ``out = x @ W.T (+ bias) (+ residual)``."""

    def warm_up(self, ms: Sequence[int]) -> None:
        """Compile and tune everything that these row counts will need; nothing is compiled later."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weights: Tensors,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Write ``out``.

        Args:
            x: ``[M, K]`` of the problem's act dtype; rows may be strided, columns are contiguous.
            weights: What the layout's `pack` returned.
            out: ``[M, N]`` of the act dtype (or float32, where the spec offers it), contiguous, poisoned or not.
            bias: ``[N]`` or None.
            residual: ``[M, N]`` added after the bias, or None.
            workspace: Bytes as the spec's workspace rule asked, or None. Zeroed once; then shared by all launches of
                this kernel on the same stream, so what it relies on (counters at zero) it must leave as it found it.

        On CUDA: launched on torch's current stream, no allocation, no synchronization.
        """
        ...


@frozen(kw_only=True)
class LinearKernelSpec:
    """A kernel by name, and where it fits.

    Attributes:
        name: ``"<scheme>.<what>"``, such as ``"w4a16.batch_tile_gemv"``.
        scheme: The scheme it serves.
        layout: The layout it reads.
        device: ``"cuda"`` or ``"cpu"``.
        m: Rows it serves.
        capability: Cards it runs on; None for any (and for CPUs).
        act_dtypes: Dtypes of x and out.
        group_sizes: Group sizes it serves; None for every one that the scheme has.
        zeros: Serves layers that store zeros.
        short_last_group: Serves K that is not a multiple of the group.
        n_multiple_of: N must be a multiple.
        k_multiple_of: K must be a multiple.
        epilogues: Fused forms it offers.
        priority: Higher wins when nothing was measured; the scale is -100 (last resort) to 100.
        stability: ``"experimental"`` runs only when the config names it or allows experimental kernels.
        graph_safe: May be captured in a CUDA graph.
        float32_out: Also takes a float32 ``out`` whatever the act dtype, so that logits are rounded nowhere.
        stream_safe: May run on two streams at once.
        deterministic: Same bits for the same input, run after run.
        workspace: ``"module:attribute"``: a function (problem, m) -> bytes; None for none.
        predicate: ``"module:attribute"``: a function (problem) -> reason or None, for what the fields cannot say.
            It must import without torch and CuPy.
        factory: ``"module:attribute"`` called with the problem; returns a `LinearKernel`.
    """

    name: str
    scheme: str
    layout: str
    device: Device
    factory: str
    m: MRange = MRange(1)
    capability: CapabilityRange | None = None
    act_dtypes: tuple[str, ...] = ("float16",)
    group_sizes: tuple[int, ...] | None = None
    zeros: bool = True
    short_last_group: bool = True
    n_multiple_of: int = 1
    k_multiple_of: int = 1
    epilogues: tuple[Epilogue, ...] = ("none",)
    priority: int = 0
    stability: Stability = "stable"
    graph_safe: bool = True
    float32_out: bool = False
    stream_safe: bool = True
    deterministic: bool = True
    workspace: str | None = None
    predicate: str | None = None


@frozen(kw_only=True)
class RecipeRule:
    """One line of a recipe: the first rule whose pattern matches a layer's module name decides.

    Attributes:
        pattern: Glob on the module name, such as ``"model.layers.*.mlp.*"``.
        scheme: Scheme name; ``"fp16"`` keeps the layer as it is.
        group_size: None means ``auto``: the source's groups where the scheme can hold them, else 128.
        zeros: None means ``auto``: zeros where the source has them, else none.
    """

    pattern: str
    scheme: str
    group_size: int | None = None
    zeros: bool | None = None


@frozen(kw_only=True)
class QuantizationRecipe:
    """A named list of rules, such as ``"mixed"``; unmatched layers stay as they are.

    Attributes:
        name: What ``deepinfer quantize --recipe`` takes.
        description: One line for listings.
        rules: Tried in order.
    """

    name: str
    description: str
    rules: tuple[RecipeRule, ...]


@frozen(kw_only=True)
class LinearBackend:
    """What a config selects by name under ``[linear.<scheme>]``.

    Any part may be empty: a third party often brings one kernel alone.

    Attributes:
        name: ``"w4a16"``, ``"acme-w4"``.
        schemes: Weight formats it adds.
        layouts: Resident layouts it adds.
        kernels: Kernels it adds, for its own or somebody else's layouts.
        recipes: Quantization recipes it adds.
    """

    name: str
    schemes: tuple[WeightSchemeSpec, ...] = ()
    layouts: tuple[WeightLayoutSpec, ...] = ()
    kernels: tuple[LinearKernelSpec, ...] = ()
    recipes: tuple[QuantizationRecipe, ...] = ()
