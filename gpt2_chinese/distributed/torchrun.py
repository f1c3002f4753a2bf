"""Starts the processes of a run and joins them.

settings -> launch() --nproc 1-> Ranks of one, no process group at all
                     --nproc N-> torchrun starts this program N times; each comes here again with RANK set and joins
                     horovodrun, where a chapter asks for it, instead: horovod_launcher.py, horovod_ranks.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

# Optimizers import this module, whose functions bind the default process group of that moment as a default argument.
# Imported before there is a group, it keeps no gloo threads alive after close(); they would abort the process at its end.
import torch.distributed.nn  # noqa: F401

from durable import closed_pipe
from durable.cores import limit_threads
from durable.hang_report import Watch
from gpt2_chinese import background
from gpt2_chinese.distributed import (
    flight_recorder,
    horovod_launcher,
    lost_links,
    meeting,
    sockets,
    stop_signal,
    torchrun_launcher,
)
from gpt2_chinese.distributed.devices import choose_deterministic_kernels
from gpt2_chinese.distributed.ranks import GRACE_S, Ranks
from gpt2_chinese.errors import LAUNCHED_VARIABLE, LOST_PEER, RunError, exit_on_user_error, print_on_rank_0
from gpt2_chinese.files import display

if TYPE_CHECKING:
    from gpt2_chinese.settings import Settings

REPORTED = "the lost ranks are reported"  # key of the store
ANSWER_S = 30.0  # how long a rank that has lost another waits for the store


def launch(settings: Settings, launcher: str = "torchrun", flags: Sequence[str] = ()) -> Ranks:
    """Starts the other processes, if --nproc asks for any, and returns the Ranks of this process.

    With --nproc above 1, and not yet under a launcher, it runs torchrun on the program with the same arguments and exits
    with its status. A rank that fails makes the job fail.

    Args:
        settings: of the run, resolved.
        launcher: "torchrun", or "horovodrun", which also starts a single process, so that its flags have an effect.
        flags: more flags of horovodrun.
    """
    if settings.deterministic:
        choose_deterministic_kernels(settings.device)
    with exit_on_user_error():
        if "RANK" not in os.environ and launcher == "horovodrun":
            horovod_launcher.start(settings, flags)
        if "RANK" not in os.environ and settings.nproc > 1:
            raise SystemExit(torchrun_launcher.start(settings))
    # Ctrl-C reaches every process of a terminal. Under a launcher the ranks end silently and the launcher prints the line.
    signal.signal(signal.SIGINT, signal.SIG_DFL if "RANK" in os.environ else torchrun_launcher.exit_interrupted)
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if settings.device == "cuda" else torch.device("cpu")
    limit_threads()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launcher == "horovodrun":
        from gpt2_chinese.distributed import horovod_ranks

        with exit_on_user_error():
            ranks = horovod_ranks.join(device)
        stop_signal.listen(signals=(signal.SIGUSR1,))  # Horovod's launcher ends its ranks by SIGTERM
        return ranks
    if settings.nproc == 1:
        stop_signal.listen()
        python_hook = sys.excepthook
        sys.excepthook = lambda *error: _report_alone(*error, python_hook)
        return Ranks(device=device)
    if LAUNCHED_VARIABLE in os.environ:
        _end_with(int(os.environ[LAUNCHED_VARIABLE]))
    inherited = sockets.names()
    with exit_on_user_error():
        store, processes = meeting.meet(settings.timeout_s)
    num_ranks = len(processes)
    flight_recorder.choose_size()
    timeout = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if len({host for host, _ in processes}) > 1:
        lost_links.watch()
    stop_signal.listen(is_lost=lambda: any(_is_gone(host, int(pid)) for host, pid in processes))
    torch_hook = sys.excepthook  # set by init_process_group: prints a traceback whose lines begin with the rank
    sys.excepthook = lambda *error: _end_rank(*error, torch_hook, store, rank, num_ranks, inherited)
    watch = _watch(settings, store, rank, num_ranks)
    return Ranks(rank, num_ranks, local_rank, device, dist.group.WORLD, watch, timeout)


def _watch(settings: Settings, store: Any, rank: int, num_ranks: int) -> Watch | None:
    """The thread that reports a hang and then ends this rank; None with --hang-after 0."""
    if settings.hang_after == 0:
        return None
    own_connection = store.clone()  # a main thread that waits in the store would keep the other one

    def end(others_wait: bool, silent: list[int]) -> NoReturn:
        with contextlib.suppress(Exception):
            _kill(own_connection, silent)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if others_wait else LOST_PEER)

    folder = display(Path(settings.output_dir))
    return Watch(own_connection, rank, num_ranks, settings.hang_after, folder, end, [flight_recorder.FlightRecorder()],
                 f"bash scripts/python.sh -m gpt2_chinese.hangs {folder} prints a table",
                 flight_recorder.save_dump)  # fmt: skip


def _end_with(launcher: int) -> None:
    """Ends this rank when its launcher has ended: else ranks of a killed launcher would run next to those of the next."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(GRACE_S / 2)
        os._exit(LOST_PEER)

    threading.Thread(target=watch, daemon=True).start()


def _end_rank(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None,
    print_traceback: Callable[..., Any], store: Any, rank: int, num_ranks: int, inherited: Collection[str],
) -> NoReturn:  # fmt: skip
    """Ends a rank on an uncaught error: expected errors print once, unexpected errors with a traceback.

    A rank that loses another, by --timeout-s or by its connection, notes in the store that it has given up, and hangs up.
    All ranks that wait for it or for the lost one do so within GRACE_S, so the ranks without a note hang or have ended.
    """
    status = 1
    if isinstance(error, BrokenPipeError) and closed_pipe.silence():
        status = closed_pipe.STATUS  # the launcher says one line
    elif isinstance(error, RunError):
        print_on_rank_0(str(error), rank)
    elif _has_one_line(error) and not _is_about_peers(error):  # of a library, perhaps not on all ranks
        with contextlib.suppress(Exception):
            if store.add("an error was said", 1) == 1:
                print(f"\nerror: rank {rank}: {error}", file=sys.stderr, flush=True)
    elif _is_about_peers(error):
        status, missing, reports, line = LOST_PEER, [], True, f"rank {rank} waited in vain for the others"
        try:
            # In a thread: over a link that is cut, the store's answer would never come.
            asked = ThreadPoolExecutor(1).submit(_who_is_missing, store, rank, num_ranks, inherited)
            missing, reports = asked.result(GRACE_S + ANSWER_S)
            if missing:
                line += f": rank {', '.join(map(str, missing))} did not come, or not within --timeout-s"
        except Exception as lost:
            line += f": {os.environ['MASTER_ADDR']}, where they meet, no longer answers ({type(lost).__name__})"
        with contextlib.suppress(Exception):
            if reports:
                print(f"\nerror: {line}", file=sys.stderr, flush=True)
                store.set(REPORTED, "1")
                _kill(store, missing)  # after the line: when the launcher sees a killed rank, it ends this one as well
            else:
                store.wait([REPORTED], timedelta(seconds=GRACE_S))  # when this rank ends, the launcher ends the other one
    else:
        print_traceback(kind, error, trace)
    background.end(ANSWER_S if status == LOST_PEER else None)  # a save of all ranks may wait for the lost one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no normal exit: with collectives under way it would wait for them, or abort


def _who_is_missing(store: Any, rank: int, num_ranks: int, inherited: Collection[str]) -> tuple[list[int], bool]:
    """(the ranks that have not given up, whether this rank is the first that has and so reports them)."""
    store.set(f"gave up {rank}", "1")
    # NCCL ends its own connections. A save under way that needs nothing more from the lost rank goes on.
    if dist.get_backend() == "gloo" and not background.is_running():
        lost_links.hang_up(int(os.environ["MASTER_PORT"]), inherited)
    time.sleep(GRACE_S)  # where a rank has died, the launcher reports it and ends this rank meanwhile
    waited = [r for r in range(num_ranks) if store.check([f"gave up {r}"])]
    return [r for r in range(num_ranks) if r not in waited], rank == min(waited)


def _report_alone(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, print_traceback: Callable[..., Any]
) -> None:
    """Reports the uncaught error of a single process; afterwards Python ends the process with status 1."""
    if isinstance(error, BrokenPipeError) and closed_pipe.silence():
        os._exit(closed_pipe.STATUS)  # its output is read by nobody any more, as after `| head`
    if isinstance(error, RunError) or _has_one_line(error):
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
    else:
        print_traceback(kind, error, trace)


def _kill(store: Any, ranks: list[int]) -> None:
    """Kills those ranks that run on this machine: a hanging rank ignores SIGTERM, and torchrun would wait 30 s for it."""
    for host, pid in (store.get(f"process of {rank}").decode().split() for rank in ranks):
        if host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _is_gone(host: str, pid: int) -> bool:
    """True when a process of this machine has ended."""
    try:
        if host == socket.gethostname():
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _is_about_peers(error: BaseException) -> bool:
    """True for what torch.distributed and pstar's shared memory raise when another rank went away or did not come."""
    if _has_one_line(error):
        return isinstance(error, TimeoutError)
    words = ("timed out", "timeout", "connection", "connect ", "socket", "gloo", "nccl")
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(word in text for word in words))


def _has_one_line(error: BaseException) -> bool:
    """True for an error of a library, such as pstar's, whose message says what is wrong and what to do."""
    return getattr(error, "one_line", False)
