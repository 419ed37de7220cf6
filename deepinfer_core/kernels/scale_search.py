"""Scales and zeros of quantization groups: from the group's own range, or by a least-squares search."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor, maximum, minimum, where, zeros_like

FP16_MAX = 65504.0
FP16_TINY = 2.0**-24  # the smallest FP16 above 0: no scale rounds to 0, so nothing is ever divided by 0
_ZERO_MAX = 2000.0  # FP16 holds every integer up to 2048

# Parts of a group's range that the codes are tried to span.
_SHRINKS = tuple(1.0 - 0.06 * i for i in range(1, 8))
# Which end of the range a shrink gives up: both alike, the upper, the lower. Only a zero can follow the last two.
_SIDES = (0.0, -1.0, 1.0)
_REFINEMENTS = 5  # rounds of "best scale for these codes, best codes for this scale"


# Up to this many codes without a zero, an error counts by the size of the value that it meets: plain squares would
# rather clip the few large values of a group, which a model misses most. SmolLM2-135M (from its Q4_1 GGUF), W3 groups
# of 32, times the GGUF's perplexity over 520 tokens of prose / of a recited text: without zeros, plain 2.34 / 5.69,
# by |w| 1.98 / 4.58, by w squared no better; with zeros plain 2.48 / 8.25, and by |w| no better (2026-11-30).
_FEW_CODES = 8


@frozen
class Grid:
    """Scale and zero of each of B groups: the values that its codes can stand for.

    Attributes:
        scales: float32 ``[B]``, values that FP16 holds, never 0.
        zeros: float32 ``[B]``, values that FP16 holds; None without zeros.
    """

    scales: Tensor
    zeros: Tensor | None

    def codes(self, groups: Tensor, lo: int, hi: int) -> Tensor:
        """Return the nearest codes of ``[width, B]`` values, as float32 integers."""
        return self._positions(groups).round_().clamp_(lo, hi)

    def errors(self, groups: Tensor, lo: int, hi: int, importance: Tensor | None = None) -> Tensor:
        """Return each group's squared error with the nearest codes, ``[B]``, each value's times its importance."""
        positions = self._positions(groups)
        off = positions.round().clamp_(lo, hi).sub_(positions).square_()
        if importance is not None:
            off *= importance
        return off.sum(0).mul_(self.scales.square())

    def where(self, mask: Tensor, other: Grid) -> Grid:
        """Return ``other`` in the groups where ``mask`` ``[B]`` is true."""
        zeros = self.zeros
        if zeros is not None and other.zeros is not None:
            zeros = where(mask, other.zeros, zeros)
        return Grid(where(mask, other.scales, self.scales), zeros)

    def _positions(self, groups: Tensor) -> Tensor:
        positions = groups * self.scales.reciprocal()
        return positions if self.zeros is None else positions.add_(self.zeros)


def range_grid(groups: Tensor, lo: int, hi: int, *, zeros: bool) -> Grid:
    """Return the scale (and zero) at which no value is clipped.

    Args:
        groups: float32 ``[width, B]``, one group a column (so that torch's loops run over B), finite.
        lo: Smallest code.
        hi: Largest code.
        zeros: Give each group a zero. Without one the scale may be negative: that lets the longer side of the
            code range serve the longer side of the values.
    """
    top, bottom = groups.amax(0), groups.amin(0)
    if zeros:
        grid = _span(bottom, top, lo, hi)
    else:
        upright = maximum(top / hi, bottom / lo)
        flipped = maximum(bottom / -hi, top / -lo)
        grid = Grid(_storable(where(upright <= flipped, upright, -flipped)), None)
    return _exact_where_constant(grid, top, bottom)


def search_grid(groups: Tensor, lo: int, hi: int, *, zeros: bool) -> Grid:
    """Search the scale (and zero) with the least squared error; by that measure never worse than `range_grid`.

    Few codes without a zero weigh the errors by the size of the values. Shrunken ranges are scored first; from the
    best one on, the least-squares scale (and zero) for the codes, and the nearest codes for that scale, take turns.
    Arguments as in `range_grid`.
    """
    top, bottom = groups.amax(0), groups.amin(0)
    best = range_grid(groups, lo, hi, zeros=zeros)
    importance = groups.abs() if not zeros and hi - lo < _FEW_CODES else None
    least = best.errors(groups, lo, hi, importance)

    def keep_better(candidate: Grid) -> None:
        nonlocal best, least
        errors = candidate.errors(groups, lo, hi, importance)
        best = best.where(errors < least, candidate)
        least = minimum(errors, least)

    if zeros:
        for shrink in _SHRINKS:
            lost = (top - bottom) * ((1 - shrink) / 2)
            for side in _SIDES:
                keep_better(_span(bottom + lost * (1 + side), top - lost * (1 - side), lo, hi))
        keep_better(Grid(_storable(groups.mean(0)), zeros_like(least)))  # a group that is nearly constant
    else:
        extreme = where(top >= -bottom, top, bottom)
        for end in (lo, hi):
            for shrink in (1.0, *_SHRINKS):
                keep_better(Grid(_storable(extreme * (shrink / end)), None))
    for _ in range(_REFINEMENTS):
        keep_better(_least_squares(groups, best.codes(groups, lo, hi), best, importance))
    return _exact_where_constant(best, top, bottom)


def _span(bottom: Tensor, top: Tensor, lo: int, hi: int) -> Grid:
    """Put code lo at ``bottom`` and code hi at ``top``."""
    scales = _wide_enough((top - bottom) / (hi - lo), bottom)
    return Grid(scales, (lo - bottom / scales).half().float())


def _least_squares(groups: Tensor, codes: Tensor, grid: Grid, importance: Tensor | None) -> Grid:
    """Return the best scale (and zero) for these codes; ``grid`` stays where all codes of a group are the same."""
    if grid.zeros is None:
        weighted = codes if importance is None else codes * importance
        power = (weighted * codes).sum(0)
        scales = (weighted * groups).sum(0) / power
        return Grid(_storable(where(power > 0, scales, grid.scales)), None)
    code_mean, value_mean = codes.mean(0), groups.mean(0)
    spread = codes - code_mean
    power = spread.square().sum(0)
    scales = (spread * groups).sum(0) / power
    scales = _wide_enough(where(power > 0, scales, grid.scales), value_mean)
    return Grid(scales, (code_mean - value_mean / scales).half().float())


def _exact_where_constant(grid: Grid, top: Tensor, bottom: Tensor) -> Grid:
    """Give an all-zero group the smallest scale and zero 0; with zeros, a constant one its value as scale, zero 0.

    A constant group has no range to take a scale from, and its zero would overflow FP16. A scale of 1 for zeros would
    make the rounding errors of a kernel that folds a bias into its sums 1e-3 large where 0 is right (H200, 2026-11-30).
    """
    tiny = torch.full_like(grid.scales, FP16_TINY)
    if grid.zeros is None:
        return grid.where((top == 0) & (bottom == 0), Grid(tiny, None))
    constant = where(top.abs() < FP16_TINY, tiny, _storable(top))
    return grid.where(top == bottom, Grid(constant, zeros_like(grid.zeros)))


def _wide_enough(scales: Tensor, offset: Tensor) -> Tensor:
    """Keep ``offset / scale``, and so the zero, where FP16 still has a step of 1: half a code is lost at most."""
    floor = offset.abs() / _ZERO_MAX
    return _storable(where(scales < 0, minimum(scales, -floor), maximum(scales, floor)))


def _storable(scales: Tensor) -> Tensor:
    """Round to FP16, and keep clear of 0, infinity and NaN."""
    magnitude = scales.abs().clamp(FP16_TINY, FP16_MAX).half().float()
    return where(scales < 0, -magnitude, magnitude).nan_to_num_(nan=FP16_TINY)
