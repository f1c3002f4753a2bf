"""The benchmark on two nodes runs, and its counts are those of the formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.test_memory import number, run_quick


@pytest.mark.deep
def test_two_levels(needs_nodes, tmp_path: Path) -> None:
    import two_levels

    (table,) = run_quick("two_levels", tmp_path)
    assert [tuple(row[:2]) for row in table[1:]] == two_levels.CONTENDERS
    for row in (row for row in table[1:] if row[1] != "flat"):
        assert number(row[5]) == pytest.approx(number(row[7]), rel=0.02) and number(row[6]) < 0.9
