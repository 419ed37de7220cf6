"""A made-up dense scheme with a layout and kernels, right ones and ones with a planted fault each."""

from __future__ import annotations

import torch

from deepinfer_core.errors import KernelError
from deepinfer_core.plugin_api import LinearBackend, LinearKernelSpec, MRange, TensorSpec, WeightLayoutSpec
from deepinfer_core.plugin_api import WeightSchemeSpec as SchemeSpec

HERE = __name__


class Dense:
    def quantize(self, weight, *, group_size, zeros, method="search"):
        return {"weight": weight}

    def dequantize(self, tensors, *, k, group_size, dtype=None):
        return tensors["weight"].to(torch.float32 if dtype is None else dtype)

    def slice_n(self, tensors, n0, n1):
        return {"weight": tensors["weight"][n0:n1]}


class Layout:
    """A right one, in float32."""

    def nbytes(self, problem):
        return 4 * problem.n * problem.k

    def pack(self, problem, tensors):
        return {"weight": tensors["weight"].clone(memory_format=torch.contiguous_format)}

    def unpack(self, problem, packed):
        return dict(packed)

    def concat_n(self, problems, packed):
        return {"weight": torch.cat([part["weight"] for part in packed])}

    def dequantize_rows(self, problem, packed, n0, n1, out):
        out.copy_(packed["weight"][n0:n1])


class CountsWrong(Layout):
    def nbytes(self, problem):
        return super().nbytes(problem) + 4


class LosesABit(Layout):
    def unpack(self, problem, packed):
        return {"weight": packed["weight"].bfloat16().float()}


class LosesMinusZero(Layout):
    def pack(self, problem, tensors):
        return {"weight": tensors["weight"] + 0.0}


class JoinsBackwards(Layout):
    def concat_n(self, problems, packed):
        return super().concat_n(problems, packed[::-1])


class StartsAtRowZero(Layout):
    def dequantize_rows(self, problem, packed, n0, n1, out):
        out.copy_(packed["weight"][: n1 - n0])


class WritesARowMore(Layout):
    def dequantize_rows(self, problem, packed, n0, n1, out):
        super().dequantize_rows(problem, packed, n0, n1, out)
        if n1 < problem.n:
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).copy_(packed["weight"][n1, :1])


class TrustsStrides(Layout):
    def pack(self, problem, tensors):
        given = tensors["weight"]
        return {"weight": given.as_strided(given.shape, (given.shape[1], 1)).clone()}


class ChangesItsInput(Layout):
    def pack(self, problem, tensors):
        packed = super().pack(problem, tensors)
        tensors["weight"].zero_()
        return packed


LAYOUT_FAULTS = {
    CountsWrong: "test_nbytes_is_what_pack_holds",
    LosesABit: "test_unpacking_gives_back_what_was_packed",
    LosesMinusZero: "test_unpacking_gives_back_what_was_packed",
    JoinsBackwards: "test_joining_layers_is_packing_the_joined",
    StartsAtRowZero: "test_any_range_of_rows_is_dequantized_in_any_dtype",
    WritesARowMore: "test_any_range_of_rows_is_dequantized_in_any_dtype",
    TrustsStrides: "test_tensors_that_are_not_contiguous_pack_the_same",
    ChangesItsInput: "test_tensors_that_are_not_contiguous_pack_the_same",
}


class Matmul:
    """A right one: float32 sums, rounded once; 64 bytes of workspace hold a counter that it puts back to zero."""

    def __init__(self, problem):
        self.problem = problem

    def warm_up(self, ms):
        pass

    def __call__(self, x, weights, out, *, bias=None, residual=None, workspace=None):
        assert workspace.numel() == 64
        out.copy_(self.sums(x, weights["weight"], bias, residual))

    def sums(self, x, weight, bias, residual):
        total = x.float() @ weight.t()
        for term in (bias, residual):
            if term is not None:
                total = total + term
        return total


class IgnoresBias(Matmul):
    def sums(self, x, weight, bias, residual):
        return super().sums(x, weight, None, residual)


class IgnoresResidual(Matmul):
    def sums(self, x, weight, bias, residual):
        return super().sums(x, weight, bias, None)


class TakesRowStrideForK(Matmul):
    """KL-02: the caller passes a view, the kernel takes the row stride to be K."""

    def __call__(self, x, weights, out, **more):
        super().__call__(x.as_strided(x.shape, (x.shape[1], 1)), weights, out, **more)


class TakesColumnStrideForOne(Matmul):
    """Reads rows at their stride, but columns next to each other."""

    def __call__(self, x, weights, out, **more):
        super().__call__(x.as_strided(x.shape, (x.stride(0), 1)), weights, out, **more)


class LeavesLastElement(Matmul):
    def __call__(self, x, weights, out, **more):
        whole = torch.empty_like(out)
        super().__call__(x, weights, whole, **more)
        out.view(-1)[:-1] = whole.view(-1)[:-1]


class AddsIntoOut(Matmul):
    """Takes out to be zeroed."""

    def __call__(self, x, weights, out, **more):
        before = out.clone()
        super().__call__(x, weights, out, **more)
        out += before


class WritesBehindOut(Matmul):
    def __call__(self, x, weights, out, **more):
        super().__call__(x, weights, out, **more)
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()


class LeavesWorkspaceDirty(Matmul):
    """The second call finds the sums of the first."""

    def __call__(self, x, weights, out, *, workspace=None, **more):
        super().__call__(x, weights, out, workspace=workspace, **more)
        kept = workspace.view(torch.float32)
        out += kept[0]
        kept[0] += 1


class WritesBehindWorkspace(Matmul):
    def __call__(self, x, weights, out, *, workspace=None, **more):
        super().__call__(x, weights, out, workspace=workspace, **more)
        workspace.as_strided((1,), (1,), workspace.storage_offset() + workspace.numel()).zero_()


class ChangesX(Matmul):
    def __call__(self, x, weights, out, **more):
        super().__call__(x, weights, out, **more)
        x.mul_(2)


class ChangesWeights(Matmul):
    def __call__(self, x, weights, out, **more):
        super().__call__(x, weights, out, **more)
        weights["weight"][:, 0] += 1e-3


class Wavers(Matmul):
    """Other bits each time, all within the tolerance: what atomic adds do."""

    calls = 0

    def sums(self, x, weight, bias, residual):
        Wavers.calls += 1
        return super().sums(x, weight, bias, residual) * (1 + Wavers.calls % 2 * 3e-6)


class SumsInHalf(Matmul):
    """NU-01: partial sums in half precision."""

    def sums(self, x, weight, bias, residual):
        middle = weight.shape[1] // 2
        parts = [x[:, s].float() @ weight[:, s].t() for s in (slice(middle), slice(middle, None))]
        total = parts[0].half().float() + parts[1].half().float()
        return super().sums(x, weight, bias, residual) if bool(total.isfinite().all()) else total


class WrongAboveOneTile(Matmul):
    """KL-04: row 16 onwards is computed from row 15."""

    def sums(self, x, weight, bias, residual):
        total = super().sums(x, weight, bias, residual)
        total[16:] = total[15:16]
        return total


class DropsTheTailOfK(Matmul):
    def sums(self, x, weight, bias, residual):
        even = weight.shape[1] // 8 * 8 if weight.shape[1] > 8 else weight.shape[1]
        return super().sums(x[:, :even], weight[:, :even], bias, residual)


class FailsWithoutRows(Matmul):
    def __call__(self, x, weights, out, **more):
        if x.shape[0] == 0:
            raise RuntimeError("invalid configuration argument")
        super().__call__(x, weights, out, **more)


KERNEL_FAULTS = {
    IgnoresBias: "test_every_row_count_matches_the_reference",
    IgnoresResidual: "test_every_row_count_matches_the_reference",
    TakesRowStrideForK: "test_sliced_inputs_give_the_same_as_their_copies",
    TakesColumnStrideForOne: "test_columns_that_lie_apart_are_right_or_refused",
    LeavesLastElement: "test_every_row_count_matches_the_reference",
    AddsIntoOut: "test_every_row_count_matches_the_reference",
    WritesBehindOut: "test_every_row_count_matches_the_reference",
    LeavesWorkspaceDirty: "test_calls_leave_nothing_behind",
    WritesBehindWorkspace: "test_every_row_count_matches_the_reference",
    ChangesX: "test_every_row_count_matches_the_reference",
    ChangesWeights: "test_every_row_count_matches_the_reference",
    Wavers: "test_calls_leave_nothing_behind",
    SumsInHalf: "test_sums_beyond_half_precision_are_kept",
    WrongAboveOneTile: "test_every_row_count_matches_the_reference",
    DropsTheTailOfK: "test_every_row_count_matches_the_reference",
    FailsWithoutRows: "test_no_rows_write_nothing",
}


class RefusesApartColumns(Matmul):
    """A right one too: the error is clear."""

    def __call__(self, x, weights, out, **more):
        if x.shape[0] and x.stride(1) != 1:
            raise KernelError("the columns of x must be contiguous")
        super().__call__(x, weights, out, **more)


def workspace(problem, m):
    return 64


def backend(*, kernel=Matmul, layout=Layout, **values):
    """Return a backend with one scheme, one layout and one kernel of these classes."""
    scheme = SchemeSpec(
        name="made-up", bits=32, tensors=(TensorSpec(name="weight", dtype="float32"),), factory=f"{HERE}:Dense"
    )
    layouts = (
        WeightLayoutSpec(
            name="made-up.rows.v1", scheme="made-up", factory=f"{HERE}:{layout.__name__}", devices=("cpu",)
        ),
    )
    fields = {"m": MRange(1), "act_dtypes": ("float16", "float32"), "epilogues": ("none", "residual")} | values
    made = LinearKernelSpec(
        name="made-up.matmul",
        scheme="made-up",
        layout="made-up.rows.v1",
        device="cpu",
        factory=f"{HERE}:{kernel.__name__}",
        workspace=f"{HERE}:workspace",
        **fields,
    )
    return LinearBackend(name="made-up", schemes=(scheme,), layouts=layouts, kernels=(made,))
