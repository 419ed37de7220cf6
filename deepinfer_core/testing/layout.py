"""What every weight layout must hold: a suite that its author subclasses, with cases made from its descriptor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from attrs import field, frozen

from deepinfer_core.plugin_api import (
    LinearBackend,
    LinearProblem,
    Tensors,
    WeightLayout,
    WeightLayoutSpec,
    WeightScheme,
    WeightSchemeSpec,
)
from deepinfer_core.registry.catalog import make
from deepinfer_core.testing.guards import check_guards, guarded, same_bits
from deepinfer_core.testing.linear_cases import (
    SHAPES,
    Case,
    cases_for,
    class_name,
    find_spec,
    in_test,
    on_this_machine,
    parametrize,
    sample_weight,
)

LOSS = 2.0**-7
"""What a layout that is not lossless may change a value by, in parts of the row's largest value.

Room for a scale and an offset in BF16, which rounds each by up to 2^-8 of its size.
"""


class WeightLayoutSuite:
    """Subclass it as ``class TestMine(WeightLayoutSuite)``, name your layout, and pytest runs the rest.

    Cases on a card are marked ``gpu`` and skipped, with the reason, where there is none.

    Attributes:
        layout: The descriptor, or its name.
        backends: Where names are looked up; what is not there is looked up among the installed plugins.
        shapes: (N, K) to try.
        loss: See `LOSS`; 0 is used where the descriptor says lossless.
    """

    layout: ClassVar[str | WeightLayoutSpec]
    backends: ClassVar[Sequence[LinearBackend]] = ()
    shapes: ClassVar[Sequence[tuple[int, int]]] = SHAPES
    loss: ClassVar[float] = LOSS

    @classmethod
    @cache
    def specs(cls) -> tuple[WeightLayoutSpec, WeightSchemeSpec]:
        """Return the descriptors of the layout and its scheme."""
        layout = find_spec("layout", cls.layout, WeightLayoutSpec, cls.backends)
        return layout, find_spec("scheme", layout.scheme, WeightSchemeSpec, cls.backends)

    @classmethod
    @cache
    def cases(cls) -> list[Case]:
        """Return the problems to try: every two of device, dtype, group, zeros and shape meet."""
        layout, scheme = cls.specs()
        return [
            case
            for device in layout.devices
            for case in cases_for(
                scheme,
                devices=(device,),
                dtypes=layout.act_dtypes,
                shapes=cls.shapes,
                m_max=64,
                fits=lambda problem: True,
            )
        ]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make the cases from the descriptor."""
        parametrize(metafunc, "case", self.cases)

    def test_nbytes_is_what_pack_holds(self, case: Case) -> None:
        """Memory is planned before anything is loaded; what is packed lives where the problem does."""
        held = self._held(case)
        assert held.layout.nbytes(held.problem) == sum(tensor.nbytes for tensor in held.packed.values())
        assert {tensor.device.type for tensor in held.packed.values()} == {held.problem.device}

    def test_unpacking_gives_back_what_was_packed(self, case: Case) -> None:
        """Bit for bit where the descriptor says lossless, else values within the loss."""
        held = self._held(case)
        back = held.layout.unpack(held.problem, held.packed)
        assert back.keys() == held.stored.keys()
        if self.specs()[0].lossless:
            for name, tensor in held.stored.items():
                assert same_bits(back[name], tensor), f"{case}: {name} came back changed"
        values = held.scheme.dequantize(back, k=held.problem.k, group_size=held.problem.group_size)
        self._check(values, held.values, case, "unpacked")

    def test_any_range_of_rows_is_dequantized_in_any_dtype(self, case: Case) -> None:
        """The scheme's values, in float32 and rounded once to the act dtype; nothing outside of ``out`` is written."""
        held = self._held(case)
        n, k = held.values.shape
        for dtype in {torch.float32, getattr(torch, held.problem.act_dtype)}:
            for n0, n1 in {(0, n), (0, 1), (n // 3, n // 2 + 1), (n - 1, n), (n // 2, n // 2)}:
                out, around = guarded((n1 - n0, k), dtype, held.values.device, float("nan"))
                held.layout.dequantize_rows(held.problem, held.packed, n0, n1, out)
                check_guards(around, f"{case}, rows {n0}:{n1}: out")
                self._check(out, held.values[n0:n1], case, f"rows {n0}:{n1} in {dtype}")

    def test_joining_layers_is_packing_the_joined(self, case: Case) -> None:
        """As merged qkv and gate_up are: at an edge of rows that are kept together, beside one, and one row alone."""
        held = self._held(case)
        n = held.problem.n
        for cuts in {(n // 3,), (n // 128 * 64,), (1, n // 2 + 1), (n // 2,)}:
            edges = (0, *cuts, n)
            widths = tuple(stop - start for start, stop in pairwise(edges))
            if min(widths) < 1:
                continue
            problems = [held.problem.with_shape(width, held.problem.k) for width in widths]
            parts = [held.scheme.slice_n(held.stored, *span) for span in pairwise(edges)]
            packed = [held.layout.pack(problem, part) for problem, part in zip(problems, parts, strict=True)]
            joined = held.layout.concat_n(problems, packed)
            assert joined.keys() == held.packed.keys()
            for name, tensor in held.packed.items():
                assert same_bits(joined[name], tensor), f"{case}: {name} of {widths} joined is not that of {n} packed"

    def test_tensors_that_are_not_contiguous_pack_the_same(self, case: Case) -> None:
        """A slice of a merged checkpoint tensor, or a transposed one, is a legal input; and packing leaves it alone."""
        held = self._held(case)
        apart = {name: _spread(tensor) for name, tensor in held.stored.items()}
        again = held.layout.pack(held.problem, apart)
        for name, tensor in held.packed.items():
            assert same_bits(again[name], tensor), f"{case}: {name} depends on the strides of the input"
        for name, tensor in held.stored.items():
            assert same_bits(apart[name], tensor), f"{case}: packing changed {name}, which it was given"

    def _check(self, found: torch.Tensor, values: torch.Tensor, case: Case, what: str) -> None:
        """Compare with the scheme's values, rounded to the dtype of what was found."""
        expected = values.to(found.dtype)
        if self.specs()[0].lossless:
            assert torch.equal(found, expected), f"{case}: {what} are not the scheme's values"
            return
        error, largest = (found.float() - values).abs(), values.abs().amax(1, keepdim=True)
        room = (self.loss + torch.finfo(found.dtype).eps) * largest
        wrong = ~(error <= room)  # true for NaN
        assert not bool(wrong.any()), (
            f"{case}: {what} are off by up to {float((error / largest)[wrong].max()):.2g} of a row's largest value, "
            f"more than {self.loss:.2g}"
        )

    @classmethod
    @lru_cache(maxsize=1)  # several tests of one case follow each other
    def _held(cls, case: Case) -> _Held:
        layout, scheme = cls.specs()
        problem = on_this_machine(case.problem, layout.name)
        return _Held.make(layout, scheme, problem)


def layout_suites(backends: Sequence[LinearBackend]) -> dict[str, type[WeightLayoutSuite]]:
    """Return a suite for every layout of some backends: ``globals().update(layout_suites(BACKENDS))``."""
    made: dict[str, type[WeightLayoutSuite]] = {}
    for backend in backends:
        for layout in backend.layouts:
            name = class_name(layout.name)
            made[name] = type(name, (WeightLayoutSuite,), {"layout": layout, "backends": tuple(backends)})
    return made


@frozen(kw_only=True)
class _Held:
    """One layer's weights, as canonical tensors, as values and in the layout."""

    problem: LinearProblem
    layout: WeightLayout = field(eq=False)
    scheme: WeightScheme = field(eq=False)
    stored: Tensors = field(eq=False)
    values: torch.Tensor = field(eq=False)
    packed: Tensors = field(eq=False)

    @classmethod
    def make(cls, layout: WeightLayoutSpec, scheme: WeightSchemeSpec, problem: LinearProblem) -> _Held:
        maker: WeightScheme = make(scheme.factory, in_test(scheme))
        holder: WeightLayout = make(layout.factory, in_test(layout))
        weight = sample_weight(problem.n, problem.k, problem.device)
        stored = maker.quantize(weight, group_size=problem.group_size, zeros=problem.zeros, method="rtn")
        return cls(
            problem=problem,
            layout=holder,
            scheme=maker,
            stored=stored,
            values=maker.dequantize(stored, k=problem.k, group_size=problem.group_size),
            packed=holder.pack(problem, {name: tensor.clone() for name, tensor in stored.items()}),
        )


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with every other column left out of a wider, transposed tensor."""
    wide = torch.zeros(2 * tensor.shape[1], tensor.shape[0], dtype=tensor.dtype, device=tensor.device)
    wide[::2] = tensor.t()
    return wide.t()[:, ::2]
