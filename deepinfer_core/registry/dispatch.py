"""The table from M to kernel: made once a problem class, read by bisect; and core's fallback that fills gaps."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import cast

from attrs import field, frozen

from deepinfer_core.errors import KernelError
from deepinfer_core.plugin_api import (
    LinearKernel,
    LinearKernelSpec,
    LinearProblem,
    MRange,
    WeightLayout,
    WeightLayoutSpec,
)
from deepinfer_core.registry.catalog import Registered, make

FALLBACK = "core.dequantize_matmul"
FALLBACK_FACTORY = "deepinfer_core.kernels.fallback:DequantizeMatmul"


@frozen(kw_only=True)
class DispatchRow:
    """One line of the table.

    Attributes:
        m: Rows that this line serves.
        kernel: What serves them.
        measured_us: Microseconds that `deepinfer tune` measured on this device at ``m.hi`` (or the nearest measured
            M); None where nothing was measured.
        why: Why this kernel: ``pinned``, ``measured``, ``priority 20``, ``narrower``, ``only candidate``,
            ``fallback``.
    """

    m: MRange
    kernel: Registered[LinearKernelSpec]
    measured_us: float | None = None
    why: str


@frozen
class DispatchTable:
    """Rows that cover M = 1..m_max without a gap or an overlap, in ascending order."""

    rows: tuple[DispatchRow, ...]
    _highs: tuple[int, ...] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        assert self.rows, "a dispatch table has rows"
        assert self.rows[0].m.lo == 1, "a dispatch table begins at M = 1"
        for row, following in pairwise(self.rows):
            assert row.m.hi + 1 == following.m.lo, f"rows {row.m} and {following.m} do not meet"
        object.__setattr__(self, "_highs", tuple(row.m.hi for row in self.rows))

    @property
    def m_max(self) -> int:
        """Largest M that the table serves."""
        return self._highs[-1]

    def kernel_for(self, m: int) -> DispatchRow:
        """Return the row that serves M rows of input.

        Raises:
            KernelError: M is not in 1..m_max.
        """
        if not 1 <= m <= self._highs[-1]:
            raise KernelError(f"M = {m} was asked of a dispatch table that covers M = 1..{self._highs[-1]}")
        return self.rows[bisect_left(self._highs, m)]

    def kernels(self) -> tuple[Registered[LinearKernelSpec], ...]:
        """Return the kernels in use, each once, in order of M."""
        return tuple({row.kernel.spec.name: row.kernel for row in self.rows}.values())


def fallback_spec(layout: WeightLayoutSpec, problem: LinearProblem) -> LinearKernelSpec:
    """Return the descriptor of core's dequantize + matmul over one layout, for any M."""
    return LinearKernelSpec(
        name=FALLBACK,
        scheme=layout.scheme,
        layout=layout.name,
        device=problem.device,
        factory=FALLBACK_FACTORY,
        m=MRange(1),
        act_dtypes=layout.act_dtypes,
        epilogues=("none", "residual"),
        priority=-(1 << 30),
        graph_safe=False,
        float32_out=True,
    )


def timing_name(spec: LinearKernelSpec) -> str:
    """Return the name under which a kernel is measured: the fallback's speed depends on the layout that it decodes."""
    return f"{spec.name}@{spec.layout}" if spec.name == FALLBACK else spec.name


def make_kernel(kernel: Registered[LinearKernelSpec], problem: LinearProblem, layout: WeightLayout) -> LinearKernel:
    """Bind a kernel to a problem; core's fallback is the one kernel that also gets the layout's object.

    Raises:
        PluginError: The factory cannot be imported or raises.
    """
    arguments: tuple[object, ...] = (problem, layout) if kernel.spec.name == FALLBACK else (problem,)
    return cast(LinearKernel, make(kernel.spec.factory, kernel, *arguments))
