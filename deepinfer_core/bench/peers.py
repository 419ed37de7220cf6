"""Other people's kernels beside ours: dense cuBLAS, torch's tinygemm, humming; each says why it cannot serve."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import LinearProblem

Call = Callable[[torch.Tensor], torch.Tensor]


@frozen(kw_only=True)
class Prepared:
    """A peer with a weight loaded.

    Attributes:
        call: Computes the product.
        copy: Returns the same over a copy of the weight, so that rotating copies are never found in a cache.
        tolerance: Its own largest acceptable relative error: a peer that quantizes again by its own rule computes a
            slightly different matrix; its time is what is compared.
    """

    call: Call
    copy: Callable[[], Call]
    tolerance: float


class Peer(Protocol):
    """A kernel from elsewhere."""

    @property
    def name(self) -> str:
        """Its column in the result file: ``us_<name>``."""
        ...

    def reason_against(self, problem: LinearProblem) -> str | None:
        """Return why it cannot serve the problem here, or None."""
        ...

    def prepare(self, problem: LinearProblem, weight: torch.Tensor) -> Prepared:
        """Load a weight.

        Args:
            problem: The layer.
            weight: float32 ``[N, K]`` whose values lie on the scheme's grid.
        """
        ...


@frozen
class CublasDense:
    """The dense baseline: the weight in the activations' dtype, cuBLAS through torch."""

    name: str = "fp16"

    def reason_against(self, problem: LinearProblem) -> str | None:
        """Serve everything."""
        return None

    def prepare(self, problem: LinearProblem, weight: torch.Tensor) -> Prepared:
        """Round the weight to the act dtype."""
        dense = weight.to(getattr(torch, problem.act_dtype))
        return Prepared(call=_dense_call(dense), copy=lambda: _dense_call(dense.clone()), tolerance=5e-3)


@frozen
class Tinygemm:
    """torch's ``_weight_int4pack_mm``: 4 bits, BF16 activations, groups of 32 to 256."""

    name: str = "tinygemm"

    def reason_against(self, problem: LinearProblem) -> str | None:
        """Name the first of its limits that the problem breaks."""
        if problem.scheme != "w4a16":
            return "4-bit only"
        if problem.group_size not in (32, 64, 128, 256):
            return f"groups of 32, 64, 128 or 256, not {problem.group_size}"
        if problem.n % 8 or problem.k % 128:
            return "wants N % 8 == 0 and K % 128 == 0"
        return None

    def prepare(self, problem: LinearProblem, weight: torch.Tensor) -> Prepared:
        """Quantize onto its grid (unsigned codes about 8, BF16 scales) and pack."""
        n, k, g = problem.n, problem.k, problem.group_size
        grouped = weight.view(n, k // g, g)
        scale = (grouped.abs().amax(-1) / 8).clamp(min=1e-8).bfloat16()
        codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8).view(n, k)
        packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        scales_zeros = torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()
        return Prepared(
            call=_tinygemm_call(packed, g, scales_zeros),
            copy=lambda: _tinygemm_call(packed.clone(), g, scales_zeros.clone()),
            tolerance=0.2,
        )

    @property
    def act_dtype(self) -> torch.dtype:
        """The only activation dtype that it takes."""
        return torch.bfloat16


@frozen
class Humming:
    """``humming-kernels``: the strongest public W4 and W3 kernels found; an optional extra of the bench."""

    name: str = "humming"

    def reason_against(self, problem: LinearProblem) -> str | None:
        """Say what to install when it is not there."""
        if importlib.util.find_spec("humming") is None:
            return "not installed (pip install deepinfer-core[bench-peers])"
        if problem.scheme not in ("w4a16", "w3a16"):
            return "4 and 3 bits are compared"
        return None

    def prepare(self, problem: LinearProblem, weight: torch.Tensor) -> Prepared:
        """Let it quantize the weight by its own rule."""
        from humming.layer import HummingLayer  # type: ignore[import-not-found, unused-ignore]

        bits = {"w4a16": 4, "w3a16": 3}[problem.scheme]
        dtype = getattr(torch, problem.act_dtype)
        layer = HummingLayer(
            shape_n=problem.n,
            shape_k=problem.k,
            weight_config={"dtype": f"uint{bits}", "group_size": max(problem.group_size, 0)},
            torch_dtype=dtype,
        ).cuda()
        layer.load_from_unquantized(weight.to(dtype))
        layer.transform()
        return Prepared(call=layer, copy=lambda: copy.deepcopy(layer), tolerance=0.5)


def _dense_call(weight: torch.Tensor) -> Call:
    return lambda x: torch.nn.functional.linear(x, weight)


def _tinygemm_call(packed: torch.Tensor, group: int, scales_zeros: torch.Tensor) -> Call:
    return lambda x: torch._weight_int4pack_mm(x, packed, group, scales_zeros)


PEERS: tuple[Peer, ...] = (CublasDense(), Tinygemm(), Humming())
