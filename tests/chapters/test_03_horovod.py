"""Chapter 03 as a program, under the real horovodrun with real processes: its output, its files, its refusals and lost
ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_chinese.distributed.horovod_launcher import blame
from tests.chapters.horovod import horovodrun, needs_horovod, rank_pids
from tests.chapters.inside import run_under_horovod, train
from tests.chapters.program import ROOT, Chapter, environment, fork, run, wait_for_rows
from tests.chapters.technique import settings_error
from tests.harness.handed_over import handing_over
from tests.limits import HANGS_S, wait_until

STEPS = ("--max-steps", 8, "--save-every", 4, "--eval-every", 8, "--lr", "1e-2", "--clip-grad-norm", 0.3)

# Runs in the ranks in place of train.py: removes Horovod's collective, then runs the chapter's unchanged program.
WRAPPER = '''
import contextlib, os, runpy, sys
program, *flags = sys.argv[1:]
import horovod.torch as hvd

def alone(optimizer, **_):
    optimizer.synchronize, optimizer.skip_synchronize = (lambda: None), contextlib.nullcontext
    return optimizer

hvd.DistributedOptimizer = alone
sys.argv = [program, *flags]
sys.path[0] = os.path.dirname(program)
runpy.run_path(program, run_name="__main__")
'''


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chapter, str]:
    """A run of eight steps on two processes with a timeline, and what it printed. Tests with signals start from nothing."""
    chapter = Chapter("03_horovod", tmp_path_factory.mktemp("finished"))
    command = chapter.command(*STEPS, "--fusion-mb", 1, "--timeline", chapter.folder / "timeline.json")
    return chapter, run(command, forks=True)


@needs_horovod
def test_a_run_prints_its_ranks_and_leaves_all_files(finished) -> None:
    chapter, said = finished
    for words in ("2 ranks x 1 micro-batch x 6", "step 8/8", "perplexity", "「今天天气」", "03_horovod/generate.sh"):
        assert words in said, said
    assert "<stdout>" not in said and "Traceback" not in said and "Warning" not in said
    left = {path.name for path in chapter.output.iterdir()}
    assert left == {"metrics.jsonl", "tensorboard", "checkpoints", "config.json", "final"}
    rows = chapter.metrics()
    assert [row["step"] for row in rows] == list(range(1, 9)) and rows[-1]["lr"] <= 0.01 * 1e-2 * (1 + 1e-9)


@needs_horovod
def test_the_timeline_is_horovods_own_trace(finished) -> None:
    text = (finished[0].folder / "timeline.json").read_text()
    for words in ("NEGOTIATE_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "transformer.h.0.attn.c_attn.weight"):
        assert words in text


def interrupted(finished: Chapter, name: str, folder: Path) -> Chapter:
    """A copy of a finished run that lost all after step 4, to go on with a chapter."""
    shutil.copytree(finished.output, folder / "run")
    shutil.rmtree(folder / "run/checkpoints/step_000008")
    shutil.rmtree(folder / "run/final")
    return Chapter(name, folder)


@pytest.fixture(scope="module")
def more(finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[Chapter, Chapter, str]:
    """A run that went on and a compressed one, both under one horovodrun, and what they printed."""
    folder = tmp_path_factory.mktemp("more")
    goes_on = interrupted(finished[0], "03_horovod", folder / "goes on")
    compressed = Chapter("03_horovod", folder / "compressed")
    compressed.folder.mkdir()
    said = run_under_horovod(2, [(goes_on, STEPS), (compressed, (*STEPS, "--compression", "fp16"))])
    return goes_on, compressed, said


@needs_horovod
def test_it_resumes_and_chapter_00_goes_on_with_it(ranks, finished, more, tmp_path: Path) -> None:
    goes_on, _, said = more
    assert "step_000004, next is step 5" in said
    plain = interrupted(finished[0], "00_single", tmp_path / "00")
    train(ranks, 1, plain, *STEPS)
    for chapter, rel in ((goes_on, 0), (plain, 1e-5)):
        assert chapter.metrics()[:4] == finished[0].metrics()[:4], "not begun anew"
        assert chapter.losses() == pytest.approx(finished[0].losses(), rel=rel, abs=0)


@needs_horovod
def test_the_weights_check_fails_without_horovods_collective(finished, tmp_path: Path) -> None:
    chapter = Chapter("03_horovod", tmp_path)
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    _, program, *given = chapter.command(*STEPS, "--check-sync", 4)
    said = run(horovodrun(2, wrapper, program, *given), status=1, forks=True)
    assert "after step 4 the weights of rank 1 are not those of rank 0" in said, said
    assert chapter.losses() != pytest.approx(finished[0].losses()[: len(chapter.losses())], rel=1e-4)


@needs_horovod
def test_ranks_meet_where_the_host_name_has_no_address() -> None:
    """As on a laptop that was renamed. The ranks must use the interface that the launcher names, for all process sets."""
    rename = "import os, socket, sys; socket.sethostname('no-such-host.invalid'); os.execvp(sys.argv[1], sys.argv[1:])"
    renamed = ["unshare", "--map-root-user", "--uts", sys.executable, "-c", rename]
    if subprocess.run([*renamed, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no name of its own to a process")
    meet = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), 'ranks')"
    assert run([*renamed, *horovodrun(2, "-c", meet)]).count("2 ranks") == 2


@needs_horovod
def test_half_the_bytes_change_little(finished, more) -> None:
    chapter = more[1]
    assert chapter.losses() == pytest.approx(finished[0].losses(), rel=1e-3)
    assert chapter.losses() != finished[0].losses()
    sent = [sorted(row["sent_bytes"] for row in rows)[4] for rows in (chapter.metrics(), finished[0].metrics())]
    assert sent[0] < 0.6 * sent[1], sent


# sitecustomize.py of ranks that meet when their slow imports are done. Horovod's own meeting has --timeout-s, too.
MEETS = """
import os, time
from pathlib import Path
if "HOROVOD_RANK" in os.environ:
    import horovod.torch
    here, end = Path(__file__).parent, time.monotonic() + 600  # for a test that fails meanwhile
    (here / f"imported.{os.environ['HOROVOD_RANK']}").touch()
    while len([*here.glob("imported.*")]) < int(os.environ["HOROVOD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.02)
"""


def start(chapter: Chapter, *flags: object, forks: bool = False, meets: bool = False) -> subprocess.Popen:
    """Starts a long run and waits for its first lines of metrics.

    Args:
        forks: the ranks are forked from a process that has torch loaded.
        meets: ranks from nothing wait for each other's imports, so that a short --timeout-s does not depend on their speed.
    """
    command = chapter.command("--max-steps", 100_000, "--save-every", 100_000, "--eval-every", 100_000, *flags)
    log = (chapter.folder / "log").open("w")
    given = handing_over(environment()) if forks else environment()
    if meets:
        (chapter.folder / "sitecustomize.py").write_text(MEETS)
        given["PYTHONPATH"] = f"{chapter.folder}{os.pathsep}{given['PYTHONPATH']}"
    process = subprocess.Popen(command, env=given, stdout=log, stderr=subprocess.STDOUT)
    wait_for_rows(chapter, process, 4, chapter.folder / "log")
    return process


def assert_no_rank_is_left(chapter: Chapter) -> None:
    """Waits: the launcher ends before the system has removed the processes that it killed."""
    wait_until(lambda: rank_pids(chapter.output) == {}, "the end of all ranks")


# Horovod stops the shell around a rank that hangs, and sends it SIGTERM, 5 seconds later SIGKILL. On a busy machine the
# shell takes SIGTERM before it stops, and two threads of Horovod wait for its end: one of them gets no status.
HUNG = ["failed with status -9 (SIGKILL)", "failed with status -15 (SIGTERM)", "stopped answering the other ranks"]


@needs_horovod
@pytest.mark.parametrize(
    "kill, flags, ends",
    [  # a rank that dies in the quick command: of the elastic run below; a rank that hangs is killed by the others
        pytest.param(signal.SIGKILL, (), ["failed with status -9 (SIGKILL)"], id="dies", marks=pytest.mark.deep),
        pytest.param(signal.SIGSTOP, ("--timeout-s", 4), HUNG, id="hangs"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_job_and_is_named(tmp_path: Path, kill: signal.Signals, flags, ends) -> None:
    chapter = Chapter("03_horovod", tmp_path)
    process = start(chapter, *flags, meets=True)
    pids = rank_pids(chapter.output)
    os.kill(pids[1], kill)
    assert process.wait(timeout=HANGS_S) == 1
    said = (tmp_path / "log").read_text()
    assert any(f"error: rank 1 {end}" in said for end in ends) and "Traceback" not in said, said
    assert_no_rank_is_left(chapter)


@pytest.mark.parametrize("ended, lost, said", [
    ([(1, -9)], set(), "rank 1 failed with status -9 (SIGKILL)"),
    ([(0, 3), (1, -15)], {0}, "rank 1 failed with status -15 (SIGTERM)"),  # rank 1 hung
    ([(0, 3)], {0}, "rank 1 stopped answering the other ranks"),  # rank 1 hung, and Horovod lost its status
    ([(0, 3), (1, 3)], {0, 1}, "rank 0 failed with status 3"),  # both lost their link
    ([(1, 2), (0, 3)], set(), "rank 1 failed with status 2"),  # rank 0 noticed, and was killed before it said so
])  # fmt: skip
def test_the_rank_that_failed_first_is_blamed(ended, lost, said) -> None:
    assert blame(ended, lost, 2) == f"{said}; its output is above"


@needs_horovod
def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    chapter = Chapter("03_horovod", tmp_path)
    process = start(chapter)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=HANGS_S) == 130
    said = (tmp_path / "log").read_text()
    assert "interrupted: the same command goes on" in said and "Traceback" not in said, said
    assert_no_rank_is_left(chapter)


@needs_horovod
def test_an_elastic_run_goes_on_without_a_lost_worker_on_the_same_curve(ranks, tmp_path: Path) -> None:
    lost = 0  # the hardest case: another process must continue the files
    flags = ("--max-steps", 50, "--eval-every", 50, "--save-every", 50, "--seq-len", 16)
    chapter = Chapter("03_horovod", tmp_path / "elastic")
    chapter.folder.mkdir()
    process = start(chapter, *flags, "--elastic", "--nproc", 3, "--timeout-s", 8, forks=True)
    os.kill(rank_pids(chapter.output)[lost], signal.SIGKILL)
    assert process.wait(timeout=HANGS_S) == 0, (chapter.folder / "log").read_text()
    said = (chapter.folder / "log").read_text()
    assert f"elastic: lost the worker that began as rank {lost}" in said and "resuming    memory" in said
    rows = chapter.metrics()
    assert [row["step"] for row in rows] == list(range(1, 51))
    workers = [row["workers"] for row in rows]
    assert workers[0] == 3 and workers[-1] == 2 and workers == sorted(workers, reverse=True)
    alone = Chapter("00_single", tmp_path / "alone")
    alone.folder.mkdir()
    train(ranks, 1, alone, *flags)
    assert chapter.losses() == pytest.approx(alone.losses(), rel=1e-4)


@pytest.mark.parametrize("flags, line", [
    (("--fusion-mb", "-1"), "--fusion-mb must be at least 0"),
    (("--fusion-mb", "many"), "--fusion-mb"),
    (("--compression", "int8"), "--compression"),
    (("--timeline", "/nowhere/trace.json"), "--timeline /nowhere/trace.json cannot be written"),
    (("--elastic", "--nproc", "1"), "--elastic --nproc 1"),
    (("--elastic", "--nproc", "4", "--batch-size", "8"), "--batch-size 8 must stay divisible when workers are lost"),
    (("--elastic", "--precision", "fp16"), "--precision fp16"),
    (("--nproc", "5"), "--batch-size 12 is not divisible by --nproc 5"),
    (("--elastik",), "did you mean --elastic?"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_line(capsys, tmp_path: Path, flags, line: str) -> None:
    given = Chapter("03_horovod", tmp_path).command(*flags)[2:]
    assert line in settings_error("03_horovod", "horovod_settings", capsys, *given)
    assert not (tmp_path / "run").exists()


def test_a_wrong_flag_is_one_line_before_a_process_starts(tmp_path: Path) -> None:
    said = Chapter("03_horovod", tmp_path).train_forked("--batch-size", 7, status=2)
    assert said.startswith("error: --batch-size 7 is not divisible by --nproc 2") and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists()


def test_without_horovod_the_program_ends_with_one_line(tmp_path: Path) -> None:
    python, program, *flags = Chapter("03_horovod", tmp_path).command()
    hide = tmp_path / "hide.py"
    hide.write_text(
        f"import importlib.util as u, runpy, sys; find = u.find_spec; sys.argv = {[program, *flags]!r}; "
        "u.find_spec = lambda name, *a: None if name == 'horovod' else find(name, *a); "
        f"sys.path[0] = {str(Path(program).parent)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )  # fmt: skip
    said = fork([python, str(hide)], status=2)
    assert said.startswith("error: Horovod is missing in this environment") and said.count("\n") == 1


@pytest.mark.deep
@needs_horovod
def test_train_sh_runs_from_any_folder(tmp_path: Path) -> None:
    chapter = Chapter("03_horovod", tmp_path)
    command = ["bash", str(ROOT / "chapters/03_horovod/train.sh"), *chapter.command("--max-steps", 2)[2:]]
    env = environment() | {"PYTHON": sys.executable, "PYTHONIOENCODING": "gbk"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="gbk", timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert "Done." in done.stdout and "「今天天气」" in done.stdout
    assert "horovod: 0.28" in done.stderr and done.stderr.count("horovod:") == 1
