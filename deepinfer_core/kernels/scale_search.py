"""Scales and zeros of quantization groups: from the group's own range, or by a least-squares search."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor, full_like, maximum, minimum, ones_like, where, zeros_like

FP16_MAX = 65504.0
_ZERO_MAX = 2000.0  # FP16 holds every integer up to 2048
FP16_TINY = 2.0**-24  # the smallest FP16 above 0: no scale rounds to 0, so nothing is ever divided by 0

# Parts of the group's range that the codes are tried to span. Below 0.5 no group of a real model ever ended.
_SHRINKS = tuple(1.0 - 0.04 * i for i in range(13))
# Which end of the range a shrink gives up: both alike, the upper, the lower. Only a zero can follow the last two.
_SIDES = (0.0, -1.0, 1.0)
_REFINEMENTS = 4  # rounds of "best scale for these codes, best codes for this scale"


@frozen
class GroupFit:
    """Codes of a batch of groups with the scale, and the zero or None, that they were rounded with.

    Attributes:
        codes: float32 integers ``[B, width]``.
        scales: float32 ``[B, 1]``, values that FP16 holds, never 0.
        zeros: float32 ``[B, 1]``, values that FP16 holds; None without zeros.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def values(self) -> Tensor:
        """Return what the codes stand for, float32 ``[B, width]``."""
        codes = self.codes if self.zeros is None else self.codes - self.zeros
        return codes * self.scales

    def errors(self, groups: Tensor) -> Tensor:
        """Return each group's squared error ``[B, 1]``."""
        return (self.values() - groups).square_().sum(1, keepdim=True)

    def where(self, mask: Tensor, other: GroupFit) -> GroupFit:
        """Return ``other`` in the groups where ``mask`` ``[B, 1]`` is true."""
        both = self.zeros is not None and other.zeros is not None
        return GroupFit(
            where(mask, other.codes, self.codes),
            where(mask, other.scales, self.scales),
            where(mask, other.zeros, self.zeros) if both else None,
        )


def fit_range(groups: Tensor, lo: int, hi: int, *, zeros: bool) -> GroupFit:
    """Round to nearest with the scale (and zero) at which no value is clipped.

    Args:
        groups: float32 ``[B, width]``, one group a row, finite.
        lo: Smallest code.
        hi: Largest code.
        zeros: Give each group a zero. Without one the scale may be negative: that lets the longer side of the
            code range serve the longer side of the values.
    """
    top, bottom = groups.amax(1, keepdim=True), groups.amin(1, keepdim=True)
    if zeros:
        fit = _fit_span(groups, bottom, top, lo, hi)
    else:
        upright = maximum(top / hi, bottom / lo)
        flipped = maximum(bottom / -hi, top / -lo)
        fit = _round_to(groups, where(upright <= flipped, upright, -flipped), None, lo, hi)
    return _exact_where_constant(fit, top, bottom)


def fit_search(groups: Tensor, lo: int, hi: int, *, zeros: bool) -> GroupFit:
    """Search the scale (and zero) with the least squared error; never worse than `fit_range`.

    A grid of shrunken ranges gives first codes; then the least-squares scale (and zero) for the codes, and the
    nearest codes for that scale, take turns. Arguments as in `fit_range`.
    """
    top, bottom = groups.amax(1, keepdim=True), groups.amin(1, keepdim=True)
    best = fit_range(groups, lo, hi, zeros=zeros)
    least = best.errors(groups)

    def keep_better(candidate: GroupFit) -> None:
        nonlocal best, least
        errors = candidate.errors(groups)
        better = errors < least
        best = best.where(better, candidate)
        least = minimum(errors, least)

    if zeros:
        for shrink in _SHRINKS:
            for side in _SIDES if shrink < 1 else (0.0,):
                lost = (top - bottom) * ((1 - shrink) / 2)
                first = _fit_span(groups, bottom + lost * (1 + side), top - lost * (1 - side), lo, hi)
                keep_better(_least_squares(groups, first, lo, hi))
    else:
        extreme = where(top >= -bottom, top, bottom)
        for end in (lo, hi):
            for shrink in _SHRINKS:
                first = _round_to(groups, extreme * (shrink / end), None, lo, hi)
                keep_better(_least_squares(groups, first, lo, hi))
    for _ in range(_REFINEMENTS):
        keep_better(_least_squares(groups, best, lo, hi))
    return _exact_where_constant(best, top, bottom)


def _fit_span(groups: Tensor, bottom: Tensor, top: Tensor, lo: int, hi: int) -> GroupFit:
    """Round with code lo at ``bottom`` and code hi at ``top``."""
    scales = _wide_enough((top - bottom) / (hi - lo), bottom)
    return _round_to(groups, scales, lo - bottom / scales, lo, hi)


def _wide_enough(scales: Tensor, offset: Tensor) -> Tensor:
    """Keep ``offset / scale``, and so the zero, where FP16 still has a step of 1: half a code is lost at most."""
    floor = offset.abs() / _ZERO_MAX
    return _storable_scale(where(scales < 0, minimum(scales, -floor), maximum(scales, floor)))


def _round_to(groups: Tensor, scales: Tensor, zeros: Tensor | None, lo: int, hi: int) -> GroupFit:
    """Round scale and zero to FP16, then each value to the nearest code."""
    scales = _storable_scale(scales)
    codes = groups / scales
    if zeros is not None:
        zeros = zeros.half().float()
        codes += zeros
    return GroupFit(codes.round_().clamp_(lo, hi), scales, zeros)


def _least_squares(groups: Tensor, fit: GroupFit, lo: int, hi: int) -> GroupFit:
    """Take the best scale (and zero) for the codes of ``fit``, then the nearest codes for them."""
    codes = fit.codes
    if fit.zeros is None:
        power = codes.square().sum(1, keepdim=True)
        scales = (codes * groups).sum(1, keepdim=True) / power
        return _round_to(groups, where(power > 0, scales, fit.scales), None, lo, hi)
    code_mean, value_mean = codes.mean(1, keepdim=True), groups.mean(1, keepdim=True)
    spread = codes - code_mean
    power = spread.square().sum(1, keepdim=True)
    slope = (spread * groups).sum(1, keepdim=True) / power
    scales = _wide_enough(where(power > 0, slope, fit.scales), value_mean)
    return _round_to(groups, scales, code_mean - value_mean / scales, lo, hi)


def _exact_where_constant(fit: GroupFit, top: Tensor, bottom: Tensor) -> GroupFit:
    """Store an all-zero group as code 0 and scale 1; with zeros, any constant group as its value, code 1, zero 0.

    A constant group has no range to take a scale from, and its zero would overflow FP16.
    """
    nothing = (top == 0) & (bottom == 0)
    blank = zeros_like(fit.codes)
    fit = fit.where(nothing, GroupFit(blank, ones_like(fit.scales), _none_or_zero(fit.zeros)))
    if fit.zeros is None:
        return fit
    constant = (top == bottom) & (top.abs() >= FP16_TINY)
    return fit.where(constant, GroupFit(full_like(blank, 1.0), _storable_scale(top), zeros_like(fit.zeros)))


def _none_or_zero(zeros: Tensor | None) -> Tensor | None:
    return None if zeros is None else zeros_like(zeros)


def _storable_scale(scales: Tensor) -> Tensor:
    """Round to FP16, and keep clear of 0, infinity and NaN."""
    magnitude = scales.abs().clamp(FP16_TINY, FP16_MAX).half().float()
    return where(scales < 0, -magnitude, magnitude).nan_to_num_(nan=1.0)
