"""Selects the cases of a full product that the quick command runs, a covering array. The others are marked `deep`.

    @pytest.mark.each                        # quick: some case uses every value of every parameter
    @pytest.mark.pairs                       # quick: some case combines every two values of two parameters
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("near", ["min", "100%"])
    def test_x(num_ranks, near): ...

    @pytest.mark.parametrize("case", quick_only(CASES, "gpipe", "1f1b"))     # quick: these two

A case of two parameters is a pair, and a tuple as one parameter is one value: such a mark would leave out no case. It is an
error.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

STRENGTHS = {"each": 1, "pairs": 2}


def array(product: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Returns the indices of cases that together have every combination of `strength` values in the product.

    The choice is greedy and deterministic. Among cases with equally many new combinations it takes the one whose values
    were used least.
    """
    values = [list(enumerate(case)) for case in product]
    combinations = [set(itertools.combinations(case, min(strength, len(case)))) for case in values]
    missing, chosen, used = set().union(*combinations), [], Counter()
    while missing:
        best = max(range(len(product)),
                   key=lambda n: (len(combinations[n] & missing), -sum(used[value] for value in values[n]), -n))  # fmt: skip
        chosen.append(best)
        used.update(values[best])
        missing -= combinations[best]
    return sorted(chosen)


def quick_only(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns all cases and marks those not in `quick` as `deep`. Raises ValueError if a name is not among the cases."""
    cases = list(cases)
    if strangers := [name for name in quick if name not in cases]:
        raise ValueError(f"no such case: {strangers}")
    return [case if case in quick else pytest.param(case, marks=pytest.mark.deep) for case in cases]


def mark_deep(items: list[pytest.Item]) -> None:
    """Marks as `deep` the cases of `each` and `pairs` tests that a covering array does not need.

    Raises pytest.UsageError for a mark that can leave out no case.
    """
    products: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if any(item.get_closest_marker(name) for name in STRENGTHS):
            products.setdefault((str(item.path), item.originalname), []).append(item)
    for cases in products.values():
        mark, strength = max(((name, number) for name, number in STRENGTHS.items() if cases[0].get_closest_marker(name)),
                             key=lambda each: each[1])  # fmt: skip
        if len(cases[0].callspec.params) <= strength:
            raise pytest.UsageError(f"{cases[0].nodeid}: {mark} needs more than {strength} parameters: it keeps all cases")
        quick = array([tuple(map(repr, item.callspec.params.values())) for item in cases], strength)
        for number, item in enumerate(cases):
            if number not in quick:
                item.add_marker(pytest.mark.deep)
