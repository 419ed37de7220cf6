"""What a step will take: the linear cost of a forward, and its fit to measured steps, a little with each."""

from __future__ import annotations

import math
from statistics import median

from attrs import evolve, frozen

from deepinfer_core.plugin_api import StepFeedback

Prices = tuple[float, float, float, float]


@frozen(kw_only=True)
class StepCost:
    """Milliseconds of a step: base + prefill tokens + decode rows + context tokens, each at its price.

    While a forward reads weights, a few tokens more cost nothing: ``free_tokens`` of them, decode rows first.

    Attributes:
        base_ms: A forward of any size.
        prefill_token_ms: One prompt token beyond the free ones.
        decode_row_ms: One decode row beyond the free ones.
        context_token_ms: One context token that attention reads.
        free_tokens: Tokens of a step that are paid by ``base_ms``.
    """

    base_ms: float
    prefill_token_ms: float
    decode_row_ms: float
    context_token_ms: float
    free_tokens: int = 0

    @classmethod
    def small_card(cls) -> StepCost:
        """A 3B model in W4 on a card with 192 GB/s and 12 TFLOP/s: 9 ms to read the weights, 0.5 ms a token."""
        return cls(base_ms=9.0, prefill_token_ms=0.5, decode_row_ms=0.5, context_token_ms=0.00019, free_tokens=16)

    @property
    def prices(self) -> Prices:
        """The four prices in the order of `amounts`."""
        return self.base_ms, self.prefill_token_ms, self.decode_row_ms, self.context_token_ms

    def amounts(self, prefill_tokens: int, decode_rows: int, context: int) -> Prices:
        """Return what each price is paid for: once, prefill tokens, decode rows, context tokens."""
        rows = max(0, decode_rows - self.free_tokens)
        prefill = max(0, prefill_tokens - max(0, self.free_tokens - decode_rows))
        return 1.0, float(prefill), float(rows), float(context)

    def predict_ms(self, prefill_tokens: int, decode_rows: int, context: int) -> float:
        """Return the milliseconds of a step; see `CostModel`."""
        once, prefill, rows, read = self.amounts(prefill_tokens, decode_rows, context)
        return (
            self.base_ms * once
            + self.prefill_token_ms * prefill
            + self.decode_row_ms * rows
            + self.context_token_ms * read
        )

    def with_prices(self, prices: Prices) -> StepCost:
        """Return the same cost at other prices."""
        base, prefill, row, context = prices
        return evolve(self, base_ms=base, prefill_token_ms=prefill, decode_row_ms=row, context_token_ms=context)


class OnlineCost:
    """A `StepCost` fitted to what steps really took: least squares that forgets, with prices that are never negative.

    The first steps only scale the prior by the median of measured over predicted, so one slow first step (memory,
    compilation) does not spoil the fit. After that a step far from its prediction counts less the farther it is, unless
    most are: then what is taken for far grows, and the fit follows. The first steps that tell a price, such as chunks
    after many decodes, are not taken for odd ones. Errors count relative to the step's size.

    Args:
        prior: Prices to begin with; they stay for what steps never vary.
        forget: Weight of a step after one more has come; 0.98 remembers about fifty.
    """

    WARM_UP = 5
    FAR = 3.0  # typical errors
    LEAST_ERROR = 0.02  # of a step: what is nearer than this is never far
    NEWS = 0.25  # of all that is known of a price: the first four steps that tell it
    MATTERS = 0.1  # of a step: a price of less is not told by it
    PLAUSIBLE = 9.0  # error of a price that was only guessed
    PRIOR_WEIGHT = 0.01  # of one step, for each price
    REFIT_EVERY = 16  # steps, where nobody asks in between: the weights of the next ones look at the fit

    def __init__(self, prior: StepCost | None = None, forget: float = 0.98) -> None:
        self._given = self._prior = self._fit = prior or StepCost.small_card()
        self._units = _units(self._prior)
        self._forget = forget
        self._first: list[StepFeedback] = []
        self._normal = [[0.0] * 4 for _ in range(4)]
        self._target = [0.0] * 4
        self._typical = 0.0
        self._unfitted = 0
        self.steps = 0

    @property
    def fitted(self) -> StepCost:
        """The prices as they are known now."""
        if self._unfitted:
            self._refit()
        return self._fit

    def predict_ms(self, prefill_tokens: int, decode_rows: int, context: int) -> float:
        """Return the milliseconds of a step; see `CostModel`."""
        return self.fitted.predict_ms(prefill_tokens, decode_rows, context)

    def observe(self, feedback: StepFeedback) -> None:
        """Learn from a finished step. Without work or time, or out of memory, it teaches nothing."""
        empty = feedback.prefill_tokens + feedback.decode_rows <= 0
        if feedback.out_of_memory or empty or not (math.isfinite(feedback.ms) and feedback.ms > 0):
            return
        self.steps += 1
        if self.steps > self.WARM_UP:
            self._add(feedback)
            return
        self._first.append(feedback)
        ratio = median(step.ms / _predict(self._given, step) for step in self._first)
        self._prior = self._fit = self._given.with_prices(_scaled(self._given.prices, ratio))
        self._units = _units(self._prior)
        if self.steps == self.WARM_UP:
            self._typical = median(abs(step.ms / _predict(self._prior, step) - 1) for step in self._first)
            for step in self._first:
                self._add(step)

    def _add(self, step: StepFeedback) -> None:
        predicted = _predict(self._fit, step)
        amounts = self._prior.amounts(step.prefill_tokens, step.decode_rows, step.context)
        parts = [unit * amount / predicted for unit, amount in zip(self._units, amounts, strict=True)]
        error = abs(step.ms / predicted - 1)
        far = self.FAR * max(self._typical, self.LEAST_ERROR)
        weight = 1.0 if error <= far or (error <= self.PLAUSIBLE and self._is_news(parts)) else far / error
        self._typical += 0.1 * (min(error, 2 * far) - self._typical)
        for i, part in enumerate(parts):
            row = self._normal[i]
            for j, other in enumerate(parts):
                row[j] = row[j] * self._forget + weight * part * other
            self._target[i] = self._target[i] * self._forget + weight * part * step.ms / predicted
        self._unfitted += 1
        if self._unfitted >= self.REFIT_EVERY:
            self._refit()

    def _is_news(self, parts: list[float]) -> bool:
        """Whether a step is among the first to tell a price: what is far from a guess is no outlier."""
        known = (self._normal[i][i] + self.PRIOR_WEIGHT for i in range(4))
        return self.steps > self.WARM_UP and any(
            part > self.MATTERS and part * part > self.NEWS * seen for part, seen in zip(parts, known, strict=True)
        )

    def _refit(self) -> None:
        """Solve for each price, at least 0, drawn weakly to what it was: one that steps do not tell stays."""
        normal = [row[:] for row in self._normal]
        target = self._target[:]
        for i, (price, unit) in enumerate(zip(self._fit.prices, self._units, strict=True)):
            normal[i][i] += self.PRIOR_WEIGHT
            target[i] += self.PRIOR_WEIGHT * price / unit
        multiples = _solve_not_negative(normal, target)
        base, prefill, row, context = (m * unit for m, unit in zip(multiples, self._units, strict=True))
        self._fit = self._prior.with_prices((max(base, 1e-6), prefill, row, context))
        self._unfitted = 0


def _units(cost: StepCost) -> Prices:
    """Return the prices to fit multiples of; those that are nothing get a part of the base."""
    base, prefill, row, context = cost.prices
    base = max(base, 1e-6)
    return base, max(prefill, base / 256), max(row, base / 16), max(context, base / 16384)


def _predict(cost: StepCost, step: StepFeedback) -> float:
    return max(1e-6, cost.predict_ms(step.prefill_tokens, step.decode_rows, step.context))


def _scaled(prices: Prices, ratio: float) -> Prices:
    base, prefill, row, context = prices
    return base * ratio, prefill * ratio, row * ratio, context * ratio


def _solve_not_negative(normal: list[list[float]], target: list[float]) -> list[float]:
    """Return the least-squares solution with no negative part: the most negative one is set to 0, and again."""
    free = list(range(len(target)))
    while True:
        part = _solve([[normal[i][j] for j in free] for i in free], [target[i] for i in free])
        worst = min(range(len(free)), key=part.__getitem__)
        if part[worst] >= 0 or len(free) == 1:
            solution = [0.0] * len(target)
            for place, value in zip(free, part, strict=True):
                solution[place] = max(0.0, value)
            return solution
        del free[worst]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution
