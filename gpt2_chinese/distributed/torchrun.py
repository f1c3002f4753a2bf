"""Starts the processes of a run and joins them.

settings -> launch() --nproc 1-> Ranks of one, no process group at all
                     --nproc N-> torchrun starts this program N times; each comes here again with RANK set and joins
                     horovodrun, where a chapter asks for it, instead: horovod_launcher.py, horovod_ranks.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
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
from durable.hang_report import Watch
from gpt2_chinese import background
from gpt2_chinese.distributed import flight_recorder, horovod_launcher, stop_signal
from gpt2_chinese.distributed.devices import choose_deterministic_kernels
from gpt2_chinese.distributed.ranks import GRACE_S, Ranks
from gpt2_chinese.errors import LAUNCHED_VARIABLE, LOST_PEER, RunError, UserError, exit_on_user_error, print_on_rank_0
from gpt2_chinese.files import display

if TYPE_CHECKING:
    from gpt2_chinese.settings import Settings

ANSWER_S = 30.0  # how long a rank that has lost another waits for the store
LOOPBACK = "127.0.0.1"  # where the processes of one machine meet


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
            raise SystemExit(_torchrun(settings))
    # Ctrl-C reaches every process of a terminal. Under a launcher the ranks end silently and the launcher prints the line.
    signal.signal(signal.SIGINT, signal.SIG_DFL if "RANK" in os.environ else _exit_interrupted)
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if settings.device == "cuda" else torch.device("cpu")
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
    with exit_on_user_error():
        store, _, num_ranks = _meet(settings)
    processes = _wait_for_all(store, rank, num_ranks)
    flight_recorder.choose_size()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=settings.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    stop_signal.listen(is_lost=lambda: any(_is_gone(host, int(pid)) for host, pid in processes))
    torch_hook = sys.excepthook  # set by init_process_group: prints a traceback whose lines begin with the rank
    sys.excepthook = lambda *error: _end_rank(*error, torch_hook, store, rank, num_ranks)
    return Ranks(rank, num_ranks, local_rank, device, dist.group.WORLD, _watch(settings, store, rank, num_ranks))


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


def _meet(settings: Settings) -> tuple[Any, int, int]:
    """The rendezvous: (store of the ranks, this rank, number of ranks). Raises UserError when the address is unusable."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(
            f"the environment has RANK, but MASTER_ADDR={address!r} and MASTER_PORT={port!r} are no place to meet: "
            "unset RANK and WORLD_SIZE, or start with a launcher that sets all four"
        )
    try:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=max(60, settings.timeout_s))))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"the ranks cannot meet at {address} port {port}: the port is in use; give another MASTER_PORT"
        ) from None


def _wait_for_all(store: Any, rank: int, num_ranks: int) -> list[list[str]]:
    """[host, process] of each rank, as soon as all are there; a rank that does not come ends this one with one line.

    --timeout-s begins after that: it is a limit of collectives, and imports of ranks differ by seconds.
    """
    store.set(f"process of {rank}", f"{socket.gethostname()} {os.getpid()}")
    found = []
    for other in range(num_ranks):
        try:
            found.append(store.get(f"process of {other}").decode().split())
        except dist.DistStoreError:
            print(f"error: rank {rank} waited in vain at the start: rank {other} did not come", file=sys.stderr, flush=True)
            raise SystemExit(LOST_PEER) from None
    return found


def _end_rank(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None,
    print_traceback: Callable[..., Any], store: Any, rank: int, num_ranks: int,
) -> NoReturn:  # fmt: skip
    """Ends a rank on an uncaught error: expected errors print once, unexpected errors with a traceback.

    A rank that loses another, by --timeout-s or by its connection, notes in the store that it has given up. All ranks that
    wait for the same rank do so within GRACE_S, so the ranks without a note hang or have ended.
    """
    status = 1
    if isinstance(error, BrokenPipeError) and closed_pipe.silence():
        status = closed_pipe.STATUS  # the launcher says one line
    elif isinstance(error, RunError):
        print_on_rank_0(str(error), rank)
    elif getattr(error, "one_line", False):  # of a library, with advice in its message; perhaps not on all ranks
        with contextlib.suppress(Exception):
            if store.add("an error was said", 1) == 1:
                print(f"\nerror: rank {rank}: {error}", file=sys.stderr, flush=True)
    elif _is_about_peers(error):
        status, missing, reports, line = LOST_PEER, [], True, f"rank {rank} waited in vain for the others"
        try:
            # In a thread: over a link that is cut, the store's answer would never come.
            asked = ThreadPoolExecutor(1).submit(_who_is_missing, store, rank, num_ranks)
            missing, reports = asked.result(GRACE_S + ANSWER_S)
            if missing:
                line += f": rank {', '.join(map(str, missing))} did not come, or not within --timeout-s"
        except Exception as lost:
            line += f": {os.environ['MASTER_ADDR']}, where they meet, no longer answers ({type(lost).__name__})"
        if reports:
            print(f"\nerror: {line}", file=sys.stderr, flush=True)
            with contextlib.suppress(Exception):
                _kill(store, missing)  # after the line: when the launcher sees a killed rank, it ends this one as well
    else:
        print_traceback(kind, error, trace)
    background.end(ANSWER_S if status == LOST_PEER else None)  # a save of all ranks may wait for the lost one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no normal exit: with collectives under way it would wait for them, or abort


def _who_is_missing(store: Any, rank: int, num_ranks: int) -> tuple[list[int], bool]:
    """(the ranks that have not given up, whether this rank is the first that has and so reports them)."""
    store.set(f"gave up {rank}", "1")
    time.sleep(GRACE_S)  # where a rank has died, the launcher reports it and ends this rank meanwhile
    waited = [r for r in range(num_ranks) if store.check([f"gave up {r}"])]
    return [r for r in range(num_ranks) if r not in waited], rank == min(waited)


def _report_alone(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, print_traceback: Callable[..., Any]
) -> None:
    """Reports the uncaught error of a single process; afterwards Python ends the process with status 1."""
    if isinstance(error, BrokenPipeError) and closed_pipe.silence():
        os._exit(closed_pipe.STATUS)  # its output is read by nobody any more, as after `| head`
    if isinstance(error, RunError) or getattr(error, "one_line", False):
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
    """True for what torch.distributed raises when another rank went away or did not come."""
    text = str(error).lower()
    words = ("timed out", "timeout", "connection", "connect ", "socket", "gloo", "nccl")
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in words))


def _likeliest_cause(error: Any) -> tuple[int, Any]:
    """(rank, failure) to report: first a killed rank (not by SIGTERM), then one that failed, then one that lost a peer."""

    def order(item: tuple[int, Any]) -> tuple[int, int]:
        code = item[1].exitcode
        return (0 if code < 0 and code != -signal.SIGTERM else 2 if code == LOST_PEER else 1), item[1].timestamp

    return min(error.failures.items(), key=order)


def _torchrun(settings: Settings) -> int:
    """Runs the program under torchrun on this machine; returns the exit status of the job."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.disable(logging.CRITICAL)  # torchrun would log 40 lines about what is printed below in one line
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.nproc)))
    os.environ[LAUNCHED_VARIABLE] = str(os.getpid())
    # All ranks are on this machine. Without this, gloo looks its host name up, and warns where nothing resolves it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # What --standalone means, but by number: where nothing resolves the name localhost, it would give up after minutes.
    arguments = ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--rdzv-id={uuid.uuid4()}"]
    arguments += [f"--local-addr={LOOPBACK}", f"--nproc-per-node={settings.nproc}"]
    arguments.append("--signals-to-handle=SIGINT,SIGHUP,SIGQUIT")  # stop_signal handles SIGTERM and SIGUSR1

    def at_once() -> NoReturn:
        raise SignalException("two signals to stop", signal.SIGKILL)  # torchrun ends the ranks with this signal

    try:
        with stop_signal.passed_on(at_once):
            main([*arguments, "--", str(settings.program), *settings.argv])  # "--": else torchrun reads --nproc itself
    except ChildFailedError as error:
        rank, failure = _likeliest_cause(error)
        how = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
        print(
            f"error: rank {rank} failed with status {failure.exitcode}{how}; its output is above",
            file=sys.stderr,
        )
        return 1
    except (KeyboardInterrupt, SignalException):
        _exit_interrupted()
    finally:
        os.environ.pop(LAUNCHED_VARIABLE, None)
    return 0


def _exit_interrupted(*_: Any) -> NoReturn:
    """Ends the program after Ctrl-C: saved checkpoints are complete, and the run can be resumed."""
    print("\ninterrupted: the same command goes on from the newest checkpoint", file=sys.stderr, flush=True)
    raise SystemExit(130)
