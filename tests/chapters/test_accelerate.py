"""Hugging Face Accelerate's launcher starts chapters and programs that use pstar: the same numbers as with --nproc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.program import ROOT, Chapter, environment, free_port, needs_localhost, run
from tests.cover import quick_only
from tests.docs.pages import example
from tests.docs.test_hugging_face_example import check, prepare
from tests.limits import HANGS_S

pytest.importorskip("accelerate")
pytestmark = needs_localhost

# What `accelerate launch` would ask for, or print that it was not given. The machine of the tests has no GPU.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
          "--mixed_precision", "no", "--dynamo_backend", "no")  # fmt: skip
SHORT = ("--max-steps", 3, "--warmup-steps", 1, "--eval-every", 3, "--seq-len", 16, "--device", "cpu")


@pytest.mark.parametrize("name", quick_only(["02_ddp", "07_patrickstar"], "02_ddp"))
def test_a_chapter_trains_as_with_its_own_launcher(name: str, tmp_path: Path) -> None:
    flags = ("--near-budget", "min") if name == "07_patrickstar" else ()
    theirs, ours = Chapter(name, tmp_path / "theirs"), Chapter(name, tmp_path / "ours")
    for chapter in (theirs, ours):
        chapter.folder.mkdir()
    python, *command = theirs.command(*SHORT, *flags)
    said = run([python, *LAUNCH, "--main_process_port", str(free_port()), *command], forks=True)
    assert "= 2 ranks x" in said and "Traceback" not in said
    ours.train_forked(*SHORT, *flags, "--nproc", 2)
    assert theirs.losses() == ours.losses() and len(ours.losses()) == 3


@pytest.mark.deep
@pytest.mark.parametrize("flag, line", [
    ("bf16", "accelerate launch asks for mixed precision bf16, which a chapter takes from its own flag: give --precision"),
    ("cpu", "accelerate launch has started one process, as it does without GPUs and without --multi_gpu")])
def test_what_a_chapter_does_not_take_from_the_launcher_is_one_line(flag: str, line: str, tmp_path: Path) -> None:
    launch = [word for word in LAUNCH if flag != "cpu" or word != "--multi_gpu"] + ["--cpu"] * (flag == "cpu")
    launch = ["bf16" if flag == "bf16" and before == "--mixed_precision" else word
              for before, word in zip(["", *launch], launch, strict=False)]
    python, *command = Chapter("02_ddp", tmp_path).command(*SHORT)
    done = subprocess.run([python, *launch, "--main_process_port", str(free_port()), *command], capture_output=True,
                          text=True, timeout=HANGS_S, env=environment())
    assert done.returncode != 0 and done.stderr.count("error: accelerate") == 1 and line in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.deep
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_the_program_of_the_engine_s_page_fine_tunes_on_two_processes(launcher: str, tmp_path: Path) -> None:
    prepare(tmp_path, repeats=40)
    (tmp_path / "tune.py").write_text(example("hugging-face").replace("5e-5", "1e-2"), encoding="utf-8")
    start = [sys.executable, *LAUNCH, "--main_process_port", str(free_port())]
    if launcher == "torchrun":
        start = ["bash", str(ROOT / "scripts/torchrun.sh"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*start, "tune.py"], cwd=tmp_path, env={**environment(), "PYTHON": sys.executable}, text=True,
                          timeout=HANGS_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    check(tmp_path, done.stdout, 10)
