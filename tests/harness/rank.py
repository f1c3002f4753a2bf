"""The program of each rank of a `RankPool`: wait for a case, join a new process group, run the case, send the answer.

The parent sends a case, and each rank sends one answer: the protocol needs one pipe per rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

READY = ("ready",)


def serve(rank: int, num_ranks: int, folder: str, pipe: Connection) -> None:
    """Answers cases until the parent closes the pipe. `folder` holds the rendezvous, output and stack files."""
    # A new session: all processes that a case starts are in its process group and are killed with it (see RankPool.close).
    os.setsid()
    _send_output_to(Path(folder, f"output_{rank}"))
    stack_file = open(Path(folder, f"stack_{rank}"), "w")  # noqa: SIM115  (stays open: the signal handler writes to it)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    # Gloo looks the host name's address up, which fails on a machine without a network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

    # The ranks of several workers share the cores. A rank that waits in shared memory sleeps if there are fewer cores than
    # ranks; else it polls, which takes a sixth of the processors' time. Ranks of started programs still poll.
    os.sched_getaffinity = lambda _: {0}

    import torch

    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(READY))
    while True:
        try:
            case, timeout_s, job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(_run_case(rank, num_ranks, Path(folder, f"rendezvous_{case}"), timeout_s, job))


def _run_case(rank: int, num_ranks: int, rendezvous: Path, timeout_s: float, job: bytes) -> bytes:
    """Returns the pickled answer: ("returned", value) or ("raised", one line, traceback, whether a peer was lost)."""
    import torch
    import torch.distributed as dist

    try:
        function, args = pickle.loads(job)
        torch.manual_seed(0)
        random.seed(0)
        # A new process group for each case (0.03 s): a message that one case did not receive cannot reach the next one.
        # The group's timeout, half of the case's, turns a hanging collective into a traceback that shows the line.
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=max(1.0, timeout_s / 2)),
        )
        value = function(rank, num_ranks, *args)
        _same_number_of_collectives()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            return pickle.dumps(("returned", value))
        except Exception as error:
            raise TypeError(f"the result of the case cannot be pickled: {error}") from error
    except BaseException as error:  # also SystemExit: a case that exits has failed
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return pickle.dumps(("raised", line, traceback.format_exc(), _is_about_communication(error)))


def _same_number_of_collectives() -> None:
    """Makes one more collective at the end of the case. Gloo numbers collectives, so a rank with one fewer hangs here."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("the case destroyed the default process group; that is the harness's to do")
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RuntimeError(
            f"this rank finished, but not all do: one hangs, or they did not make the same collective calls ({error})"
        ) from error


def _is_about_communication(error: BaseException) -> bool:
    """True for errors that a rank raises because ANOTHER rank died or never came: they are reported after the cause."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "connection", "timed out", "same collective calls", "socket", "store")
    )


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _send_output_to(path: Path) -> None:
    """Redirects file descriptors 1 and 2 to `path`, so that output of C++ and child processes is kept as well."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
