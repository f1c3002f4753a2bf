"""The benchmark beside the Hugging Face Trainer: both contenders do the same work, and the committed table is complete."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import hf_trainer  # noqa: E402

transformers = pytest.importorskip("transformers")
PAGE = BENCHMARKS / "results" / "hf_trainer.md"


def test_both_train_the_same_model_on_the_same_batches(tmp_path: Path) -> None:
    """Tolerance as in tests/pstar/test_hf_trainer.py: roundings inside Adam."""
    work = hf_trainer.Work(str(tmp_path), 5, 2, 16, 50)
    assert hf_trainer.make_model(tmp_path, 1, 64, work) > 50_000
    theirs, seconds = hf_trainer.with_trainer(work)
    ours, more = hf_trainer.with_pstar(work, "min")
    assert ours == pytest.approx(theirs, rel=hf_trainer.GOAL) and len(set(ours)) == 5
    assert len(seconds) == len(more) == 5 and min(seconds + more) > 0


def test_the_table_has_medians_and_marks_what_is_off() -> None:
    turns = {"a": [hf_trainer.Turn([2.0, 1.0, 1.0], [9.0, 9.0, second], peak * 2**20) for second, peak in
                   ((1.0, 10), (3.0, 30), (2.0, 20))],
             "b": [hf_trainer.Turn([2.0, 1.0, 1.0 + gap], [9.0, 9.0, 4.0], 2**20) for gap in (0.0, 0.001)]}  # fmt: skip
    *_, first, second = hf_trainer.table(turns)
    assert first == "| a | 2.000 | 20 | 0.0e+00 |" and second == "| b | 4.000 | 1 | 1.0e-03, **off** |"


def test_the_committed_table_has_all_contenders_and_none_is_off() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    firsts = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert firsts == ["who trains", *hf_trainer.CONTENDERS] and "**off**" not in "".join(lines)


@pytest.mark.parametrize("flags, line", [
    (["--steps", "2"], "--steps: 2: give at least 3"), (["--rounds", "0"], "--rounds: 0: give at least 1"),
    (["--width", "32"], "--width: 32: give at least 64"), (["--layers", "x"], "--layers"), (["--layer", "1"], "--layer"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line_and_status_2(capsys, flags: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as end:
        hf_trainer.main(flags)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and line in said
