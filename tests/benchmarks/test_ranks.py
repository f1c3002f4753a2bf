"""The benchmark of several processes: ratios are computed within rounds, and a wrong flag prints one line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import compile as compiled  # noqa: E402
import parity  # noqa: E402
import rank_memory  # noqa: E402
import ranks  # noqa: E402
import two_levels  # noqa: E402


def contender(name: str, *seconds: float) -> ranks.Contender:
    turns = [ranks.Turn(each, 8.7, None, each, 2**20) for each in seconds]
    return ranks.Contender(name, name, lambda job: None, turns=turns, loss=8.7)


def test_a_ratio_is_the_median_of_ratios_in_the_same_round() -> None:
    assert ranks.speed(contender("a", 1.0, 10.0, 1.0), contender("b", 2.0, 20.0, 8.0)) == 2.0


def test_the_page_names_the_goals() -> None:
    found = [contender("plain", 2.0, 2.0), contender("fsdp2", 3.0, 3.0), contender("pstar-whole", 2.0, 2.0)]
    page = ranks.report(found, argparse.Namespace(nproc=2, rounds=2, steps=4), 0.5, ["--quick"])
    assert "- pstar-whole: 1.00 of plain (goal 0.95), 1.50 of fsdp2 (goal 1.4)" in page
    assert "Others used 0.5 of" in page and "bash benchmarks/ranks.sh --quick" in page


@pytest.mark.parametrize("program, flags, message", [
    (ranks, ["--nproc", "3"], "--nproc must divide the global batch of 4"),
    (ranks, ["--only", "horovod"], "--only horovod: not known or not installed; choose from plain"),
    (compiled, ["--nproc", "1,3"], "--nproc 1,3: give numbers that divide the global batch of 4"),
    (compiled, ["--rounds", "0"], "argument --rounds: 0: give at least 1"),
    (parity, ["--runs", "-1"], "argument --runs: -1: give at least 1"),
    (parity, ["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (ranks, ["--rounds", "0"], "argument --rounds: 0: give at least 1"),
    (rank_memory, ["--nproc", "1"], "--nproc must be at least 2"),
    (two_levels, ["--mbit-per-s", "nan"], "--mbit-per-s must be at least 1"),
])
def test_a_wrong_flag_is_one_line(program, flags, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        program.parse(flags)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize("flags, numbers", [
    ([], (3, 8, 4)), (["--quick"], (1, 2, 2)), (["--quick", "--rounds", "5"], (1, 5, 2))])
def test_numbers_that_are_not_given_depend_on_quick(flags, numbers) -> None:
    options = parity.parse(flags)
    assert (options.runs, options.rounds, options.steps) == numbers


def test_two_levels_are_compared_with_the_flat_engine_of_the_same_round() -> None:
    def turns(*seconds: float, sent: float = 30e6) -> list[dict[str, float]]:
        return [{"seconds": each, "sent": sent, "formula": 15e6, "loss": 8.0} for each in seconds]

    run = {(kind, "flat"): turns(1.0, 10.0, 4.0) for kind in two_levels.KINDS}
    run |= {(kind, levels): turns(0.5, 2.0, 4.0, sent=15e6) for kind, levels in two_levels.CONTENDERS if levels != "flat"}
    page = two_levels.report([run], two_levels.parse([]), [])
    assert "| sharded chunks | flat | 4.00 | 1.00 | 1.00 to 1.00 | 30.00 | 1.00 |  |" in page
    assert "| sharded chunks | two levels | 2.00 | 2.00 | 2.00 to 2.00 | 15.00 | 0.50 | 15.00 |" in page


def parity_run(date: str, speed: float, peak: int) -> dict:
    row = {"speed": 1.0, "cpu": 1.0, "peak": 100 * 2**20, "tokens_per_s": 1000.0}
    rows = {each.name: dict(row) for each in parity.contenders()}
    rows["pstar 1, 25%"] |= {"speed": speed, "peak": peak * 2**20}
    return {"date": f"{date} 10:00 UTC", "versions": "torch 1", "processor": "x", "others": 0.0, "rows": rows}


def test_parity_is_the_median_of_the_runs_with_its_spread() -> None:
    runs = [parity_run("2026-11-01", 0.9, 90), parity_run("2026-11-02", 1.1, 130), parity_run("2026-11-02", 1.0, 110)]
    text = parity.page({"wide": runs}, parity.parse([]), [])
    about = "pstar, near 25% of the model data, 1 process"
    assert f"| {about} | 1,000 | 1.00 | 0.90 to 1.10 | 1.00 | 110 | 1.10 |" in text
    assert f"- {about}: 1.00 of plain's tokens/s (goal 0.97), 1.10 of its peak (goal at most 1.05)" in text
    assert "3 runs, 2026-11-01, 2026-11-02." in text and "## The model of ranks.sh" in text and "Others used" not in text


def test_memory_is_reported_against_the_formula() -> None:
    rank = {"share": 100, "working": 50, "staging": 30, "chunk": 10, "params": 20, "start": 90, "peak": 200}
    options = argparse.Namespace(layers=1, nproc=2)
    for peak, fits in ((200, True), (260, False)):
        page, kept = rank_memory.report({"whole": [rank, rank | {"peak": peak}]}, 20, options, [])
        assert kept is fits and ("too large" in page.splitlines()[-1]) is not fits
