"""`RankPool`: ranks that stay alive for many cases, because starting them costs more than most cases do.

A case is a function at the top level of a module, called on each rank as `function(rank, num_ranks, *args)` inside an
initialised gloo group. Its arguments and results are pickled. A case is red if any rank raises, dies, hangs, exits
without a result, or makes other collective calls than its peers; the message names the rank and shows its stack. The ranks
import all that a test module imports at its top: import slow modules (transformers) inside the functions that need them.

    def case(rank, num_ranks, scale):
        total = torch.full((2,), float(rank)) * scale
        dist.all_reduce(total)
        return total

    def test_sum(ranks):
        for total in ranks(2).run(case, 3.0): ...
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.rank import READY, serve
from tests.tally import started

START_TIMEOUT_S = 180  # the first start imports torch, which takes long on a busy machine
LIMIT_S = 180.0  # of a case without `timeout`; most cases take less than a second
GRACE_S = 0.6  # after a failure whose cause is known: the time in which the other ranks may report theirs
LOST_GRACE_S = 5.0  # after an error about a lost peer: the time in which the peer may report its error, mostly at once
STACK_S = 5.0  # the longest wait for a hanging rank's stack, which is written at once unless the machine is busy
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

# The server process imports these once; ranks are forked from it and start in a fraction of a second.
_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch.distributed", "torch._dynamo", "pytest", "tests.harness.rank"]    # torch.optim imports _dynamo
_LAST = "tests.harness.freeze"
_context.set_forkserver_preload([*_preloaded, _LAST])


def preload(*modules: str) -> None:
    """Adds modules that the server process imports, for cases with many imports; call it before the first rank starts.

    Only modules that start no thread: a fork has no threads.
    """
    _preloaded.extend(modules)
    _context.set_forkserver_preload([*_preloaded, _LAST])


def pipe() -> tuple[Any, Any]:
    """Two connected ends; one can be an argument of `start_process`."""
    return _context.Pipe()


def start_process(function: Callable, *args, name: str | None = None) -> multiprocessing.process.BaseProcess:
    """Forks a process from the server, which starts with the first one, and runs a top-level function in it."""
    with mock.patch.dict(os.environ, ONE_THREAD):
        forkserver.ensure_running()
    started["ranks"] += 1
    # daemon: if the test run ends without close(), Python's exit ends the process
    process = _context.Process(target=function, args=args, daemon=True, name=name)
    process.start()
    return process


class RankFailure(AssertionError):
    """A case failed on at least one rank. The message names the ranks, the causes and the tracebacks."""


def run_ranks(function: Callable, num_ranks: int, *args, timeout: float = LIMIT_S) -> list:
    """Runs one case on new ranks and returns the results by rank. For more than one case keep a `RankPool`."""
    __tracebackhide__ = True
    with RankPool(num_ranks) as pool:
        return pool.run(function, *args, timeout=timeout)


class RankPool:
    """`num_ranks` processes that run case after case. They start at the first `run`, and again after a failure."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.pids: list[int] = []
        self._processes: list = []
        self._pipes: list = []
        self._folder: Path | None = None
        self._num_cases = 0
        self._results: dict[tuple, list] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, function: Callable, *args, timeout: float = LIMIT_S) -> list:
        """Returns `[function(rank, num_ranks, *args) for each rank]`; raises `RankFailure` in about `timeout` s.

        A collective that waits longer than `timeout / 2` raises on its rank.
        """
        __tracebackhide__ = True
        try:
            job = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"a case must be a top-level function with picklable arguments: {error}") from error
        try:
            if not self._processes:
                self._start()
            self._num_cases += 1
            message = pickle.dumps((self._num_cases, timeout, job))
            output_before = [self._file("output", rank).stat().st_size for rank in range(self.num_ranks)]
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # the rank died since the last case: _collect reports it
                    pipe.send_bytes(message)
            outcomes = self._collect(timeout)
        except BaseException:
            self._stop(patience_s=0)  # also on Ctrl-C: after an interrupted case the ranks cannot run another one
            raise
        output = [self._read("output", rank, start) for rank, start in enumerate(output_before)]
        if all(outcome[0] == "returned" for outcome in outcomes):
            for rank, text in enumerate(output):
                if text:
                    print(f"[rank {rank}]", text.rstrip())
            return [value for _, value in outcomes]
        self._stop(patience_s=0)
        raise RankFailure(_report(function, outcomes, output))

    def run_once(self, function: Callable, *args) -> list:
        """As `run`, for a case that always gives the same results: later calls return those of the first."""
        key = (function.__module__, function.__qualname__, pickle.dumps(args))
        if key not in self._results:
            self._results[key] = self.run(function, *args)
        return self._results[key]

    def close(self) -> None:
        """Ends the ranks, which are idle, and all processes that they started."""
        self._stop(patience_s=5.0)

    def _stop(self, patience_s: float) -> None:
        for pipe in self._pipes:
            pipe.close()  # ends an idle rank
        for process in self._processes:
            process.join(patience_s)
            _signal_group(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self._processes, self._pipes, self.pids = [], [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        for rank in range(self.num_ranks):
            here, there = pipe()
            process = start_process(serve, rank, self.num_ranks, str(self._folder), there, name=f"rank {rank}")
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self.pids = [process.pid for process in self._processes]
        outcomes = self._collect(START_TIMEOUT_S)
        if any(outcome != READY for outcome in outcomes):
            raise RankFailure(_report(serve, outcomes, [self._read("output", r) for r in range(self.num_ranks)]))

    def _collect(self, timeout_s: float) -> list[tuple]:
        """Waits for one answer from each rank, returns them by rank; after a failure the others get `GRACE_S` only."""
        begin = time.monotonic()
        deadline = begin + timeout_s
        outcomes: dict[int, tuple] = {}
        while len(outcomes) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            waiting = [rank for rank in range(self.num_ranks) if rank not in outcomes]
            ready = wait([end for r in waiting for end in (self._pipes[r], self._processes[r].sentinel)], left)
            for rank in waiting:
                if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                    outcomes[rank] = self._receive(rank)
                    if outcomes[rank][0] in ("raised", "died"):
                        lost_another = outcomes[rank][0] == "raised" and outcomes[rank][3]
                        deadline = min(deadline, time.monotonic() + (LOST_GRACE_S if lost_another else GRACE_S))
        hanging = [rank for rank in range(self.num_ranks) if rank not in outcomes]
        waited_s = time.monotonic() - begin
        for rank in hanging:
            os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler writes the stack, even from inside a collective
        end = time.monotonic() + STACK_S
        while not all(map(self._wrote_stack, hanging)) and time.monotonic() < end:
            time.sleep(0.02)
        for rank in hanging:
            line = f"had not finished when the case was stopped after {waited_s:.1f} s"
            outcomes[rank] = ("hung", line, self._read("stack", rank))
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> tuple:
        pipe, process = self._pipes[rank], self._processes[rank]
        try:
            if pipe.poll():
                return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        except Exception as error:
            return ("raised", f"its result cannot be unpickled here: {error}", "", False)
        process.join(30)
        return ("died", _how_it_ended(process.exitcode), "")

    def _wrote_stack(self, rank: int) -> bool:
        """True if the whole stack is written. The main thread comes last, and its outermost frame is a module's."""
        lines = self._read("stack", rank).splitlines()
        return bool(lines) and (lines[-1].endswith("in <module>") or lines[-1].strip() == "...")

    def _file(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}_{rank}"

    def _read(self, kind: str, rank: int, start: int = 0) -> str:
        path = self._file(kind, rank)
        return path.read_bytes()[start:].decode(errors="replace") if path.exists() else ""


def _report(function: Callable, outcomes: list[tuple], output: list[str]) -> str:
    """One headline per failed rank, the likeliest cause first; then each one's traceback or stack, and its output."""

    def order(rank: int) -> int:
        kind = outcomes[rank][0]
        if kind == "raised":
            return 2 if outcomes[rank][3] else 1  # lost its peer / an error of the case
        return {"died": 0, "hung": 3}.get(kind, 4)

    wrong = [r for r in sorted(range(len(outcomes)), key=order) if outcomes[r][0] in ("raised", "died", "hung")]
    lines = [f"{function.__module__}.{function.__qualname__} failed on {len(wrong)} of {len(outcomes)} ranks:"]
    for rank in wrong:
        kind, line = outcomes[rank][:2]
        lines.append(f"  rank {rank} {'raised ' if kind == 'raised' else ''}{line}")
    for rank in wrong:
        if outcomes[rank][2]:
            title = "was here when it was stopped (most recent call first)" if outcomes[rank][0] == "hung" else "raised"
            lines += [f"---- rank {rank} {title}:", outcomes[rank][2].rstrip()]
    for rank, text in enumerate(output):
        if text:
            lines += [f"---- rank {rank} printed (its last 40 lines):", *text.rstrip().splitlines()[-40:]]
    return "\n".join(lines)


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe without a result"
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name} without a result"
    return f"exited with status {exitcode} without a result"


def _signal_group(pid: int, number: int) -> None:
    """Signals a rank and the processes that it started: `serve` made the rank the leader of a new process group."""
    # These errors mean that the group has ended; macOS raises the second one while the last process is being reaped.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
