"""launch(): --nproc starts that many ranks of a program, and one that fails fails them all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.program import ROOT, Chapter, environment, fork, free_port, ranks_below, wait_for_rows
from tests.cover import quick_only
from tests.harness.handed_over import handing_over
from tests.limits import HANGS_S

PROGRAM = '''"""A program of two ranks."""
from dataclasses import dataclass
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings as Base, flag

@dataclass
class Settings(Base):
    nproc: int = flag(2, "Processes on this machine.")
    fail: bool = flag(False, "Rank 1 fails.")

settings = resolve(Settings.from_command_line(__file__, __doc__))

import os
import torch
from gpt2_chinese.distributed.torchrun import launch

ranks = launch(settings)
if settings.fail and ranks.rank == 1:
    raise RuntimeError("rank 1 gives up")
total = ranks.sum(torch.tensor([ranks.rank + 1.0, 1.0]))
found = total.tolist(), ranks.mean(float(ranks.rank)), ranks.max(ranks.rank), ranks.is_main, str(ranks.device)
print(f"rank {ranks.rank} of {ranks.num_ranks}: {found} threads {os.environ['OMP_NUM_THREADS']}\\n", end="", flush=True)
ranks.barrier()
ranks.close()
assert ranks.group is None
'''


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    file = tmp_path / "90_two" / "train.py"
    file.parent.mkdir()
    file.write_text(PROGRAM)
    return [sys.executable, str(file), "--output-dir", str(tmp_path / "run"), "--device", "cpu"]


def test_two_ranks_meet(program: list[str]) -> None:
    said = fork(program)
    assert "rank 0 of 2: ([3.0, 2.0], 0.5, 1.0, True, 'cpu') threads 1" in said
    assert "rank 1 of 2: ([3.0, 2.0], 0.5, 1.0, False, 'cpu') threads 1" in said


NO_NAMES = r"""
#include <dlfcn.h>
#include <netdb.h>
#include <arpa/inet.h>
typedef int (*lookup)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    unsigned char address[16];
    if (node && !inet_pton(AF_INET, node, address) && !inet_pton(AF_INET6, node, address)) return EAI_NONAME;
    return ((lookup)dlsym(RTLD_NEXT, "getaddrinfo"))(node, service, hints, found);
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="a C compiler makes the machine that resolves no name")
def test_two_ranks_meet_on_a_machine_that_resolves_no_name_not_even_localhost(program: list[str], tmp_path: Path) -> None:
    (tmp_path / "names.c").write_text("#define _GNU_SOURCE" + NO_NAMES)
    library = str(tmp_path / "names.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "names.c"), "-ldl"], check=True)
    asked = [sys.executable, "-c", "import socket; socket.getaddrinfo('localhost', 80)"]
    preloaded = environment() | {"LD_PRELOAD": library}
    assert "gaierror" in subprocess.run(asked, env=preloaded, capture_output=True, text=True).stderr, "it does its work"
    done = subprocess.run(program, env=preloaded, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0 and done.stdout.count("([3.0, 2.0], 0.5, 1.0,") == 2, done
    assert "resolve" not in done.stderr, done.stderr
    # and by hand, as the pages about collectives do
    meets = tmp_path / "meets.py"
    meets.write_text("import os\nprint('they meet at ' + os.environ['MASTER_ADDR'] + chr(10), end='')\n")
    line = ["bash", str(ROOT / "scripts/torchrun.sh"), "--standalone", "--nproc-per-node", "2", str(meets)]
    done = subprocess.run(line, env={**preloaded, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0 and done.stdout.count("they meet at 127.0.0.1\n") == 2, done


def test_a_failing_rank_fails_the_job(program: list[str]) -> None:
    said = fork([*program, "--fail"], status=1)
    assert "rank 1 gives up" in said and "error: rank 1 failed with status 1" in said


@pytest.mark.parametrize("ends, status, said", [
    ("raise SystemExit(5)", 1, "error: rank 0 failed with status 5; its output is above"),
    ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)", 130,
     "interrupted: the same command goes on from the newest checkpoint"),
])  # fmt: skip
def test_torchrun_sh_says_in_one_line_why_the_ranks_have_ended(tmp_path: Path, ends: str, status: int, said: str) -> None:
    (tmp_path / "ends.py").write_text(f"import os, signal, time\n{ends}\n")
    line = ["bash", str(ROOT / "scripts/torchrun.sh"), "--standalone", "--nproc-per-node", "1", str(tmp_path / "ends.py")]
    given = environment() | {"PYTHON": sys.executable}
    done = subprocess.run(line, env=given, capture_output=True, text=True, timeout=HANGS_S)
    lines = [words for words in done.stderr.splitlines() if words and not words.startswith("setup: ")]
    assert (done.returncode, lines) == (status, [said])


@pytest.mark.parametrize("nproc, status, said", [
    (1, 141, ""), (2, 1, "error: rank 0 failed with status 141; its output is above\n")])
def test_a_run_whose_output_nobody_reads_any_more_ends_without_a_traceback(
    tmp_path: Path, nproc: int, status: int, said: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    name = "00_single" if nproc == 1 else "02_ddp"
    command = Chapter(name, tmp_path).command("--max-steps", 2, "--nproc", nproc)
    env = handing_over(environment())
    done = subprocess.run(command, env=env, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=HANGS_S)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("nproc", [1, 2])
def test_all_ranks_use_deterministic_kernels(program: list[str], nproc: int) -> None:
    file = Path(program[1])
    asked = "str((os.environ.get('CUBLAS_WORKSPACE_CONFIG'), torch.are_deterministic_algorithms_enabled())) + chr(10)"
    file.write_text(PROGRAM.replace("ranks.barrier()", f"print({asked}, end='', flush=True)\nranks.barrier()"))
    said = fork([*program, "--nproc", str(nproc), "--deterministic"])
    assert said.count("(':4096:8', True)") == nproc


def test_one_rank_has_no_group(program: list[str]) -> None:
    with_one = fork([*program, "--nproc", "1"])
    assert "rank 0 of 1: ([1.0, 1.0], 0.0, 0.0, True, 'cpu')" in with_one


def test_errors_come_before_any_process(program: list[str]) -> None:
    said = fork([*program, "--batch-size", "7"], status=2)
    assert said.startswith("error: --batch-size 7 is not divisible") and said.count("\n") == 1


def by_hand(chapter: Chapter, port: int, rank: int, *flags: object, **more: str) -> subprocess.Popen[str]:
    """One of two ranks, as each of two nodes starts its own."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank),
             "GLOO_SOCKET_IFNAME": "lo"}    # else gloo warns on a machine that does not resolve its own name
    return subprocess.Popen(chapter.command("--max-steps", 2, *flags), env=handing_over({**environment(), **where, **more}),
                            text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip


def started_by_hand(chapter: Chapter, *flags: object) -> list[subprocess.Popen[str]]:
    """Both ranks; the second one has `flags` more."""
    port = free_port()
    return [by_hand(chapter, port, rank, *flags[: rank * len(flags)]) for rank in range(2)]


def of_rank_1(line: str) -> str:
    """The line in the second terminal: no launcher ends that rank when rank 0 has printed and ended."""
    return line.replace("error: ", "error: rank 1: ", 1)


def test_ranks_without_a_shared_disk_are_told_so_in_one_line(tmp_path: Path) -> None:
    chapter = Chapter("02_ddp", tmp_path)
    chapter.train_forked("--max-steps", 1, "--nproc", 1)
    both = started_by_hand(chapter, "--output-dir", tmp_path / "of_this_node")
    said = [process.communicate(timeout=HANGS_S)[1] for process in both]
    line = "error: the ranks found different checkpoints: is --output-dir on a disk that all of them share?\n"
    assert said == [line, of_rank_1(line)] and [process.returncode for process in both] == [2, 2]


def test_a_rank_of_another_job_at_the_same_port_is_refused_and_takes_nothing_with_it(tmp_path: Path) -> None:
    """It comes before rank 1 of the job that meets there, and it would have trained in its place."""
    chapter, other = (Chapter("02_ddp", tmp_path / name) for name in ("ours", "other"))
    chapter.folder.mkdir()
    other.folder.mkdir()
    port = free_port()
    ours = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "gpu"}
    first = by_hand(chapter, port, 0, **ours)
    stranger = by_hand(other, port, 1, SLURM_JOB_ID="20007", SLURM_CLUSTER_NAME="gpu")
    assert stranger.communicate(timeout=HANGS_S)[1] == of_rank_1(
        f"error: this is job 20007 of the cluster gpu, but at 127.0.0.1 port {port} the ranks of job 7 of the cluster gpu "
        "meet: start it again, or give another MASTER_PORT\n")  # fmt: skip
    assert stranger.returncode == 2 and first.poll() is None
    second = by_hand(chapter, port, 1, **ours)
    said = [process.communicate(timeout=HANGS_S)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert (chapter.num_rows(), other.num_rows()) == (2, 0)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """Refuses a second run started as usual, and one whose ranks were started by hand; the first run goes on undisturbed."""
    first, second = (Chapter(name, tmp_path) for name in ("00_single", "02_ddp"))
    process = subprocess.Popen(first.command("--max-steps", 100_000, "--eval-every", 100_000),
                               env=handing_over(environment()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)  # fmt: skip
    try:
        wait_for_rows(first, process)
        line = f"error: --output-dir {first.output} is in use by another run: "
        line += "give another one, or wait until that run has ended"
        assert second.train_forked("--max-steps", 2, status=2) == f"{line}\n"
        both = started_by_hand(second)
        assert [other.communicate(timeout=HANGS_S)[1] for other in both] == [f"{line}\n", of_rank_1(f"{line}\n")]
        assert [other.returncode for other in both] == [2, 2]
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=HANGS_S)[0]
    assert process.returncode == 0 and "Stopped by SIGTERM" in said
    assert [row["step"] for row in first.metrics()] == list(range(1, len(first.metrics()) + 1))


@pytest.mark.parametrize("nproc", quick_only([1, 2], 2))
def test_ctrl_c_ends_with_one_line(tmp_path: Path, nproc: int) -> None:
    chapter = Chapter("07_patrickstar", tmp_path)
    command = chapter.command("--max-steps", 100_000, "--near-budget", "min", "--nproc", nproc)
    # A terminal sends SIGINT to the whole foreground group; a separate group simulates it.
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    wait_for_rows(chapter, process)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=HANGS_S)[1]
    assert process.returncode == 130
    lines = [line for line in said.split("\n") if line and "no compiled CPU kernels" not in line]    # without a compiler
    assert lines == ["interrupted: the same command goes on from the newest checkpoint"], said


def test_ranks_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """Otherwise they would train on, and the next start would write to the same folder at the same time."""
    chapter = Chapter("07_patrickstar", tmp_path)
    command = chapter.command("--max-steps", 10**6, "--near-budget", "min")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               start_new_session=True)
    wait_for_rows(chapter, process)
    left = ranks_below(process.pid)
    process.kill()
    try:
        process.communicate(timeout=HANGS_S)  # until the last rank has closed its end; its steps take much longer
    except subprocess.TimeoutExpired:
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
        raise
    assert len(left) == 2
