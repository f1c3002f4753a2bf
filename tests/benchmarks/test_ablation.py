"""The ablation compares only runs that did the same work."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ablation  # noqa: E402
import ablation_page  # noqa: E402
import ablation_rounds  # noqa: E402
import ablation_variants  # noqa: E402

CONFIG = {"batch_size": 8, "seq_len": 16, "vocab": "v", "vocab_size": 9, "precision": "fp32", "seed": 1}
CONFIG["num_parameters"] = 1 << 18


def result(nproc: int = 1, step_s: float = 1.0, **changed) -> ablation.Result:
    rows = [{"step": n, "loss": 2.0, "step_s": 9.0 if n < 4 else step_s, "sent_bytes": 1 << 20} for n in range(1, 9)]
    return ablation.Result(nproc, CONFIG | changed, rows, [1 << 20] * nproc)


def test_a_speed_up_leaves_the_first_steps_out() -> None:
    assert ablation_page.speed_up(result(2, 0.5), result()) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["batch_size", "vocab_size", "seq_len", "precision", "seed"])
def test_no_speed_up_between_different_work(name: str) -> None:
    with pytest.raises(ablation_page.DifferentWork, match=name):
        ablation_page.speed_up(result(2, 0.5, **{name: "other"}), result())


def test_the_table_names_differences_and_variants_that_did_not_run() -> None:
    base = ablation.Variant("00_single", "one process", formula=ablation_variants.NONE, runs=[result()])
    same = ablation.Variant("02_ddp", "DDP", runs=[result(2, 0.5), result(2, 0.4), result(2, 9.0)])
    other = ablation.Variant("04_apex", "O1", runs=[result(2, 0.1, precision="bf16")])
    table = "\n".join(ablation_page.lines_of([base, same, other], [("03_horovod", 2, "no compiler")]))
    assert "| 2 | 256 | 2.00 |" in table and "1.00 / 1.00" in table
    assert "— (other precision)" in table and "**not run**: 03_horovod at 2 processes: no compiler" in table


def three_seeds() -> list[ablation.Variant]:
    base = ablation.Variant("00_single", "one process", formula=ablation_variants.NONE,
                            runs=[result(seed=seed) for seed in (1, 2, 3)])  # fmt: skip
    fast = [result(2, step_s, seed=seed) for seed, step_s in ((1, 0.5), (2, 0.4), (3, 0.625))]
    return [base, ablation.Variant("02_ddp", "DDP", runs=fast)]


def test_several_seeds_give_mean_and_deviation() -> None:
    """Speed-ups of 2, 2.5 and 1.6 against the run with the same seed: 2.03, deviation 0.45."""
    variants = three_seeds()
    table = "\n".join(ablation_page.lines_of(variants, []))
    assert "| 1.00 ± 0.00 |" in table and "| 2.03 ± 0.45 |" in table and "2.0000 ± 0.0000" in table
    rows = ablation_page.data(variants, 2)["rows"]
    assert rows[1]["speed_up"] == [2.0, 2.5, 1.6] and rows[1]["losses"] == [2.0] * 8
    variants[0].runs.pop()  # without its seed a run has no base
    assert "— (other seed)" in "\n".join(ablation_page.lines_of(variants, []))
    assert ablation_page.data(variants, 2)["rows"][1]["speed_up"] == [2.0, 2.5]


def test_the_page_says_what_its_cores_cannot_show(tmp_path: Path) -> None:
    assert "With 4 or 8 processes they share cores" in ablation_page.honest(2, [1, 2, 4, 8])
    assert "share cores" not in ablation_page.honest(8, [1, 2, 4]) and "cannot show scaling" in ablation_page.honest(8, [1])
    ablation_page.write(tmp_path, ["# The ablation", ""], three_seeds(), [], 2)
    text = (tmp_path / "ablation.md").read_text(encoding="utf-8")
    assert "2 cores can show" in text and len(json.loads((tmp_path / "ablation.json").read_text())["rows"]) == 2


def test_the_committed_chart_data_are_those_of_the_committed_table() -> None:
    results = Path(ablation.__file__).parent / "results"
    rows = json.loads((results / "ablation.json").read_text(encoding="utf-8"))["rows"]
    lines = [line.split(" | ") for line in (results / "ablation.md").read_text(encoding="utf-8").splitlines()
             if line.startswith("| 0")]  # fmt: skip
    assert [(row["chapter"], row["name"], str(row["nproc"])) for row in rows] == [
        (line[0].strip("| "), line[1], line[2]) for line in lines]  # fmt: skip
    for row, line in zip(rows, lines, strict=True):
        assert not row["speed_up"] or line[4].startswith(f"{sum(row['speed_up']) / len(row['speed_up']):.2f}")


# ---- rounds of several days


@pytest.fixture
def ablate(monkeypatch, tmp_path: Path):
    """ablate(flags...): runs the ablation of chapters 00 and 02 with invented runs; returns its status, table and seeds."""

    def run_once(variant, nproc, options, folder, seed):
        seeds.append(seed)
        if len(seeds) == ablate.interrupt_at:
            raise KeyboardInterrupt
        done = result(nproc, 1.0 / (seed + nproc + len(variant.name)), seed=seed, max_steps=options.steps)
        for row in done.rows:
            row["loss"] = 2 + seed / 7 + nproc / 1e6
        return done

    def ablate(*flags: str):
        seeds.clear()
        folder = tmp_path / "results"
        options = ["--chapters", "00,02", "--nproc", "1,2", "--rounds", "1", "--results", str(folder), *flags]
        status = ablation.main(options)
        text = (folder / "ablation.md").read_text(encoding="utf-8")
        return status, [line for line in text.splitlines() if line.startswith("|")], sorted(set(seeds))

    seeds: list[int] = []
    ablate.interrupt_at = 0
    monkeypatch.setattr(ablation, "run_once", run_once)
    return ablate


def test_kept_rounds_and_new_ones_give_the_table_of_one_go(ablate) -> None:
    whole = ablate("--seeds", "1,2,3")
    alone = ablate("--seeds", "1")
    assert alone[0] == 0 and alone[1] != whole[1] and alone[2] == [1], "without --keep it begins anew"
    ablate.interrupt_at = 20  # within the second of the two rounds of 13 runs
    assert ablate("--seeds", "1,2,3", "--keep")[2] == [2, 3]
    ablate.interrupt_at = 0
    assert ablate("--seeds", "1,2,3", "--keep") == (0, whole[1], [3]), "half a round is not kept"
    assert ablate("--seeds", "1,2,3", "--keep") == (0, whole[1], [])


def test_rounds_of_other_work_are_not_mixed(ablate, capsys, tmp_path: Path) -> None:
    ablate("--seeds", "1")
    assert ablate("--seeds", "2", "--keep", "--steps", "9", "--lr", "1")[::2] == (2, [])
    said = capsys.readouterr().err
    assert said.startswith("error: the rounds in ") and "have other steps, lr: leave --keep out" in said
    kept = json.loads((tmp_path / "results" / "ablation_rounds.json").read_text(encoding="utf-8"))
    assert [one["seed"] for one in kept["rounds"]] == [1]


def test_a_kept_run_names_no_folder_of_the_machine() -> None:
    kept = ablation_rounds.condensed(result(vocab=f"{ablation.ROOT}/cache/vocab.txt"))
    assert kept["config"]["vocab"] == "cache/vocab.txt"


# ---- chapters 05 and 06


@pytest.mark.parametrize("name, nproc, flags", [
    ("pipeline, 1F1B", 4, ["--grad-accum", "4", "--pp", "4"]), ("tensor parallel", 2, ["--tp", "2"]),
    ("ZeRO stage 3", 2, ["--zero-stage", "3"]),
])  # fmt: skip
def test_a_run_gets_its_seed_and_ranks(monkeypatch, tmp_path: Path, name: str, nproc: int, flags: list[str]) -> None:
    variant = next(one for one in ablation_variants.VARIANTS if one.name == name)
    seen: list[str] = []
    monkeypatch.setattr(ablation.subprocess, "run", lambda command, **_: seen.extend(command) or argparse.Namespace(
        returncode=2, stdout="error: not here"))  # fmt: skip
    assert ablation.run_once(variant, nproc, ablation.parse(["--seeds", "1,2"]), tmp_path / "run", 2) == "status 2: not here"
    assert seen[-len(flags) :] == flags and seen[seen.index("--seed") + 1] == "2" and variant.chapter in seen[1]


def test_the_formulas_of_05_and_06_are_those_of_the_chapters() -> None:
    """Counted by hand for two ranks: tiny's blocks are 793,088 parameters, its vocabulary 3,980 rows of 128."""
    model = {"n_layer": 4, "n_embd": 128, "n_positions": 128}
    config = CONFIG | {"batch_size": 24, "seq_len": 64, "vocab_size": 3980, "num_parameters": 1_319_168, "grad_accum": 1,
                       "model": model}  # fmt: skip
    num_bytes = {one.name: one.formula.num_bytes(2, config, 4) for one in ablation_variants.VARIANTS}
    outside = (3980 + 128 + 2) * 128
    assert num_bytes["ZeRO stage 3"] == 4 * (3 * (1_319_168 - outside) + 2 * outside) / 2
    assert num_bytes["ZeRO stage 1"] == num_bytes["DDP ring"] == 4 * 1_319_168
    assert num_bytes["pipeline, 1F1B"] == 4 * 128 * (24 * 64 + 3980)
    value = 4 * 24 * 64 * 128
    assert num_bytes["tensor parallel"] == 16 * value + 2 * value + 4 * 24 * 64 * 3


@pytest.mark.deep
def test_chapters_05_and_06_send_the_bytes_of_their_formulas(tmp_path: Path) -> None:
    """Two ranks, a few steps: the kernel's count is that of the formula up to 5 %, headers and norms."""
    options = ablation.parse(["--steps", "5", "--seq-len", "32", "--batch-size", "8"])
    for variant in ablation_variants.VARIANTS:
        if variant.chapter in ("05_model_parallel", "06_zero"):
            run = ablation.run_once(variant, 2, options, tmp_path / "run", 42)
            assert isinstance(run, ablation.Result), run
            expected = variant.formula.num_bytes(2, run.config, 4)
            for key in ("sent_bytes", "received_bytes"):
                assert run.mean(key) == pytest.approx(expected, rel=0.05), (variant.name, key)


@pytest.mark.parametrize("flags", [["--nproc", "0"], ["--steps", "1"], ["--qiuck"], ["--nproc", "two"]])
def test_a_wrong_flag_is_one_line_and_status_2(capsys, flags) -> None:
    with pytest.raises(SystemExit) as end:
        ablation.parse(flags)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
