"""What every linear kernel must hold: a suite that its author subclasses, with cases made from its descriptor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import ClassVar

import pytest
import torch
from attrs import evolve

from deepinfer_core.errors import DeepinferError
from deepinfer_core.plugin_api import LinearBackend, LinearKernelSpec, LinearProblem, WeightLayoutSpec, WeightSchemeSpec
from deepinfer_core.registry.catalog import Catalog
from deepinfer_core.registry.fit import kernel_misfit
from deepinfer_core.testing.bound_kernel import TOLERANCE, BoundKernel
from deepinfer_core.testing.linear_cases import (
    SHAPES,
    Case,
    cases_for,
    find_spec,
    groups_of,
    in_test,
    on_this_machine,
    parametrize,
    rounded_shapes,
    with_stand_in_card,
)

ROW_COUNTS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Row counts around every edge that tiles of 8 to 128 rows have; 0 is tried as well."""

HALF_SUM = 114688.0
"""What half of the long sums comes to: beyond float16."""


class LinearKernelSuite:
    """Subclass it as ``class TestMine(LinearKernelSuite)``, name your kernel, and pytest runs the rest.

    Kernels for CUDA are marked ``gpu`` and skipped, with the reason, where there is no card that they serve.

    Attributes:
        kernel: The descriptor, or its name.
        backends: Where names are looked up; what is not there is looked up among the installed plugins.
        shapes: (N, K) to try, each rounded up to the multiples that the descriptor wants.
        row_counts: Row counts to try, cut to the descriptor's range.
        tolerance: See `TOLERANCE`; a kernel that is less exact says so here, with the reason.
    """

    kernel: ClassVar[str | LinearKernelSpec]
    backends: ClassVar[Sequence[LinearBackend]] = ()
    shapes: ClassVar[Sequence[tuple[int, int]]] = SHAPES
    row_counts: ClassVar[Sequence[int]] = ROW_COUNTS
    tolerance: ClassVar[Mapping[str, float]] = TOLERANCE

    @classmethod
    @cache
    def specs(cls) -> tuple[LinearKernelSpec, WeightLayoutSpec, WeightSchemeSpec]:
        """Return the descriptors of the kernel, its layout and its scheme."""
        kernel = find_spec("kernel", cls.kernel, LinearKernelSpec, cls.backends)
        layout = find_spec("layout", kernel.layout, WeightLayoutSpec, cls.backends)
        scheme = find_spec("scheme", kernel.scheme, WeightSchemeSpec, cls.backends)
        return kernel, layout, scheme

    @classmethod
    def ms(cls) -> tuple[int, ...]:
        """Return the row counts of the kernel's range, both of its ends among them."""
        span = cls.specs()[0].m
        ends = (m for m in (span.lo, span.lo + 1, span.hi) if m in span and m <= span.lo + 512)
        return tuple(sorted({m for m in cls.row_counts if m in span} | set(ends)))

    @classmethod
    def misfit(cls, problem: LinearProblem) -> str | None:
        """Return why the registry would not choose the kernel for a problem, or None."""
        kernel, layout, _ = cls.specs()
        return kernel_misfit(Catalog(layouts={layout.name: in_test(layout)}), in_test(kernel), problem)

    @classmethod
    @cache
    def cases(cls) -> list[Case]:
        """Return the problems to try: every two of dtype, group, zeros, shape, bias and residual meet.

        Each runs a quarter of the row counts, the next one the next quarter.
        """
        kernel, _, _ = cls.specs()
        residuals = (False, True) if "residual" in kernel.epilogues else (False,)
        extras = [(bias, residual) for residual in residuals for bias in (False, True)]
        found = cls._cases_at(cls._shapes(), extras, zeros=True)
        ms = cls.ms()
        step = max(1, len(ms) // 4)
        assert found, f"{kernel.name} serves none of the shapes {cls.shapes}: give it `shapes` that it serves"
        return [evolve(case, ms=ms[i % step :: step]) for i, case in enumerate(found)]

    @classmethod
    @cache
    def long_cases(cls) -> list[Case]:
        """Return problems for `test_sums_beyond_half_precision_are_kept`: the largest K served, few features."""
        features = sorted({n for n, _ in cls._shapes()} | {512, 2048})
        for k, n in product((8192, 4096, 2048, 1024, 512), features):
            if found := cls._cases_at([(n, k)], [(False, False)], zeros=False):
                return found
        raise AssertionError(f"{cls.specs()[0].name} serves no K of 512 to 8192 at N = {features}: give it `shapes`")

    @classmethod
    def _shapes(cls) -> tuple[tuple[int, int], ...]:
        kernel, _, scheme = cls.specs()
        return rounded_shapes(
            cls.shapes,
            n_multiple=kernel.n_multiple_of,
            k_multiple=kernel.k_multiple_of,
            whole_groups=1 if kernel.short_last_group else max(1, *(kernel.group_sizes or groups_of(scheme))),
        )

    @classmethod
    def _cases_at(
        cls, shapes: Sequence[tuple[int, int]], extras: Sequence[tuple[bool, bool]], *, zeros: bool
    ) -> list[Case]:
        kernel, layout, scheme = cls.specs()
        return cases_for(
            scheme,
            devices=(kernel.device,),
            dtypes=[dtype for dtype in kernel.act_dtypes if dtype in layout.act_dtypes],
            groups=kernel.group_sizes,
            zeros=zeros,
            shapes=shapes,
            m_max=max(cls.ms()),
            fits=lambda problem: cls.misfit(with_stand_in_card(problem, kernel.capability)) is None,
            extras=extras,
        )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make the cases from the descriptor."""
        parametrize(metafunc, "case", self.cases)
        parametrize(metafunc, "long_case", self.long_cases)

    def test_every_row_count_matches_the_reference(self, case: Case) -> None:
        """Each element is the product of the scheme's own values, plus bias and residual, and all are written."""
        bound = self._bound(case)
        for m in case.ms:
            bound.check(bound.run(bound.x[:m]), m)

    def test_sliced_inputs_give_the_same_as_their_copies(self, case: Case) -> None:
        """The rows of x may lie apart, in the left or the right half of something wider; NaN lies between them."""
        bound = self._bound(case)
        k = case.problem.k
        for m in {case.ms[0], case.ms[-1]}:
            wide = torch.full((m + 1, 2 * k), float("nan"), dtype=bound.x.dtype, device=bound.x.device)
            for half in (wide[:m, :k], wide[1:, k:]):
                half.copy_(bound.x[:m])
                bound.check(bound.run(half), m, " with a row stride of 2 K")
                half.fill_(float("nan"))

    def test_calls_leave_nothing_behind(self, case: Case) -> None:
        """The workspace, zeroed once, serves call after call; a deterministic kernel gives the same bits again."""
        bound = self._bound(case)
        for m in (case.ms[-1], case.ms[0], case.ms[-1]):
            first, second, third = (bound.run(bound.x[:m]) for _ in range(3))
            bound.check(second, m, " in its second call")
            if bound.spec.deterministic:
                same = torch.equal(first, second) and torch.equal(second, third)
                assert same, f"{bound.label(m)}: other bits for the same input, but the descriptor says deterministic"

    def test_no_rows_write_nothing(self, case: Case) -> None:
        """M = 0 is not an invalid launch."""
        bound = self._bound(case)
        assert bound.run(bound.x[:0]).shape == (0, case.problem.n)

    def test_columns_that_lie_apart_are_right_or_refused(self, case: Case) -> None:
        """Strided columns are outside of the contract: a clear error or the right result, never other numbers."""
        bound = self._bound(case)
        m = case.ms[-1]
        apart = torch.stack((bound.x[:m], torch.full_like(bound.x[:m], float("nan"))), dim=2)[..., 0]
        try:
            out = bound.run(apart)
        except DeepinferError:
            return
        bound.check(out, m, f" with strides {apart.stride()}")

    def test_sums_beyond_half_precision_are_kept(self, long_case: Case) -> None:
        """Products of +28 and then of -28 add up to 0 exactly, though the half sum of 114,688 is beyond 65,504.

        The half sum alone is infinite or clamped in float16, right in the others, and never NaN.
        """
        kernel, layout, scheme = self.specs()
        problem = on_this_machine(long_case.problem, kernel.name, kernel.capability)
        m, n, k, device = self.ms()[0], problem.n, problem.k, problem.device
        signs = torch.ones(k, device=device)
        signs[k // 2 :] = -1
        weight = (1.75 * signs).expand(n, k)
        x = torch.full((2, k), HALF_SUM / (1.75 * k / 2), device=device, dtype=getattr(torch, problem.act_dtype))
        x[1, k // 2 :] = 0
        bound = BoundKernel.make(kernel, layout, scheme, Case(problem, ms=(m,)), weight=weight, x=x)
        whole, half = (bound.run(row.expand(m, k).contiguous()).float() for row in x)
        assert not whole.any(), f"{bound.label(m)}: {whole.flatten()[0].item()} where the sum is 0"
        possible = (65504.0, float("inf")) if problem.act_dtype == "float16" else (HALF_SUM,)
        right = torch.isin(half, torch.tensor(possible, device=device))
        assert bool(right.all()), f"{bound.label(m)}: {half.flatten()[0].item()} where the sum is {HALF_SUM:.0f}"

    @classmethod
    @lru_cache(maxsize=1)  # several tests of one case follow each other
    def _bound(cls, case: Case) -> BoundKernel:
        """Return the kernel of a case; skip the test, with the reason, where this card is not served."""
        kernel, layout, scheme = cls.specs()
        problem = on_this_machine(case.problem, kernel.name, kernel.capability)
        reason = cls.misfit(problem)
        if reason is not None:
            pytest.skip(f"{kernel.name} does not serve this case here: {reason}")
        return BoundKernel.make(kernel, layout, scheme, evolve(case, problem=problem), cls.tolerance)
