"""Random programs on two and three ranks: no placement changes a number, on any rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import pstar
from tests.programs import Chunked, Loop, Program, first_difference, placement_of
from tests.pstar.test_programs import SIMPLE


def case(rank: int, num_ranks: int, seeds: range, folder: str) -> dict[int, str]:
    """Seed to equal, refused, or the first difference on this rank."""
    torch.backends.mha.set_fastpath_enabled(False)    # as in test_programs.py
    try:
        return {seed: outcome(seed, rank, num_ranks, Path(folder) / str(seed)) for seed in seeds}
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def outcome(seed: int, rank: int, num_ranks: int, folder: Path) -> str:
    program = Program(seed, num_ranks)
    keys = placement_of(program, folder)
    (folder / "oracle").mkdir(parents=True, exist_ok=True)
    try:
        chunked = Chunked(program, keys, folder)
    except (pstar.BudgetError, pstar.ConfigError) as error:
        assert "too small" in str(error) and "\n" not in str(error), error
        return "refused"
    expected = Loop(Chunked(program, SIMPLE, folder / "oracle"), rank).run()
    try:
        found = Loop(chunked, rank).run()
    except pstar.BudgetError as error:    # the first step measures the activations
        assert "near_memory" in keys and "near_memory" in str(error), f"seed {seed}: {error}"
        return "refused"
    return first_difference(expected, found) or "equal"


def check(ranks, num_ranks: int, seeds: range, folder: Path) -> Counter[str]:
    """The outcomes of these seeds, the same on all ranks, each equal or refused."""
    results = ranks(num_ranks).run(case, seeds, str(folder), timeout=120)
    assert all(result == results[0] for result in results), results
    wrong = {seed: each for seed, each in results[0].items() if each not in ("equal", "refused")}
    assert not wrong, wrong
    return Counter(results[0].values())


def test_fifteen_random_programs_on_two_ranks(ranks, tmp_path):
    assert check(ranks, 2, range(15), tmp_path)["equal"] >= 7


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks, first", [(2, 1000), (2, 1050), (3, 2000)])
def test_fifty_random_programs_on_several_ranks(ranks, num_ranks, first, tmp_path):
    assert check(ranks, num_ranks, range(first, first + 50), tmp_path)["equal"] >= 25
