"""Starts the processes of a run under Horovod's launcher, and says in one line which of them failed.

    train.py -> launch(settings, "horovodrun") -> start(): this process becomes `python -m` of this file
             -> Horovod's own launcher, with the flags that a user of `horovodrun` would type
             -> train.py N times, with HOROVOD_RANK set: adopt_ranks() gives that the names which everything else reads

A process of its own, because Horovod's launcher starts helpers that import the main module once more: train.py must not be
that module. Nothing here imports torch. On a cluster the launcher is called directly: see the README of chapter 03.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from gpt2_chinese.distributed import stop_signal
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
# One host for each worker of an elastic run on this machine: 127.0.0.1, 127.0.0.01, 127.0.0.001 ... are one address.
LOOPBACK = "127.0.0.1"
GLOO_PATIENCE_S = 20
LOST_LINE = "lost touch with the other ranks"  # what it says; the launcher then knows who did not


def adopt_ranks() -> None:
    """Gives the rank that Horovod's launcher (or MPI) set the names RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE."""
    if "RANK" in os.environ:
        return
    for names in LAUNCHERS:
        if names[0] in os.environ:
            for ours, theirs in zip(NAMES, names, strict=True):
                os.environ[ours] = os.environ.get(theirs, "0" if "RANK" in ours else "1")
            host = os.environ.get("HOROVOD_HOSTNAME", "")
            if re.fullmatch(r"127\.0\.0\.0+1", host):  # each elastic worker here is alone on "its" host
                number = len(host) - len(LOOPBACK)
                os.environ["LOCAL_RANK"] = str(number)
                os.environ["LOCAL_WORLD_SIZE"] = str(max(number + 1, int(os.environ["WORLD_SIZE"])))
            return


def is_installed() -> bool:
    """True when there is a Horovod in this environment; it is not imported."""
    return importlib.util.find_spec("horovod") is not None


def start(settings: ParallelSettings, flags: Sequence[str] = ()) -> NoReturn:
    """Becomes Horovod's launcher for the program of these settings, with the same arguments.

    Args:
        settings: checked; nproc says how many.
        flags: of horovodrun, besides --gloo, -np and -H.

    Raises:
        UserError: Horovod is missing and this was not started by a train.sh, which builds it.
        SystemExit: its build failed; it has said why.
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.nproc)))
    os.environ[LAUNCHED_VARIABLE] = "1"
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # a lost peer is an exception, and said once
    # A rank that stands still ends the job. Its program alone: Horovod sees a stall. All of its process, Horovod's thread
    # too: gloo waits in vain, which can be shorter, for that thread answers whatever the program does. In an elastic run
    # it is how long two that are left may wait for each other, both in a ring that has lost a third.
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
    """A text stream for Horovod's launcher: what the ranks say goes on without its `[0]<stdout>:`, and what the launcher
    itself says is kept: which rank ended, and how.

    Attributes:
        ended: (rank, exit status) in the order in which ranks failed; a signal is a negative status, as in subprocess.
        lost: ranks that said that they lost touch with the others.
        said: other lines of the launcher's own.
    """

    def __init__(self, stream: TextIO, elastic: bool) -> None:
        self.stream, self.elastic = stream, elastic
        self.ended: list[tuple[int, int]] = []
        self.lost: set[int] = set()
        self.said: list[str] = []

    def write(self, text: str) -> int:
        """One call a line for what ranks say: Horovod makes it so."""
        if prefixed := re.match(r"\[(\d+)\]<std(?:out|err)>:", text):
            if LOST_LINE in text:
                self.lost.add(int(prefixed[1]))
            if text[prefixed.end() :].strip() not in ("Killed", "Terminated"):  # the shell around a rank, about its end
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
        """As every stream."""
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def main(arguments: list[str]) -> int:
    """Runs Horovod's launcher with these arguments; returns the exit status of the job."""
    from horovod.runner import gloo_run, launch

    shutdown_events = []
    register = gloo_run.register_shutdown_event

    def remembered():
        shutdown_events.append(register())
        install()  # it has taken SIGTERM for itself
        return shutdown_events[-1]

    gloo_run.register_shutdown_event = remembered
    elastic = "--host-discovery-script" in arguments
    streams = Unprefixed(sys.stdout, elastic), Unprefixed(sys.stderr, elastic)
    # Horovod's parser would take a flag of the program for an abbreviation of its own: --timeline, --elastic
    unabbreviated = functools.partialmethod(argparse.ArgumentParser.__init__, allow_abbrev=False)
    argparse.ArgumentParser.__init__ = unabbreviated  # type: ignore[method-assign,assignment]
    sys.argv = ["horovodrun", *arguments]
    problem = ""
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
    # Not those who lost touch because of it: whoever hung is the one that did not, until the launcher killed it.
    ended = [(rank, status) for rank, status in streams[0].ended if status != LOST_PEER and rank not in streams[1].lost]
    if ended or streams[0].ended:
        rank, status = (ended or streams[0].ended)[0]
        how = f" ({signal.Signals(-status).name})" if status < 0 else ""
        line = f"rank {rank} failed with status {status}{how}; what it said stands above"
    else:
        line = f"horovodrun failed: {' '.join(' '.join([*streams[0].said, *streams[1].said, problem]).split())}"
    print(f"error: {line}", file=sys.stderr, flush=True)
    return 1


def _interrupted() -> int:
    print("\ninterrupted: the same command goes on from the newest checkpoint", file=sys.__stderr__, flush=True)
    return 130


def discovery_flags(script: Path, nproc: int) -> list[str]:
    """horovodrun's flags for an elastic run on this machine.

    A host on which a worker failed is never used again, so each worker is given a host of its own.

    Args:
        script: prints the hosts that there are; horovodrun asks it every second.
        nproc: workers at the start, and at most.
    """
    os.environ[WORKERS_VARIABLE] = str(nproc)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    limits = ["--min-np", "1", "--max-np", str(nproc)]
    return [*limits, "--host-discovery-script", str(script), "--network-interfaces", loopback]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
