"""Starts the processes of a run under Horovod's launcher, and names a failed rank in one line.

    train.py -> launch(settings, "horovodrun") -> start(): this process becomes `python -m` of this file
             -> Horovod's own launcher, with the flags that a user of `horovodrun` would type
             -> train.py N times, with HOROVOD_RANK set: adopt_ranks() copies it to RANK, which all other code reads

The launcher gets a separate main module, because its helpers import the main module again: that must not be train.py.
Nothing here imports torch. On a cluster the launcher is called directly: see the README of chapter 03.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from durable.cores import num_cores
from durable.printable import escape_what_stdout_lacks
from gpt2_chinese.distributed import stop_signal
from gpt2_chinese.distributed.lost_rank import describe, num_killed_for_memory
from gpt2_chinese.errors import LAUNCHED_VARIABLE, LOST_PEER, UserError

if TYPE_CHECKING:
    from gpt2_chinese.settings import ParallelSettings

BUILD_VARIABLE = "GPT2_CHINESE_HOROVOD_BUILD"  # set by train.sh: the script that builds Horovod when it is missing
WORKERS_VARIABLE = "GPT2_CHINESE_ELASTIC_WORKERS"  # for the host discovery script of an elastic run
# rank, number of ranks, local rank, local number of ranks: as Horovod on gloo, Open MPI, and MPICH's launcher name them
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Each worker of an elastic run on this machine has another host name: 127.0.0.1, 127.0.0.01 ... are the same address.
LOOPBACK = "127.0.0.1"
GLOO_PATIENCE_S = 20
LOST_LINE = "lost touch with the other ranks"  # printed by ranks that lost a peer; the launcher learns which did not


def adopt_ranks() -> None:
    """Copies the rank variables of Horovod's launcher (or MPI) to RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE."""
    if "RANK" in os.environ:
        return
    for names in LAUNCHERS:
        if names[0] in os.environ:
            for ours, theirs in zip(NAMES, names, strict=True):
                os.environ[ours] = os.environ.get(theirs, "0" if "RANK" in ours else "1")
            host = os.environ.get("HOROVOD_HOSTNAME", "")
            if re.fullmatch(r"127\.0\.0\.0+1", host):  # an elastic worker on this machine is alone on its host name
                number = len(host) - len(LOOPBACK)
                os.environ["LOCAL_RANK"] = str(number)
                os.environ["LOCAL_WORLD_SIZE"] = str(max(number + 1, int(os.environ["WORLD_SIZE"])))
            return


def is_installed() -> bool:
    """True when Horovod is installed in this environment; does not import it."""
    return importlib.util.find_spec("horovod") is not None


def start(settings: ParallelSettings, flags: Sequence[str] = ()) -> NoReturn:
    """Replaces this process by Horovod's launcher, which runs the program of these settings with the same arguments.

    Args:
        settings: checked; nproc is the number of ranks.
        flags: more flags of horovodrun, in addition to --gloo, -np and -H.

    Raises:
        UserError: Horovod is missing, and this process was not started by a train.sh, which builds it.
        SystemExit: the build failed; its script has printed the reason.
    """
    if script := os.environ.get(BUILD_VARIABLE):
        status = subprocess.run(["bash", script]).returncode
        if status:
            raise SystemExit(status)
    elif not is_installed():
        raise UserError(
            "Horovod is missing in this environment: start this chapter with its train.sh, which builds it once, "
            "or run bash scripts/build_horovod.sh"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // settings.nproc)))
    os.environ[LAUNCHED_VARIABLE] = "1"
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # a lost peer raises an exception, which is printed once
    # A hanging rank ends the job: after the stall limits if only its program hangs, after gloo's timeout if Horovod's
    # thread hangs, too. That timeout can be shorter, because the thread answers whatever the program does. In an elastic
    # run it also limits how long two ranks wait for each other in a ring that has lost a third rank.
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(settings.timeout_s))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(settings.timeout_s))
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(min(settings.timeout_s, GLOO_PATIENCE_S)))
    where = [] if "--host-discovery-script" in flags else ["-H", f"localhost:{settings.nproc}"]
    command = ["--gloo", "-np", str(settings.nproc), *where, *flags, sys.executable, str(settings.program), *settings.argv]
    sys.stdout.flush()
    sys.stderr.flush()
    # -P: the working directory may hold another checkout
    os.execv(sys.executable, [sys.executable, "-P", "-m", "gpt2_chinese.distributed.horovod_launcher", *command])


class Unprefixed:
    """A text stream for Horovod's launcher: passes the ranks' output on without its `[0]<stdout>:`, and keeps the
    launcher's own lines: which rank ended, and how.

    Attributes:
        ended: (rank, exit status) in the order in which ranks failed; a signal is a negative status, as in subprocess.
        lost: ranks that printed LOST_LINE.
        said: the other lines of the launcher.
    """

    def __init__(self, stream: TextIO, elastic: bool) -> None:
        self.stream, self.elastic = stream, elastic
        self.ended: list[tuple[int, int]] = []
        self.lost: set[int] = set()
        self.said: list[str] = []

    def write(self, text: str) -> int:
        """Horovod calls this once for each line of a rank's output."""
        if prefixed := re.match(r"\[(\d+)\]<std(?:out|err)>:", text):
            if LOST_LINE in text:
                self.lost.add(int(prefixed[1]))
            if text[prefixed.end() :].strip() not in ("Killed", "Terminated"):  # by a rank's shell, about its end
                self.stream.write(text[prefixed.end() :])
        elif failed := re.match(r"Process (\d+) exit with status code (\d+)", text):
            status = int(failed[2])
            self.ended.append((int(failed[1]), 128 - status if status > 128 else status))
            if self.elastic:
                rank, status = self.ended[-1]
                self.stream.write(f"\nelastic: lost the worker that began as rank {rank} (status {status})\n")
        elif text.strip() and not text.startswith("Terminating remaining workers"):
            self.said.append(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if it is still open."""
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def main(arguments: list[str]) -> int:
    """Runs Horovod's launcher with these arguments; returns the exit status of the job."""
    from horovod.runner import gloo_run, launch

    escape_what_stdout_lacks()
    os.environ["PYTHONIOENCODING"] = "utf-8"  # of the ranks: Horovod reads their output so, whatever the locale is
    shutdown_events = []
    register = gloo_run.register_shutdown_event

    def remembered():
        shutdown_events.append(register())
        install()  # again: Horovod has just installed its own SIGTERM handler
        return shutdown_events[-1]

    gloo_run.register_shutdown_event = remembered
    elastic = "--host-discovery-script" in arguments
    streams = Unprefixed(sys.stdout, elastic), Unprefixed(sys.stderr, elastic)
    # else Horovod's parser reads the program's flags, such as --timeline and --elastic, as abbreviations of its own flags
    unabbreviated = functools.partialmethod(argparse.ArgumentParser.__init__, allow_abbrev=False)
    argparse.ArgumentParser.__init__ = unabbreviated  # type: ignore[method-assign,assignment]
    sys.argv = ["horovodrun", *arguments]
    problem, killed_before = "", num_killed_for_memory()
    with (
        stop_signal.passed_on(lambda: [event.set() for event in shutdown_events]) as install,
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        try:
            launch.run_commandline()
        except KeyboardInterrupt:
            return _interrupted()
        except SystemExit as error:
            if error.code not in (0, None):
                problem = str(error.code)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    if any(event.is_set() for event in shutdown_events):
        return _interrupted()
    if not problem:
        return 0
    num_ranks = int(arguments[arguments.index("-np") + 1])
    said = " ".join(" ".join([*streams[0].said, *streams[1].said, problem]).split())
    memory_ran_out = num_killed_for_memory() > killed_before
    line = blame(streams[0].ended, streams[1].lost, num_ranks, memory_ran_out) or f"horovodrun failed: {said}"
    print(f"error: {line}", file=sys.stderr, flush=True)
    return 1


def blame(ended: Sequence[tuple[int, int]], lost: Set[int], num_ranks: int, memory_ran_out: bool = False) -> str:
    """One line that names the rank that failed first; empty when no rank ended with an error.

    Horovod does not always tell how a rank ended that it killed: psutil's wait can take the exit status before the
    process that would report it, which then reports 0. So a rank that is not in these lists at all is blamed, too.

    Args:
        ended: (rank, exit status) of the ranks that ended with an error, in that order.
        lost: ranks that printed LOST_LINE; a rank that hung printed none before the launcher killed it.
        num_ranks: ranks of the job.
        memory_ran_out: the system has killed processes during the job because memory ran out.
    """
    if not ended:
        return ""
    guilty = [(rank, status) for rank, status in ended if status != LOST_PEER and rank not in lost]
    silent = [rank for rank in range(num_ranks) if rank not in lost and rank not in dict(ended)]
    if not guilty and silent:
        return f"rank {silent[0]} stopped answering the other ranks; its output is above"
    rank, status = (guilty or ended)[0]
    return describe(rank, status, memory_ran_out)


def _interrupted() -> int:
    print("\ninterrupted: the same command goes on from the newest checkpoint", file=sys.__stderr__, flush=True)
    return 130


def discovery_flags(script: Path, nproc: int) -> list[str]:
    """horovodrun's flags for an elastic run on this machine.

    horovodrun never uses a host again on which a worker failed, so each worker gets a separate host.

    Args:
        script: prints the available hosts; horovodrun runs it every second.
        nproc: workers at the start, and at most.
    """
    os.environ[WORKERS_VARIABLE] = str(nproc)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    limits = ["--min-np", "1", "--max-np", str(nproc)]
    return [*limits, "--host-discovery-script", str(script), "--network-interfaces", loopback]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
