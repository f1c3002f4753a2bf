"""The ablation compares only runs that did the same work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ablation  # noqa: E402

CONFIG = {"batch_size": 8, "seq_len": 16, "vocab": "v", "vocab_size": 9, "precision": "fp32", "seed": 1}
CONFIG["num_parameters"] = 1 << 18


def result(nproc: int = 1, step_s: float = 1.0, **changed) -> ablation.Result:
    rows = [{"step": n, "loss": 2.0, "step_s": 9.0 if n < 4 else step_s, "sent_bytes": 1 << 20} for n in range(1, 9)]
    return ablation.Result(nproc, CONFIG | changed, rows, [1 << 20] * nproc)


def test_a_speed_up_leaves_the_first_steps_out() -> None:
    assert ablation.speed_up(result(2, 0.5), result()) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["batch_size", "vocab_size", "seq_len", "precision", "seed"])
def test_no_speed_up_between_different_work(name: str) -> None:
    with pytest.raises(ablation.DifferentWork, match=name):
        ablation.speed_up(result(2, 0.5, **{name: "other"}), result())


def test_the_table_names_differences_and_variants_that_did_not_run() -> None:
    base = ablation.Variant("00_single", "one process", formula=ablation.NONE, runs=[result()])
    same = ablation.Variant("02_ddp", "DDP", runs=[result(2, 0.5), result(2, 0.4), result(2, 9.0)])
    other = ablation.Variant("04_apex", "O1", runs=[result(2, 0.1, precision="bf16")])
    table = "\n".join(ablation.lines_of([base, same, other], [("03_horovod", 2, "no compiler")]))
    assert "| 2 | 256 | 2.00 |" in table and "1.00 / 1.00" in table
    assert "— (other precision)" in table and "**not run**: 03_horovod at 2 processes: no compiler" in table


@pytest.mark.parametrize("flags", [["--nproc", "0"], ["--steps", "1"], ["--qiuck"], ["--nproc", "two"]])
def test_a_wrong_flag_is_one_line_and_status_2(capsys, flags) -> None:
    with pytest.raises(SystemExit) as end:
        ablation.parse(flags)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
