"""Chooses the layout of one linear problem, then a kernel for every M, with a reason for all that was not chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log as ln

from attrs import frozen

from deepinfer_core.errors import SelectionError
from deepinfer_core.plugin_api import LinearKernelSpec, LinearProblem, MRange, WeightLayoutSpec
from deepinfer_core.registry.catalog import Catalog, Registered
from deepinfer_core.registry.choice import LinearChoice
from deepinfer_core.registry.dispatch import FALLBACK, DispatchRow, DispatchTable, fallback_spec, timing_name
from deepinfer_core.registry.fit import capability_text, kernel_misfit, layout_misfit
from deepinfer_core.registry.pins import pin_at, read_pins
from deepinfer_core.registry.select_attention import AttentionSelection, select_attention
from deepinfer_core.registry.tuning import Timings

__all__ = ["AttentionSelection", "LinearChoice", "Rejection", "Selection", "select_attention", "select_linear"]

LINEAR_KINDS = ("linear backend", "scheme", "layout", "kernel")
"""What a plugin may bring to a linear layer; one that failed before it said anything may have been to bring it."""

Kernel = Registered[LinearKernelSpec]
Layout = Registered[WeightLayoutSpec]


@frozen(kw_only=True)
class Rejection:
    """A candidate that serves no M, and why."""

    kernel: Kernel
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel.spec.name} ({self.kernel.origin}): {self.reason}"


@frozen(kw_only=True)
class Selection:
    """What serves a problem.

    Attributes:
        problem: What was asked.
        layout: The one resident layout of the weights.
        table: M -> kernel.
        rejected: Every other kernel of the scheme, with the reason.
        warnings: What a start-up log must say, free of the shape so that equal texts can be shown once.
    """

    problem: LinearProblem
    layout: Layout
    table: DispatchTable
    rejected: tuple[Rejection, ...]
    warnings: tuple[str, ...]


def select_linear(
    catalog: Catalog, problem: LinearProblem, choice: LinearChoice | None = None, timings: Timings | None = None
) -> Selection:
    """Choose layout and kernels: name in the config, hard fit, measured table, priority, narrower M, else an error.

    Registration order decides nothing.

    Args:
        catalog: What is installed.
        problem: What one layer asks.
        choice: What the config asks for the scheme; all automatic when None.
        timings: The measured table of this device.

    Raises:
        SelectionError: An unknown name, a pin or backend that cannot serve (with the reason), a tie (naming both), or
            a range of M that nothing serves (with every candidate's reason).
    """
    return _Selector(catalog, problem, choice or LinearChoice(), timings or Timings()).select()


class _Selector:
    """The state of one selection."""

    def __init__(self, catalog: Catalog, problem: LinearProblem, choice: LinearChoice, timings: Timings) -> None:
        self.catalog = catalog
        self.problem = problem
        self.timings = timings
        self.strict = choice.strict
        self.experimental = choice.allow_experimental
        self.scheme = catalog.scheme(problem.scheme)
        self.backend = None if choice.backend == "auto" else catalog.backend(choice.backend).spec.name
        self.pins = read_pins(catalog, problem, choice.kernels)
        self.reasons: dict[str, str] = {}
        self.candidates: tuple[Kernel, ...] = ()

    def select(self) -> Selection:
        of_scheme = [k for k in self.catalog.kernels.values() if k.spec.scheme == self.scheme.spec.name]
        for kernel in of_scheme:
            reason = self._reason_against(kernel)
            if reason is not None:
                self.reasons[kernel.spec.name] = reason
        self.candidates = tuple(k for k in of_scheme if k.spec.name not in self.reasons)
        layout = self._layout()
        table = self._table(layout)
        return Selection(
            problem=self.problem,
            layout=layout,
            table=table,
            rejected=tuple(self._rejections(of_scheme, layout, table)),
            warnings=tuple(self._warnings(table)),
        )

    def _reason_against(self, kernel: Kernel) -> str | None:
        """Return why a kernel serves no M that is not pinned to it."""
        if self.backend is not None and kernel.backend != self.backend:
            return f"belongs to backend {kernel.backend!r}; the config names {self.backend!r}"
        misfit = kernel_misfit(self.catalog, kernel, self.problem)
        if misfit is None and kernel.spec.stability == "experimental" and not self.experimental:
            return "experimental: name it under kernels, or set allow_experimental = true"
        return misfit

    def _layout(self) -> Layout:
        """Choose the one resident layout: pins fix it; else measured figures, else the best kernel at M = 1.

        Core's fallback completes any layout that fits, so each covers 1..m_max; in strict mode it does not.
        """
        named = {pin.kernel.spec.layout for pin in self.pins if pin.kernel is not None}
        if len(named) > 1:
            reads = ", ".join(
                f"{pin.m} = {pin.name} reads {pin.kernel.spec.layout}" for pin in self.pins if pin.kernel is not None
            )
            raise self._error(f"the pinned kernels do not share a layout ({reads}); weights are kept once")
        if named:
            return self.catalog.layouts[named.pop()]
        by_layout: dict[str, list[Kernel]] = {}
        for kernel in self.candidates:
            by_layout.setdefault(kernel.spec.layout, []).append(kernel)
        complete = {name: kernels for name, kernels in by_layout.items() if self._covers(kernels)}
        contest = complete if self.strict and complete else by_layout
        if contest:
            return self.catalog.layouts[self._best_layout(contest)]
        return self._layout_without_kernels()

    def _covers(self, kernels: Iterable[Kernel]) -> bool:
        ranges = [k.spec.m for k in kernels] + [pin.m for pin in self.pins]
        reached = 0
        for m in sorted(ranges):
            if m.lo <= reached + 1:
                reached = max(reached, m.hi)
        return reached >= self.problem.m_max

    def _best_layout(self, contest: Mapping[str, list[Kernel]]) -> str:
        if len(contest) == 1:
            return next(iter(contest))
        measured = self._fastest_layout(contest)
        if measured is not None:
            return measured
        everyone = [k for kernels in contest.values() for k in kernels]
        for m in self._edges(everyone):
            serving = [k for k in everyone if m in k.spec.m]
            if serving:
                best = min(_rank(k) for k in serving)
                winners = [k for k in serving if _rank(k) == best]
                if len({k.spec.layout for k in winners}) > 1:
                    raise self._tie(winners, m)
                return winners[0].spec.layout
        raise AssertionError("candidates that fit serve at least one M")

    def _fastest_layout(self, contest: Mapping[str, list[Kernel]]) -> str | None:
        """Return the layout with the smallest geometric mean over the Ms at which every measured layout has a figure.

        Each M counts alike: a layout that is 1 % faster at M = 1 and five times slower at 512 must not win.
        """
        times = {name: self._layout_times(name, kernels) for name, kernels in contest.items()}
        times = {name: by_m for name, by_m in times.items() if by_m}
        common = set.intersection(*(set(by_m) for by_m in times.values())) if times else set()
        if not common:
            return None
        cost = {name: sum(ln(by_m[m]) for m in sorted(common)) for name, by_m in times.items()}
        winners = [name for name, value in cost.items() if value == min(cost.values())]
        return winners[0] if len(winners) == 1 else None

    def _layout_times(self, layout: str, kernels: Iterable[Kernel]) -> dict[int, float]:
        """Return M -> the best measured time that a layout can offer there, its fallback where no kernel serves."""
        fallback = Registered.by_core(fallback_spec(self.catalog.layouts[layout].spec, self.problem))
        times: dict[int, float] = {}
        for m in sorted({m for k in [*kernels, fallback] for m in self._measured_ms(k)}):
            offers = [k for k in kernels if m in k.spec.m] or [fallback]
            measured = [us for k in offers if (us := self._us(k, MRange(m, m))) is not None]
            if measured:
                times[m] = min(measured)
        return times

    def _layout_without_kernels(self) -> Layout:
        """Choose a layout for core's fallback alone: nothing but its decoder matters, so any lossless one will do."""
        fitting, reasons = [], []
        for layout in self.catalog.layouts.values():
            if layout.spec.scheme != self.scheme.spec.name:
                continue
            misfit = layout_misfit(layout.spec, self.problem)
            if misfit is None and self.backend is not None and layout.backend != self.backend:
                misfit = f"belongs to backend {layout.backend!r}; the config names {self.backend!r}"
            if misfit is None:
                fitting.append(layout)
            else:
                reasons.append(f"layout {layout.spec.name}: {misfit}")
        if not fitting or (self.strict and not self.pins):
            whose = f"backend {self.backend!r} cannot serve" if self.backend is not None else "nothing serves"
            raise self._error(f"{whose} any M", reasons)
        return min(fitting, key=lambda x: (not x.spec.lossless, -len(x.spec.devices), x.spec.name))

    def _table(self, layout: Layout) -> DispatchTable:
        kernels = [k for k in self.candidates if k.spec.layout == layout.spec.name]
        edges = self._edges(kernels)
        rows: list[DispatchRow] = []
        for lo, following in zip(edges, [*edges[1:], self.problem.m_max + 1], strict=True):
            m = MRange(lo, following - 1)
            rows.append(self._row(m, layout, kernels))
        return DispatchTable(tuple(_merged(rows)))

    def _edges(self, kernels: Iterable[Kernel]) -> list[int]:
        """Return every M at which the candidates may change, ascending from 1."""
        edges = {1}
        for m in [*(k.spec.m for k in kernels), *(pin.m for pin in self.pins)]:
            edges |= {m.lo, m.hi + 1}
        for kernel in kernels:
            edges |= {m + 1 for m in self._measured_ms(kernel)}
        return sorted(m for m in edges if m <= self.problem.m_max)

    def _measured_ms(self, kernel: Kernel) -> list[int]:
        ms = self.timings.measured(self.problem, timing_name(kernel.spec), kernel.version)
        return [m for m in ms if m in kernel.spec.m and m <= self.problem.m_max]

    def _row(self, m: MRange, layout: Layout, kernels: Iterable[Kernel]) -> DispatchRow:
        pin = pin_at(self.pins, m.lo)
        if pin is not None:
            kernel = pin.kernel or self._fallback(m, layout)
            return DispatchRow(m=m, kernel=kernel, measured_us=self._us(kernel, m), why="pinned")
        serving = [k for k in kernels if m.lo in k.spec.m]
        if not serving:
            if self.strict:
                raise self._error(f"strict mode, and no kernel of layout {layout.spec.name!r} serves M = {m}")
            fallback = self._fallback(m, layout)
            return DispatchRow(m=m, kernel=fallback, measured_us=self._us(fallback, m), why="fallback")
        if len(serving) == 1:
            return DispatchRow(m=m, kernel=serving[0], measured_us=self._us(serving[0], m), why="only candidate")
        times = {k.spec.name: us for k in serving if (us := self._us(k, m)) is not None}
        if times:
            serving = [k for k in serving if times.get(k.spec.name) == min(times.values())]
            if len(serving) == 1:
                return DispatchRow(m=m, kernel=serving[0], measured_us=times[serving[0].spec.name], why="measured")
        best = min(_rank(k) for k in serving)
        winners = [k for k in serving if _rank(k) == best]
        if len(winners) > 1:
            raise self._tie(winners, m.lo)
        alone = sum(k.spec.priority == winners[0].spec.priority for k in serving) == 1
        why = f"priority {winners[0].spec.priority}" if alone else "narrower"
        return DispatchRow(m=m, kernel=winners[0], measured_us=times.get(winners[0].spec.name), why=why)

    def _us(self, kernel: Kernel, m: MRange) -> float | None:
        return self.timings.lookup(self.problem, m.hi, timing_name(kernel.spec), kernel.version)

    def _fallback(self, m: MRange, layout: Layout) -> Kernel:
        spec = fallback_spec(layout.spec, self.problem)
        reason = layout_misfit(layout.spec, self.problem)
        if self.problem.epilogue not in spec.epilogues:
            reason = f"it serves epilogue {', '.join(spec.epilogues)}, asked for {self.problem.epilogue}"
        if reason is not None:
            raise self._error(f"no kernel of layout {layout.spec.name!r} serves M = {m}, nor does {FALLBACK}: {reason}")
        return Registered.by_core(spec)

    def _rejections(self, of_scheme: list[Kernel], layout: Layout, table: DispatchTable) -> Iterable[Rejection]:
        used = {k.spec.name for k in table.kernels()}
        for kernel in of_scheme:
            name, m = kernel.spec.name, kernel.spec.m
            if name in used:
                continue
            reason = self.reasons.get(name)
            if reason is None and kernel.spec.layout != layout.spec.name:
                reason = f"reads layout {kernel.spec.layout!r}; {layout.spec.name!r} was chosen, weights are kept once"
            if reason is None:
                rows = (r for r in table.rows if r.m.lo <= m.hi and m.lo <= r.m.hi)
                reason = "outranked by " + ", ".join(dict.fromkeys(f"{r.kernel.spec.name} ({r.why})" for r in rows))
            yield Rejection(kernel=kernel, reason=reason)

    def _warnings(self, table: DispatchTable) -> Iterable[str]:
        scheme, where = self.scheme.spec.name, _where(self.problem)
        for row in table.rows:
            if row.why == "fallback":
                yield (
                    f"{scheme} on {where}: no kernel serves M = {row.m}; {FALLBACK} fills in "
                    "(`deepinfer explain` lists why)"
                )
        failed = [f for f in self.catalog.faults if not f.brings or any(kind in LINEAR_KINDS for kind, _ in f.brings)]
        if self.backend is None and failed:
            names = ", ".join(f"{f.name} ({f.distribution} {f.version})" for f in failed)
            chosen = ", ".join(k.spec.name for k in table.kernels())
            yield f"{scheme} on {where}: chosen without plugins that were held back: {names}; it runs on {chosen}"

    def _tie(self, kernels: Iterable[Kernel], m: int) -> SelectionError:
        both = " and ".join(f"{k.spec.name!r} ({k.origin})" for k in sorted(kernels, key=lambda k: k.spec.name))
        first = min(k.spec.name for k in kernels)
        return self._error(
            f"{both} tie at M = {m}: same priority, same width; "
            f'choose with [linear.{self.scheme.spec.name}] kernels = {{ "{m}" = "{first}" }} or backend = ...'
        )

    def _error(self, text: str, more: Iterable[str] = ()) -> SelectionError:
        lines = [*more, *(f"{name}: {reason}" for name, reason in self.reasons.items())]
        detail = "".join(f"\n  {line}" for line in lines)
        p = self.problem
        zeros = " with zeros" if p.zeros else ""
        what = f"{p.scheme} {p.n} x {p.k} group {p.group_size}{zeros} on {_where(p)}, M = 1..{p.m_max}"
        return SelectionError(f"{what}: {text}{detail}")


def _rank(kernel: Kernel) -> tuple[int, int]:
    """Order of candidates that nothing else tells apart: higher priority first, then the narrower range of M."""
    return -kernel.spec.priority, kernel.spec.m.width


def _where(problem: LinearProblem) -> str:
    card = f" {capability_text(problem.capability)}" if problem.device == "cuda" else ""
    return f"{problem.device}{card} {problem.act_dtype}"


def _merged(rows: Iterable[DispatchRow]) -> list[DispatchRow]:
    """Join neighbours that say the same."""
    merged: list[DispatchRow] = []
    for row in rows:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.kernel == row.kernel
            and (last.measured_us, last.why) == (row.measured_us, row.why)
        ):
            merged[-1] = DispatchRow(
                m=MRange(last.m.lo, row.m.hi), kernel=row.kernel, measured_us=row.measured_us, why=row.why
            )
        else:
            merged.append(row)
    return merged
