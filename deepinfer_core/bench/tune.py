"""`deepinfer tune`: measures every kernel that fits a model's shapes on this device and stores the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from deepinfer_core.bench.kernel_bench import KernelBench
from deepinfer_core.bench.linear import MAX_REL_ERR
from deepinfer_core.errors import DeepinferError, KernelError
from deepinfer_core.plugin_api import LinearKernelSpec, LinearProblem
from deepinfer_core.registry.catalog import Catalog, Registered
from deepinfer_core.registry.dispatch import fallback_spec, timing_name
from deepinfer_core.registry.fit import kernel_misfit, layout_misfit
from deepinfer_core.registry.tuning import Timing, Timings, problem_key

DEFAULT_MS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
"""Where kernels change places on the cards seen so far; between two of them selection takes the larger one's time."""


def tune(
    catalog: Catalog,
    problems: Iterable[LinearProblem],
    path: Path,
    *,
    ms: Sequence[int] = DEFAULT_MS,
    report: Callable[[str], object] = print,
) -> Timings:
    """Measure and merge into the table at ``path``, written after every problem: Ctrl-C loses one problem at most.

    Args:
        catalog: What is installed.
        problems: Layers; equal ones are measured once.
        path: The device's table.
        ms: Row counts to measure, as far as each problem's ``m_max``.
        report: Called with a line for each kernel.

    Raises:
        KernelError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise KernelError("tune measures kernels on a CUDA device and none is here")
    table = Timings.read(path)
    table = Timings(torch.cuda.get_device_name(), table.entries)
    distinct = {problem_key(problem): problem for problem in problems}
    for number, (key, problem) in enumerate(distinct.items(), 1):
        report(f"[{number}/{len(distinct)}] {key}")
        table = table.merged(_measure(catalog, problem, [m for m in ms if m <= problem.m_max], report))
        table.write(path)
    return table


def candidates(catalog: Catalog, problem: LinearProblem) -> list[Registered[LinearKernelSpec]]:
    """Return every kernel that could serve the problem, experimental ones too, and core's fallback of each layout."""
    fitting = [k for k in catalog.kernels.values() if k.spec.scheme == problem.scheme]
    fitting = [k for k in fitting if kernel_misfit(catalog, k, problem) is None]
    layouts = [s.spec for s in catalog.layouts.values() if layout_misfit(s.spec, problem) is None]
    return fitting + [Registered.by_core(fallback_spec(layout, problem)) for layout in layouts]


def _measure(
    catalog: Catalog, problem: LinearProblem, ms: Sequence[int], report: Callable[[str], object]
) -> list[Timing]:
    bench = KernelBench(catalog, problem)
    found: list[Timing] = []
    for kernel in candidates(catalog, problem):
        name = timing_name(kernel.spec)
        served = [m for m in ms if m in kernel.spec.m]
        try:
            with bench.loaded(kernel) as measure:
                for m in served:
                    measured = measure(m)
                    if not measured.rel_err < MAX_REL_ERR:
                        report(f"  {name} at M = {m}: wrong result (error {measured.rel_err:.1e}), left out")
                        continue
                    us = measured.timing.us
                    found.append(Timing(problem=problem_key(problem), kernel=name, version=kernel.version, m=m, us=us))
        except (DeepinferError, RuntimeError) as error:
            # One kernel that fails on this card must not cost the table of the others.
            report(f"  {name}: left out, {' '.join(str(error).split())[:200]}")
            continue
        times = ", ".join(f"{t.m}: {t.us:.1f}" for t in found if t.kernel == name)
        report(f"  {name}: {times or 'no M of these'} us")
    return found
