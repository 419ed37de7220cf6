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
    class_name,
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
        """Return the problems to try: every two of dtype, group, zeros, shape, extras and row counts meet.

        A case runs a quarter of the row counts, with or without bias and residual.
        """
        kernel, _, _ = cls.specs()
        residuals = (False, True) if "residual" in kernel.epilogues else (False,)
        extras = [(bias, residual) for residual in residuals for bias in (False, True)]
        ms = cls.ms()
        step = max(1, len(ms) // 4)
        quarters = [ms[start::step] for start in range(step)]
        found = cls._cases_at(cls._shapes(), extras, quarters, zeros=True)
        assert found, f"{kernel.name} serves none of the shapes {cls.shapes}: give it `shapes` that it serves"
        return found

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
        cls,
        shapes: Sequence[tuple[int, int]],
        extras: Sequence[tuple[bool, bool]],
        row_counts: Sequence[tuple[int, ...]] = ((),),
        *,
        zeros: bool,
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
            row_counts=row_counts,
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
        most, least = case.ms[-1], case.ms[0]
        first, _, second, third = (bound.run(bound.x[:m]) for m in (most, least, most, most))
        bound.check(third, most, " in a later call")
        if bound.spec.deterministic:
            same = torch.equal(first, second) and torch.equal(second, third)
            assert same, f"{bound.label(most)}: other bits for the same input, but the descriptor says deterministic"

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
        for row, expected in zip(x, bound.expected.double(), strict=True):
            out = bound.run(row.expand(m, k).contiguous()).double()
            found, right = float(out[0, 0]), float(expected[0])
            if right == 0:
                assert not out.any(), f"{bound.label(m)}: {found} where the sum is 0"
            elif problem.act_dtype == "float16":
                assert bool((out >= 65504).all()), f"{bound.label(m)}: {found} where the sum is {right}: inf or 65504"
            else:
                assert bool(((out - right).abs() <= 2.0**-8 * right).all()), f"{bound.label(m)}: {found} for {right}"

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


class CudaLinearKernelSuite(LinearKernelSuite):
    """`LinearKernelSuite`, and what only a card can show: streams and graphs."""

    @classmethod
    @cache
    def plain_cases(cls) -> list[Case]:
        """Return one case: what is promised here does not depend on the shape."""
        return cls.cases()[:1]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make the cases from the descriptor."""
        super().pytest_generate_tests(metafunc)
        parametrize(metafunc, "plain_case", self.plain_cases)

    def test_it_runs_on_the_current_stream(self, plain_case: Case) -> None:
        """Input that is still being written on the current stream is waited for, and no other stream is."""
        bound, m = self._bound(plain_case), plain_case.ms[0]
        late, stream = torch.zeros_like(bound.x[:m]), torch.cuda.Stream()
        for _ in range(20):
            late.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # cycles: a millisecond or two
                late.copy_(bound.x[:m])
                out = bound.launch(late)
            stream.synchronize()
            bound.check(out, m, " behind a slow kernel on its own stream")

    def test_two_streams_at_once_do_not_disturb_each_other(self, plain_case: Case) -> None:
        """A kernel that declares ``stream_safe`` runs on two streams, each with a workspace of its own."""
        bound, m = self._bound(plain_case), plain_case.ms[-1]
        if not bound.spec.stream_safe:
            pytest.skip(f"{bound.spec.name} declares that it is not stream-safe")
        lanes = [(torch.cuda.Stream(), bound), (torch.cuda.Stream(), bound.with_own_workspace())]
        torch.cuda.synchronize()
        outs = []
        for _ in range(50):
            for stream, lane in lanes:
                with torch.cuda.stream(stream):
                    outs.append(lane.launch(bound.x[:m]))
        torch.cuda.synchronize()
        for out in outs:
            bound.check(out, m, " beside another stream")

    def test_it_runs_on_a_second_card(self, plain_case: Case) -> None:
        """Module, stream and memory are the current device's, whatever its index; needs two cards."""
        if torch.cuda.device_count() < 2:
            pytest.skip("there is one CUDA card")
        with torch.cuda.device(1):
            bound = self._bound.__wrapped__(type(self), plain_case)
            for m in plain_case.ms:
                bound.check(bound.run(bound.x[:m]), m, " on cuda:1")

    def test_a_captured_graph_reads_its_input_anew(self, plain_case: Case) -> None:
        """A kernel that declares ``graph_safe`` can be captured, and its replay sees what x holds by then."""
        bound, m = self._bound(plain_case), plain_case.ms[0]
        if not bound.spec.graph_safe:
            pytest.skip(f"{bound.spec.name} declares that it is not graph-safe")
        static = torch.zeros_like(bound.x[:m])
        bound.launch(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = bound.launch(static)
        static.copy_(bound.x[:m])
        graph.replay()
        torch.cuda.synchronize()
        bound.check(out, m, " replayed from a graph")


def kernel_suites(
    backends: Sequence[LinearBackend], *, shapes: Mapping[str, Sequence[tuple[int, int]]] | None = None
) -> dict[str, type[LinearKernelSuite]]:
    """Return a suite for every kernel of some backends: ``globals().update(kernel_suites(BACKENDS))``.

    Args:
        backends: What the plugin's hook returns; a kernel that is added there is tested from then on.
        shapes: Kernel name -> (N, K), for kernels whose predicate refuses all of `SHAPES`.

    Returns:
        Class name -> class, such as ``TestW4a16Gemv``.
    """
    made: dict[str, type[LinearKernelSuite]] = {}
    for backend in backends:
        for kernel in backend.kernels:
            own: dict[str, object] = {"kernel": kernel, "backends": tuple(backends)}
            if shapes is not None and kernel.name in shapes:
                own["shapes"] = shapes[kernel.name]
            name = class_name(kernel.name)
            made[name] = type(name, (CudaLinearKernelSuite if kernel.device == "cuda" else LinearKernelSuite,), own)
    return made
