"""Starts the processes of a run under torchrun, and says in one line why they have ended.

--nproc N               start(): torchrun on this machine, with the program's own arguments
scripts/torchrun.sh     main(): torchrun with the flags of its command line, also on several nodes
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

from durable.cores import num_cores
from gpt2_chinese.distributed import lost_links, stop_signal
from gpt2_chinese.distributed.lost_rank import describe, num_killed_for_memory
from gpt2_chinese.errors import LAUNCHED_VARIABLE, LOST_PEER

if TYPE_CHECKING:
    from gpt2_chinese.settings import Settings

LOOPBACK = "127.0.0.1"  # where the processes of one machine meet


def start(settings: Settings) -> int:
    """Runs the program under torchrun on this machine; returns the exit status of the job."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // settings.nproc)))
    os.environ[LAUNCHED_VARIABLE] = str(os.getpid())
    # All ranks are on this machine. Without this, gloo looks its host name up, and warns where nothing resolves it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # What --standalone means, but by number: where nothing resolves the name localhost, it would give up after minutes.
    arguments = ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--rdzv-id={uuid.uuid4()}"]
    arguments += [f"--local-addr={LOOPBACK}", f"--nproc-per-node={settings.nproc}"]

    def at_once() -> NoReturn:
        raise SignalException("two signals to stop", signal.SIGKILL)  # torchrun ends the ranks with this signal

    try:
        with stop_signal.passed_on(at_once):
            # "--": else torchrun reads --nproc itself. stop_signal handles SIGTERM.
            return run([*arguments, "--", str(settings.program), *settings.argv], ends_at=("SIGINT", "SIGHUP", "SIGQUIT"))
    finally:
        os.environ.pop(LAUNCHED_VARIABLE, None)


def run(arguments: list[str], ends_at: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")) -> int:
    """Runs torchrun with these arguments; prints one line where it fails, and returns the exit status of the job.

    Args:
        arguments: flags, the program, and the program's flags.
        ends_at: the signals that end the job. One that is ignored at the start, as SIGHUP is under nohup, stays ignored.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    handled = [name for name in ends_at if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    arguments = [f"--signals-to-handle={','.join(handled)}", *arguments]
    killed_before = num_killed_for_memory()
    logging.disable(logging.CRITICAL)  # torchrun would log 40 lines about what is printed below in one line
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = _likeliest_cause(error)
        line = describe(rank, failure.exitcode, num_killed_for_memory() > killed_before)
        print(f"error: {line}", file=sys.stderr)
        return 1
    except (RendezvousError, DistError) as error:
        print(f"error: no connection to the other torchruns: {_first_cause(error)}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SignalException):
        exit_interrupted()
    return 0


def exit_interrupted(*_: Any) -> NoReturn:
    """Ends the program after Ctrl-C: saved checkpoints are complete, and the run can be resumed."""
    print("\ninterrupted: the same command goes on from the newest checkpoint", file=sys.stderr, flush=True)
    raise SystemExit(130)


def _likeliest_cause(error: Any) -> tuple[int, Any]:
    """(rank, failure) to report: first a killed rank, then one that failed, one ended by SIGTERM, one that lost a peer.

    torchrun sends SIGTERM to the other ranks when one has ended.
    """
    last = {-signal.SIGTERM: 2, LOST_PEER: 3}

    def order(item: tuple[int, Any]) -> tuple[int, int]:
        code = item[1].exitcode
        return last.get(code, 0 if code < 0 else 1), item[1].timestamp

    return min(error.failures.items(), key=order)


def _first_cause(error: BaseException) -> str:
    """What went wrong first, in one line: torchrun wraps the message of the connection in its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def main() -> NoReturn:
    """Runs torchrun with the flags of the command line, until a link to another node is cut."""
    lost_links.watch()
    sys.argv[0] = "torchrun.sh"  # in its usage
    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
