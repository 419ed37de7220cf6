"""The `WeightLayout` over fragment-order records, for any scheme of 3 or 4 bits with groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepinfer_core.kernels import mma16

if TYPE_CHECKING:
    from deepinfer_core.plugin_api import LinearProblem, Tensors, WeightScheme


class MmaRecords:
    """Canonical tensors to records and back, bit for bit; see `mma16` for the bytes.

    Args:
        scheme: Packs and unpacks the canonical ``packed`` tensor.
        bits: Bits of a code.
    """

    def __init__(self, scheme: WeightScheme, bits: int) -> None:
        self.scheme = scheme
        self.bits = bits

    def nbytes(self, problem: LinearProblem) -> int:
        """Return the bytes of ``codes`` and ``groups``."""
        return mma16.records_nbytes(self.bits, problem.n, problem.k, problem.group_size, zeros=problem.zeros)

    def pack(self, problem: LinearProblem, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Turn canonical tensors into records."""
        codes = self.scheme.unpack(tensors["packed"], problem.k, zeros=problem.zeros)
        if not problem.zeros:
            codes = codes + (1 << (self.bits - 1))
        zeros = tensors["zeros"] if problem.zeros else None
        packed, groups = mma16.pack_records(
            self.bits, codes.to(torch.uint8), tensors["scales"], zeros, problem.group_size
        )
        return {"codes": packed, "groups": groups}

    def unpack(self, problem: LinearProblem, packed: Tensors) -> dict[str, torch.Tensor]:
        """Return the canonical tensors."""
        codes, scales, zeros = mma16.unpack_records(
            self.bits, packed["codes"], packed["groups"], problem.n, problem.k, problem.group_size, zeros=problem.zeros
        )
        plain = codes.to(torch.int8)
        if zeros is None:
            plain -= 1 << (self.bits - 1)
        found = {"packed": self.scheme.pack(plain, zeros=problem.zeros), "scales": scales}
        return found if zeros is None else {**found, "zeros": zeros}

    def concat_n(self, problems: Sequence[LinearProblem], packed: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """Join layers along N; tiles are joined as they are unless a layer but the last ends inside one."""
        if all(problem.n % mma16.FEATURES == 0 for problem in problems[:-1]):
            return {name: torch.cat([part[name] for part in packed]) for name in ("codes", "groups")}
        plain = [self.unpack(problem, part) for problem, part in zip(problems, packed, strict=True)]
        joined = {name: torch.cat([part[name] for part in plain]) for name in plain[0]}
        first = problems[0]
        return self.pack(first.with_shape(sum(problem.n for problem in problems), first.k), joined)

    def dequantize_rows(self, problem: LinearProblem, packed: Tensors, n0: int, n1: int, out: torch.Tensor) -> None:
        """Write the values of features ``n0:n1``; plain torch (the fast kernel is `MmaDecodeMatmul`'s)."""
        mma16.dequantize_records(
            self.bits,
            packed["codes"],
            packed["groups"],
            n0,
            n1,
            problem.k,
            problem.group_size,
            zeros=problem.zeros,
            out=out,
        )
