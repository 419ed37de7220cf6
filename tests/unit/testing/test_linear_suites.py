"""The suites for kernels and layouts find planted faults, and pass what is right."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from deepinfer_core.plugin_api import MRange
from deepinfer_core.testing.layout import WeightLayoutSuite, layout_suites
from deepinfer_core.testing.linear import CudaLinearKernelSuite, LinearKernelSuite, kernel_suites
from deepinfer_core.testing.pairs import pairwise_cases


def _faulty():
    path = Path(__file__).with_name("faulty_linear.py")
    spec = importlib.util.spec_from_file_location("faulty_linear", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["faulty_linear"] = module  # factories are named by module
    spec.loader.exec_module(module)
    return module


faulty = _faulty()


def failures(suite):
    """Run a suite's tests over all of its cases and return the names of those that failed."""
    failed = set()
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        if name.startswith("test_"):
            cases = suite.long_cases() if "long_case" in inspect.signature(test).parameters else suite.cases()
            for case in cases:
                try:
                    getattr(suite(), name)(case)
                except (AssertionError, RuntimeError):
                    failed.add(name)
                    break
    return failed


def kernel_suite(kernel, **values):
    return type(
        "Suite",
        (LinearKernelSuite,),
        {"kernel": "made-up.matmul", "backends": (faulty.backend(kernel=kernel, **values),)},
    )


def layout_suite(layout):
    return type(
        "Suite", (WeightLayoutSuite,), {"layout": "made-up.rows.v1", "backends": (faulty.backend(layout=layout),)}
    )


@pytest.mark.parametrize("kernel", [faulty.Matmul, faulty.RefusesApartColumns])
def test_a_right_kernel_passes(kernel):
    assert failures(kernel_suite(kernel)) == set()


@pytest.mark.parametrize(
    ("kernel", "found_by"), faulty.KERNEL_FAULTS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_fault_in_a_kernel_is_found(kernel, found_by):
    assert found_by in failures(kernel_suite(kernel))


def test_a_kernel_that_says_it_wavers_may():
    assert failures(kernel_suite(faulty.Wavers, deterministic=False)) == set()


def test_a_residual_is_given_only_to_kernels_that_offer_it():
    assert failures(kernel_suite(faulty.IgnoresResidual, epilogues=("none",))) == set()


def test_a_right_layout_passes():
    assert failures(layout_suite(faulty.Layout)) == set()


@pytest.mark.parametrize(
    ("layout", "found_by"), faulty.LAYOUT_FAULTS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_fault_in_a_layout_is_found(layout, found_by):
    assert found_by in failures(layout_suite(layout))


def test_row_counts_are_cut_to_the_range_and_each_is_run():
    suite = kernel_suite(faulty.Matmul, m=MRange(3, 48))
    assert suite.ms() == (3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48)
    assert {m for case in suite.cases() for m in case.ms} == set(suite.ms())
    assert kernel_suite(faulty.Matmul, m=MRange(300)).ms() == (300, 301)


def test_shapes_follow_the_multiples_that_the_descriptor_wants():
    suite = kernel_suite(faulty.Matmul, n_multiple_of=16, k_multiple_of=32)
    assert {(c.problem.n % 16, c.problem.k % 32) for c in suite.cases()} == {(0, 0)}
    assert len({(c.problem.n, c.problem.k) for c in suite.cases()}) > 2


def test_a_kernel_that_serves_no_case_is_no_pass():
    faulty.refuse = lambda problem: "serves nothing"
    suite = kernel_suite(faulty.Matmul, predicate="faulty_linear:refuse")
    with pytest.raises(AssertionError, match="give it `shapes` that it serves"):
        suite.cases()


def test_every_descriptor_gets_a_suite():
    backend = faulty.backend()
    (made,) = kernel_suites([backend]).items()
    assert (made[0], made[1].specs()[0], made[1].__base__) == (
        "TestMadeUpMatmul",
        backend.kernels[0],
        LinearKernelSuite,
    )
    (made,) = layout_suites([backend]).items()
    assert (made[0], made[1].specs()[0]) == ("TestMadeUpRowsV1", backend.layouts[0])


def test_kernels_for_cards_are_also_held_to_streams_and_graphs():
    from attrs import evolve

    backend = faulty.backend()
    on_a_card = evolve(backend, kernels=(evolve(backend.kernels[0], device="cuda"),))
    (suite,) = kernel_suites([on_a_card]).values()
    assert suite.__base__ is CudaLinearKernelSuite


def test_every_two_values_that_can_meet_do():
    axes = {"a": (1, 2, 3), "b": (1, 2, 3, 4), "c": (False, True), "d": ("x", "y")}
    fits = lambda case: not (case["a"] == 1 and case["c"])
    cases = pairwise_cases(axes, fits)
    assert all(fits(case) for case in cases)
    for first in axes:
        for second in axes:
            if first < second:
                met = {(case[first], case[second]) for case in cases}
                wanted = {(u, v) for u in axes[first] for v in axes[second]} - (
                    {(1, True)} if (first, second) == ("a", "c") else set()
                )
                assert met == wanted, (first, second)
    assert len(cases) < 20
    assert pairwise_cases({"a": (1, 2)}) == [{"a": 1}, {"a": 2}]
