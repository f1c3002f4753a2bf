"""Programs that are killed, stopped or out of disk space: saved steps stay, and the curve goes on as if uninterrupted.

KILL_ROUNDS=25 runs as many rounds of SIGKILL with one process, and as many with two; two each without it. The quick command
kills at every change of the disk instead, one after the other (tests/gpt2_chinese/checkpoint/test_survival.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_chinese.checkpoint.find import candidates, newest_complete
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.distributed.stop_signal import STOP_FILE_VARIABLE
from tests.chapters.inside import train
from tests.chapters.program import SMALL, Chapter, environment, fork, parents, ranks_below
from tests.gpt2_chinese.checkpoint.test_survival import mounted
from tests.limits import HANGS_S, wait_until

ROUNDS = int(os.environ.get("KILL_ROUNDS", 2))
STEPS = 60 * ROUNDS
ASYNC = ("--async-save",)


def descendants(pid: int) -> list[int]:
    table = parents()
    found = [pid]
    for parent in found:
        found += [child for child, of in table.items() if of == parent]
    return found


def started(chapter: Chapter, *flags: object, rows: int = 2) -> subprocess.Popen[str]:
    """A program that has taken some steps of its own."""
    metrics = chapter.output / "metrics.jsonl"
    before = metrics.stat().st_ino if metrics.exists() else 0  # a program that goes on makes a new file of the rows it keeps
    found = newest_complete(chapter.output / "checkpoints")
    begin = load(found)[2]["step"] if found else 0
    process = subprocess.Popen(chapter.command(*flags), env=environment(), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    wait_until(lambda: metrics.exists() and metrics.stat().st_ino != before and chapter.num_rows() >= begin + rows,
               lambda: f"{rows} steps: {process.communicate()[0] if process.poll() is not None else ''}",
               lambda: process.poll() is None)  # fmt: skip
    return process


def board(chapter: Chapter) -> list[tuple[int, float]]:
    """(step, loss) as TensorBoard shows them."""
    events = EventAccumulator(str(chapter.output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


@pytest.mark.deep
@pytest.mark.parametrize(("name", "nproc", "how"), [("00_single", 1, ()), ("02_ddp", 2, ()), ("00_single", 1, ASYNC),
                                                    ("06_zero", 2, ASYNC)])  # fmt: skip
def test_killed_again_and_again(ranks, tmp_path: Path, name: str, nproc: int, how: tuple[str, ...]) -> None:
    flags = (*how, "--max-steps", STEPS, "--eval-every", 10_000, "--save-every", 1, "--nproc", nproc)
    chapter, draw = Chapter(name, tmp_path), random.Random(nproc)
    seen = 0
    for number in range(ROUNDS):
        process = started(chapter, *flags, rows=1)
        # Kills come after a number of saves, not of seconds, on a busy machine as on an idle one; then anywhere in the next
        # step.
        wanted = seen + draw.randint(2, 12)

        def saved() -> int:
            return max([0, *(step for step, folder in candidates(chapter.output / "checkpoints"))])

        wait_until(lambda: saved() >= wanted, f"step {wanted}", lambda: process.poll() is None)  # noqa: B023
        time.sleep(draw.uniform(0, 0.03))
        seen = max(seen, saved())
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        found = newest_complete(chapter.output / "checkpoints")
        step = load(found)[2]["step"] if found else 0
        assert step >= seen, f"round {number}: step {seen} was complete, {found} is what is left"
        seen = step
        if seen == STEPS:
            break
    assert seen > ROUNDS, "the kills came before the saves"
    assert "Done." in chapter.train(*flags)

    straight = Chapter(name, tmp_path / "straight")
    straight.folder.mkdir()
    train(ranks, nproc, straight, *flags[:-2], "--save-every", 10_000)
    assert chapter.losses() == straight.losses(), "bit for bit, and no step twice"
    steps = [step for step, _ in board(chapter)]
    assert steps == list(range(1, STEPS + 1))
    assert [loss for _, loss in board(chapter)] == pytest.approx(straight.losses(), rel=1e-6), "TensorBoard holds float32"
    assert {f.name for f in (chapter.output / "checkpoints").iterdir()} == {f"step_{STEPS - n:06d}" for n in range(3)}


@pytest.mark.parametrize(("name", "nproc", "to", "number"), [
    # SIGTERM in the quick command: test_a_second_run_in_the_same_folder_is_refused of test_launch.py
    pytest.param("00_single", 1, None, signal.SIGTERM, marks=pytest.mark.deep),
    pytest.param("02_ddp", 2, None, signal.SIGTERM, marks=pytest.mark.deep), ("06_zero", 2, 1, signal.SIGUSR1),
])  # fmt: skip
def test_a_signal_saves_and_ends_with_status_0(tmp_path: Path, name: str, nproc: int, to: int | None, number: int) -> None:
    """To the program itself, to the launcher, to rank 1; the ranks agree about the step. 06 saves in the background.

    They run as under nohup, and the end of the terminal does not end them.
    """
    how = ASYNC if name == "06_zero" else ()
    flags = (*how, "--max-steps", 5000, "--eval-every", 10_000, "--save-every", 10_000, "--nproc", nproc)
    chapter = Chapter(name, tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = started(chapter, *flags)
    finally:
        signal.signal(signal.SIGHUP, before)
    ranks = ranks_below(process.pid)
    for pid in (process.pid, *ranks.values()):
        os.kill(pid, signal.SIGHUP)
    rows = chapter.num_rows()
    wait_until(lambda: chapter.num_rows() > rows + 1, "two more steps", lambda: process.poll() is None)
    os.kill(process.pid if to is None else ranks[to], number)
    said = process.communicate(timeout=HANGS_S)[0]
    assert process.returncode == 0, said
    step = len(chapter.metrics())
    saved = chapter.output / "checkpoints" / f"step_{step:06d}"
    assert newest_complete(saved.parent) == saved and not (chapter.output / "final").exists()
    who = "a signal to another rank" if to else "SIGTERM"
    assert f"Stopped by {who} after step {step}: the same command goes on from {saved}" in said
    assert "rror" not in said and "Done" not in said
    assert [found for found, _ in board(chapter)] == list(range(1, step + 1))


def has_heard(pid: int, *ranks: int) -> bool:
    """Whether a program has handled SIGTERM: then it does not catch the next one; a launcher has made its ranks' stop
    file."""
    if not ranks:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
        return not int(caught, 16) >> signal.SIGTERM - 1 & 1
    (file,) = re.findall(rf"(?:^|\0){STOP_FILE_VARIABLE}=([^\0]*)", Path(f"/proc/{ranks[0]}/environ").read_text())
    return Path(file).exists()


@pytest.mark.parametrize(("nproc", "status"), [pytest.param(1, -signal.SIGTERM, marks=pytest.mark.deep), (2, 130)])
def test_a_second_signal_ends_at_once(tmp_path: Path, nproc: int, status: int) -> None:
    """In a step that does not end. After a step the program would end by itself, with status 0 and a checkpoint."""
    chapter = Chapter("02_ddp", tmp_path)
    long = ("--max-steps", 5000) if nproc > 1 else ("--batch-size", 2400, "--max-steps", 50)  # steps of a second
    process = started(chapter, "--nproc", nproc, *long, "--eval-every", 10_000, rows=1)
    ranks = ranks_below(process.pid)
    if nproc > 1:
        os.kill(ranks[1], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    heard = partial(has_heard, process.pid, *ranks.values())
    wait_until(heard, "the first signal to be heard", lambda: process.poll() is None)
    os.kill(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=HANGS_S)[0]
    assert process.returncode == status, said
    assert newest_complete(chapter.output / "checkpoints") is None and "Stopped" not in said


@pytest.mark.parametrize(("name", "save_every", "line"), [
    ("00_single", 100, "5 steps in a row, up to step {}, had no finite loss and gradients"),
    ("07_patrickstar", 1, "the state after step {} is not saved: its loss or gradients are not finite"),
])  # fmt: skip
def test_a_loss_without_a_number_ends_the_run(ranks, tmp_path: Path, name: str, save_every: int, line: str) -> None:
    chapter, nproc = Chapter(name, tmp_path), 1 if name == "00_single" else 2
    quiet = ("--eval-every", 1000, "--nproc", nproc, "--warmup-steps", 0)
    train(ranks, nproc, chapter, *quiet[:2], "--max-steps", 3, "--save-every", 2, "--warmup-steps", 0)
    (chapter.output / "final" / "run.json").unlink()  # that no later one is written shows below
    said = chapter.train_forked(*quiet, "--max-steps", 300, "--save-every", save_every, "--lr", 1e18, status=1)
    [error] = [text for text in said.splitlines() if text.startswith("error:") and "its output is above" not in text]
    assert re.search(line.format(r"\d+"), error), said
    good = newest_complete(chapter.output / "checkpoints")
    assert error.endswith(f"the last good checkpoint is {good}"), said
    assert all(weight.isfinite().all() for weight in load(good)[0].values())
    assert not (chapter.output / "final" / "run.json").exists() and "Traceback" not in said
    assert sum(row["loss"] is None for row in chapter.metrics()) <= 5


@pytest.mark.parametrize("how", [(), pytest.param(ASYNC, marks=pytest.mark.deep)])
def test_a_full_disk_ends_the_run_with_one_line(tmp_path: Path, how: tuple[str, ...]) -> None:
    with mounted(tmp_path, "size=6m") as folder:
        chapter = Chapter("02_ddp", tmp_path)
        flags = ("--max-steps", 50, "--eval-every", 100, "--save-every", 2, "--output-dir", folder / "run", *how)
        said = fork(chapter.command(*flags), status=1)
        [error] = [text for text in said.splitlines() if text.startswith("error:") and "its output is above" not in text]
        good = newest_complete(folder / "run" / "checkpoints")
        assert f"no room to write {folder}/run/checkpoints: " in error and " needed, " in error and " free" in error
        assert error.endswith(f"the last good checkpoint is {good}") and "Traceback" not in said


@pytest.mark.parametrize(("name", "nproc"), [("00_single", 1), ("02_ddp", 2), ("05_model_parallel", 2), ("06_zero", 2),
                                             ("07_patrickstar", 2)])  # fmt: skip
def test_it_goes_on_bit_for_bit_with_dropout_and_accumulation(ranks, tmp_path: Path, name: str, nproc: int) -> None:
    config = tmp_path / "dropout.json"
    config.write_text(json.dumps({**SMALL, "resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2}))
    flags = ("--model-config", config, "--grad-accum", 2, "--max-steps", 10, "--eval-every", 100, "--save-every", 5,
             "--seq-len", 8)  # fmt: skip
    straight, again = Chapter(name, tmp_path / "straight"), Chapter(name, tmp_path / "again")
    for chapter in (straight, again):
        chapter.folder.mkdir()
    train(ranks, nproc, straight, *flags)
    train(ranks, nproc, again, *flags, "--resume", straight.output / "checkpoints" / "step_000005")
    assert [row["step"] for row in again.metrics()] == list(range(6, 11))
    assert again.losses() == straight.losses()[5:]
    ours, theirs = (load_file(chapter.output / "final" / "model.safetensors") for chapter in (again, straight))
    assert all(ours[key].equal(theirs[key]) for key in theirs)


def test_chapters_go_on_from_each_other(ranks, tmp_path: Path) -> None:
    """00 -> 02 -> 06 -> 07 -> 02 -> 00: each takes three steps on the curve of the first one, within 1e-4."""
    flags = ("--max-steps", 18, "--eval-every", 100, "--save-every", 3, "--keep-last", 0, "--seq-len", 8)
    expected, saved = [], None
    for number, name in enumerate(("00_single", "02_ddp", "06_zero", "07_patrickstar", "02_ddp", "00_single")):
        chapter = Chapter(name, tmp_path / str(number))
        chapter.folder.mkdir()
        resume = ("--resume", saved) if saved else ()
        train(ranks, 1 if name == "00_single" else 2, chapter, *flags, *resume)
        expected = expected or chapter.losses()
        gaps = [abs(ours / theirs - 1) for ours, theirs in zip(chapter.losses(), expected[3 * number :], strict=True)]
        assert max(gaps) < 1e-4 and math.isfinite(chapter.losses()[-1]), (name, gaps)
        print(f"{number} {name}: largest gap {max(gaps):.1e}")
        saved = chapter.output / "checkpoints" / f"step_{3 * number + 3:06d}"
