"""The table of unprepared models and forwards: the committed one is complete, and no row deviates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import any_module  # noqa: E402

pytest.importorskip("transformers")
PAGE = (BENCHMARKS / "results" / "any_module.md").read_text(encoding="utf-8")


def test_the_committed_table_has_every_model_pattern_and_operation() -> None:
    from tests.borrowers import PATTERNS
    from tests.pstar.chunks.test_borrowed import NOT_ASKING, OPERATIONS
    from tests.pstar.test_zoo import ZOO

    firsts = [line.split("|")[1].strip().strip("`") for line in PAGE.splitlines() if line.startswith("| ")]
    heads = {"model", "a forward or a loop with", "between two steps",
             "a forward that reads a parameter of another module in"}  # fmt: skip
    rows = [first for first in firsts[: firsts.index("where lending costs")] if first not in heads]
    assert rows == [*ZOO, *PATTERNS, *OPERATIONS, *NOT_ASKING], "renew: any_module.sh"
    assert "**off**" not in PAGE and "| `works` |" not in PAGE


def test_a_row_is_measured() -> None:
    from tests.borrowers import TiedByLinear, rows

    worst, num_params, near, start = any_module.gap(TiedByLinear, lambda model, step: model(rows(step)))
    assert worst < any_module.GOAL and num_params == sum(p.numel() for p in TiedByLinear().parameters())
    assert 0 < near < 1 and start == "lazy"


def test_a_row_that_is_off_is_marked() -> None:
    class Another(torch.nn.Linear):
        """A layer whose loss differs in the engine."""

    worst, *_ = any_module.gap(lambda: Another(4, 1), lambda model, step: model(torch.ones(2, 4)).mean() * (
        1.0 if isinstance(model, Another) else 1.001))  # fmt: skip
    assert worst > any_module.GOAL
    assert any_module.mark(worst).endswith(", **off**") and any_module.mark(0.0) == "0"


def test_lending_costs_at_most_a_hundredth_of_a_step_in_the_committed_table() -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith("| all of it, of a step of")]
    assert float(row.split("|")[-2].strip().rstrip("%")) <= 1.0
