"""The table and the figure of bits against perplexity."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import quantization  # noqa: E402

SAME = {"bytes": 1_500_000, "weight_error": 0.105, "logit_error": 0.01}
ROWS = [{"format": name, "bits": bits, "perplexity": perplexity, **SAME}
        for name, bits, perplexity in (("fp32", 32.0, 100.0), ("nf4", 4.5, 101.0), ("int8", 8.25, 100.1))]  # fmt: skip


def test_the_table_compares_with_fp32() -> None:
    table = quantization.lines_of(ROWS)
    assert len(table) == 5 and all(line.count("|") == table[0].count("|") for line in table)
    assert "| nf4 | 4.50 | 1.50 | 10.50% | 1.00% | 101.00 | +1.000% |" in table


def test_the_figure_has_a_panel_for_each_model(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    for models in (1, 2):
        quantization.draw({f"model {n}": ROWS for n in range(models)}, tmp_path / "a.png")
        assert imread(tmp_path / "a.png").shape[:2] == (552, 1320)


@pytest.mark.parametrize("flags, line", [
    (["--steps", "0"], "at least 1"), (["--outliers", "0"], "at least 1"), (["--modle", "x"], "--modle"),
    (["--model", "none"], "--model none does not exist"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line_and_status_2(capsys, flags, line) -> None:
    with pytest.raises(SystemExit) as end:
        quantization.main(flags)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and line in said
