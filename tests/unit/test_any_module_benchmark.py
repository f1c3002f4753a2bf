"""The table of models and forwards that nobody prepared: the committed one is complete and shows no row that is off."""

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
    from tests.unit.test_pstar_borrowed import OPERATIONS
    from tests.unit.test_pstar_zoo import ZOO

    firsts = [line.split("|")[1].strip().strip("`") for line in PAGE.splitlines() if line.startswith("| ")]
    heads = {"model", "a forward or a loop with", "between two steps"}
    assert [first for first in firsts if first not in heads] == [*ZOO, *PATTERNS, *OPERATIONS], "renew: any_module.sh"
    assert "**off**" not in PAGE and "| `works` |" not in PAGE


def test_a_row_is_measured() -> None:
    from tests.borrowers import TiedByLinear, rows

    worst, num_params, near, start = any_module.gap(TiedByLinear, lambda model, step: model(rows(step)))
    assert worst < any_module.GOAL and num_params == sum(p.numel() for p in TiedByLinear().parameters())
    assert 0 < near < 1 and start == "lazy"


def test_a_row_that_is_off_is_marked() -> None:
    class Another(torch.nn.Linear):
        """Its loss is another one in the engine."""

    worst, *_ = any_module.gap(lambda: Another(4, 1), lambda model, step: model(torch.ones(2, 4)).mean() * (
        1.0 if isinstance(model, Another) else 1.001))  # fmt: skip
    assert worst > any_module.GOAL
    assert any_module.mark(worst).endswith(", **off**") and any_module.mark(0.0) == "0"
