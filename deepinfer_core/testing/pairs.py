"""Few cases out of many: a choice in which every two values of different axes meet at least once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cases(
    axes: Mapping[str, Sequence[Any]], fits: Callable[[dict[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Choose cases greedily until every pair of values that can occur together does.

    Args:
        axes: Name -> values, hashable. Most faults need one value or two at once to show (a short last group with
            zeros, an odd K with a bias), so pairs find nearly what the whole product would, in a tenth of the time.
        fits: Whether a combination is possible at all.

    Returns:
        The same cases in the same order every time.
    """
    names = tuple(axes)
    possible = [case for case in product(*axes.values()) if fits(dict(zip(names, case, strict=True)))]
    pairs: dict[tuple[Any, ...], frozenset[Any]] = {
        case: frozenset(combinations(enumerate(case), 2)) or frozenset({case}) for case in possible
    }
    having: dict[Any, list[tuple[Any, ...]]] = {}
    for case in possible:
        for pair in combinations(enumerate(case), 2) if len(names) > 1 else [case]:
            having.setdefault(pair, []).append(case)
    missing: dict[Any, None] = dict.fromkeys(having)  # in order, which a set would not keep from run to run
    chosen = []
    while missing:
        best = max(having[next(iter(missing))], key=lambda case: len(pairs[case] & missing.keys()))
        for pair in pairs[best]:
            missing.pop(pair, None)
        chosen.append(dict(zip(names, best, strict=True)))
    return chosen
