"""Which dense layers are worth the FP16 form on a CPU; asked before torch is imported."""

from __future__ import annotations

from deepinfer_core.plugin_api import LinearProblem

# Scaling x and out costs a dozen small operations, about 50 us; the product's gain is 15 to 30 %. They break even
# near a million weights (AVX2 EPYC, torch 2.13, 2026-11-30).
_LEAST_WEIGHTS = 4_000_000


def misfit(problem: LinearProblem) -> str | None:
    """Return why a layer is better held in BF16, or None."""
    weights = problem.n * problem.k
    if weights < _LEAST_WEIGHTS:
        return f"gains nothing below {_LEAST_WEIGHTS} weights, asked for {problem.n} x {problem.k} = {weights}"
    return None
