"""Random programs on two and three ranks: no placement changes a number, on any rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.pstar.test_programs import judge, outcomes_of


def case(rank: int, num_ranks: int, seeds: range, folder: Path) -> dict[int, str]:
    return outcomes_of(seeds, folder, rank, num_ranks)


def check(ranks, num_ranks: int, seeds: range, folder: Path) -> Counter[str]:
    """Counts the outcomes of these seeds, which are the same on all ranks."""
    results = ranks(num_ranks).run(case, seeds, folder, timeout=120)
    assert all(result == results[0] for result in results), results
    return judge(results[0])


def test_fifteen_random_programs_on_two_ranks(ranks, tmp_path):
    assert check(ranks, 2, range(15), tmp_path)["equal"] >= 7


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks, first", [(2, 1000), (2, 1050), (3, 2000)])
def test_fifty_random_programs_on_several_ranks(ranks, num_ranks, first, tmp_path):
    assert check(ranks, num_ranks, range(first, first + 50), tmp_path)["equal"] >= 25
