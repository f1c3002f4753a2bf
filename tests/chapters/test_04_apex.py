"""Chapter 04 as a program, and its five mistakes: the tests read the printed lines."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.horovod import horovodrun, needs_horovod
from tests.chapters.inside import train
from tests.chapters.program import ROOT, Chapter, environment, fork, run
from tests.chapters.technique import settings_error
from tests.limits import HANGS_S

STEPS = ("--max-steps", 6, "--save-every", 3, "--eval-every", 6, "--lr", "1e-2", "--seq-len", 16)
MISTAKES = ROOT / "chapters/04_apex/mistakes"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chapter, str]:
    """A run of six steps of O2 in fp16 on two processes, and what it printed; a deep test starts train.sh from nothing."""
    chapter = Chapter("04_apex", tmp_path_factory.mktemp("finished"))
    return chapter, chapter.train_forked(*STEPS, "--half", "fp16")


def test_a_run_prints_its_precision_and_logs_its_loss_scale(finished) -> None:
    chapter, said = finished
    for words in ("O2 (fp16, loss scale dynamic) by amp.py, over DistributedDataParallel", "fp16 on cpu", "perplexity"):
        assert words in said, said
    assert "Traceback" not in said and "Warning" not in said
    rows = chapter.metrics()
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3 and rows[-1]["lr"] <= 0.01 * 1e-2 * (1 + 1e-9)
    assert all(row["loss_scale"] > 1 and row["skipped_steps"] >= 0 for row in rows)


def test_the_scale_is_a_curve_in_tensorboard(finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(finished[0].output / "tensorboard"))
    board.Reload()
    assert [e.value for e in board.Scalars("train/loss_scale")] == [row["loss_scale"] for row in finished[0].metrics()]


def test_it_resumes_bit_for_bit_with_its_scale(ranks, finished, tmp_path: Path, capsys) -> None:
    shutil.copytree(finished[0].output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_000006")
    shutil.rmtree(tmp_path / "run/final")
    chapter = Chapter("04_apex", tmp_path)
    train(ranks, 2, chapter, *STEPS, "--half", "fp16")
    assert "step_000003, next is step 4" in capsys.readouterr().out
    assert chapter.losses() == finished[0].losses()
    assert [row["loss_scale"] for row in chapter.metrics()] == [row["loss_scale"] for row in finished[0].metrics()]


def test_a_fixed_scale_that_is_too_large_ends_the_run_with_one_line(tmp_path: Path) -> None:
    chapter = Chapter("04_apex", tmp_path)
    flags = ("--max-steps", 200, "--half", "fp16", "--nproc", 1, "--seq-len", 8)
    said = chapter.train_forked(*flags, "--loss-scale", "1e20", status=2)
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert lines == ["error: --loss-scale 1e+20 is too large: 20 steps in a row were skipped because gradients overflowed, "
                     "so nothing is learned; give a smaller one, or dynamic"]  # fmt: skip
    assert len(chapter.metrics()) == 19


@pytest.mark.deep
@needs_horovod
def test_horovod_gives_the_same_curve_as_ddp(ranks, tmp_path: Path) -> None:
    """Of O2; that of O0 is in test_law_of_the_curve.py."""
    flags = (*STEPS, "--opt-level", "O2", "--half", "fp16", "--grad-accum", 3, "--check-sync", 1)
    horovod, ddp = Chapter("04_apex", tmp_path / "horovod"), Chapter("04_apex", tmp_path / "ddp")
    for chapter in (horovod, ddp):
        chapter.folder.mkdir()
    horovod.train(*flags, "--comm", "horovod", "--nproc", 2)
    train(ranks, 2, ddp, *flags)
    assert horovod.losses() == pytest.approx(ddp.losses(), rel=1e-3)


@pytest.mark.parametrize("flags, line", [
    (("--opt-level", "O4"), "--opt-level"),
    (("--precision", "fp32", "--opt-level", "O2"), "--precision fp32 means --opt-level O0"),
    (("--precision", "bf16", "--half", "fp16"), "--precision bf16 and --half fp16 contradict"),
    (("--precision", "bf16", "--opt-level", "O0"), "--precision bf16 and --opt-level O0"),
    (("--loss-scale", "-3"), "--loss-scale -3: give a number above 0, or dynamic"),
    (("--loss-scale", "static"), "--loss-scale static: give a number above 0, or dynamic"),
    (("--loss-scale", "128", "--backend", "torch", "--opt-level", "O1"), "torch's scale is dynamic"),
    (("--backend", "torch", "--opt-level", "O2"), "--backend torch works with --opt-level O0 and O1"),
    (("--scale-window", "0"), "--scale-window must be at least 1"),
    (("--comm", "mpi"), "--comm"),
    (("--apex",), "--apex: NVIDIA Apex is not installed"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_line(capsys, tmp_path: Path, flags, line: str) -> None:
    given = Chapter("04_apex", tmp_path).command(*flags)[2:]
    assert line in settings_error("04_apex", "amp_settings", capsys, *given)
    assert not (tmp_path / "run").exists()


def test_a_wrong_flag_is_one_line_before_a_process_starts(tmp_path: Path) -> None:
    said = Chapter("04_apex", tmp_path).train_forked("--batch-size", 7, status=2)
    assert said.startswith("error: --batch-size 7 is not divisible by --nproc 2") and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists()


def test_the_other_apex_is_recognised(tmp_path: Path) -> None:
    other = tmp_path / "site" / "apex"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    command = Chapter("04_apex", tmp_path).command("--apex")
    env = environment() | {"PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --apex: the package apex that is installed here is another project, not NVIDIA's")


def numbers(line: str) -> list[float]:
    """All numbers in a line."""
    return [float(text) for text in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", line)]


def lines_of(said: str) -> dict[str, str]:
    """The lines that begin with wrong and right, without horovodrun's prefix."""
    lines = [re.sub(r"^\[\d+\]<std(out|err)>:", "", line) for line in said.splitlines()]
    return {line[:5]: line for line in lines if line.startswith(("wrong", "right"))}


def test_mistake_1_clipping_scaled_gradients() -> None:
    lines = lines_of(fork([sys.executable, str(MISTAKES / "clip_scaled_gradients.py")]))
    assert numbers(lines["wrong"])[-1] > 4 and numbers(lines["right"])[-1] < 0.1


@pytest.mark.deep
def test_mistake_2_two_steps_a_batch() -> None:
    lines = lines_of(run([sys.executable, str(MISTAKES / "two_steps_a_batch.py")]))
    wrong, right = numbers(lines["wrong"]), numbers(lines["right"])
    assert wrong[-1] == 2.0 and right[-1] == 1.0 and 1.8 < right[1] / wrong[1] < 2.2


@needs_horovod
def test_mistake_3_clipping_before_synchronising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's thread looks for gradients every 200 ms, so that a program that waits for a core still clips before it."""
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "200")
    lines = lines_of(run(horovodrun(2, MISTAKES / "clip_before_synchronize.py"), forks=True))
    assert max(abs(norm - 1) for norm in numbers(lines["wrong"])) > 0.1, lines  # a race: the numbers vary
    assert numbers(lines["right"]) == pytest.approx([1.0] * 5, abs=1e-3)


@pytest.mark.deep
@needs_horovod
def test_mistake_4_accumulating_without_passes() -> None:
    lines = lines_of(run(horovodrun(2, MISTAKES / "accumulate_without_passes.py")))
    assert "1 of 4 passes" in lines["wrong"] and "4 of 4 passes" in lines["right"]
    assert numbers(lines["right"])[-1] < 1e-5


def test_mistake_5_a_schedule_without_processes() -> None:
    said = fork([sys.executable, str(MISTAKES / "schedule_without_processes.py")]).splitlines()
    processes, _, wrong, right = numbers(said[2])
    assert (processes, right) == (4, 1) and wrong > 75


@pytest.mark.deep
def test_train_sh_runs_from_any_folder(tmp_path: Path) -> None:
    chapter = Chapter("04_apex", tmp_path)
    command = ["bash", str(ROOT / "chapters/04_apex/train.sh"), *chapter.command("--max-steps", 2)[2:]]
    env = environment() | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert "O2 (bf16, no loss scaling)" in done.stdout
