"""Runs a Python program in a process forked from the server of ranks, which has torch loaded.

A start from nothing imports torch for three seconds, a fork takes a tenth of one. The program itself is unchanged: it is
`__main__`, has the arguments, environment and exit status of a started one, and its output goes to a file descriptor, not
to a terminal. Where it runs torchrun, torchrun forks the ranks from it in the same way. Only two things differ: modules are
there already, and the interpreter is not taken down after the program's own exit functions. So other tests start programs
and ranks from nothing.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.harness.pool import start_process
from tests.limits import HANGS_S


def run_forked(command: list[str], environment: dict[str, str], folder: Path | None = None) -> tuple[int, str]:
    """Runs `python PROGRAM ARGUMENTS` or `python -m MODULE ARGUMENTS`.

    Returns:
        its exit status, negative after a signal; stdout and stderr together.

    Raises:
        AssertionError: it has not ended after HANGS_S.
    """
    assert command[0] == sys.executable, f"not a Python program: {command}"
    with tempfile.TemporaryDirectory(prefix="forked_") as made:
        output = Path(made, "output")
        process = start_process(_become, command[1:], environment, str(folder or Path.cwd()), str(output))
        process.join(HANGS_S)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise AssertionError(f"{command} has not ended after {HANGS_S:g} s; it printed\n{output.read_text()}")
        return process.exitcode, output.read_text(encoding="utf-8")


def _become(arguments: list[str], environment: dict[str, str], folder: str, output: str) -> NoReturn:
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    become(arguments, environment, folder, {1: file, 2: file})


def become(arguments: list[str], environment: dict[str, str], folder: str, files: dict[int, int]) -> NoReturn:
    """Makes this process the program, and ends it with the program's exit status.

    Args:
        arguments: the command line after `python`.
        files: number of stdin, stdout or stderr -> the open file that it becomes.
    """
    os.setsid()
    for number, file in files.items():
        os.dup2(file, number)
    for file in {*files.values()} - {0, 1, 2}:
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    first = "" if arguments[0] == "-m" else str(Path(arguments[0]).parent)
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()  # the server's own exit functions
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    with mock.patch.object(SubprocessHandler, "_popen", lambda _, args, environment: ForkedRank(list(args), environment)):
        status = _status_of(arguments)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.exit(status)  # multiprocessing removes its semaphores, flushes the output and ends the process


def _status_of(arguments: list[str]) -> int:
    """Runs the program; returns the exit status that Python gives it."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


class ForkedRank:
    """What torchrun uses of a subprocess.Popen of `python -u PROGRAM ARGUMENTS`, forked from the launcher.

    The launcher has started no thread that computes or holds a lock of Python.

    Attributes:
        args: the command.
        pid: of the rank.
        returncode: None until the rank has ended.
    """

    def __init__(self, args: list[str], environment: dict[str, str]) -> None:
        assert args[:2] == [sys.executable, "-u"], f"not a rank: {args}"
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the launcher has threads of C++
            self.pid = os.fork()
        if self.pid == 0:
            _become_rank(args[2:], environment)

    def poll(self) -> int | None:
        """The exit status, None while the rank runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises subprocess.TimeoutExpired."""
        end = time.monotonic() + (HANGS_S if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or HANGS_S)
            time.sleep(0.02)
        return self.returncode


def _become_rank(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Removes what the launcher changed in this process, and runs the program as a rank."""
    status: Any = 1
    try:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.disable(logging.NOTSET)
        sys.excepthook = sys.__excepthook__
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), encoding="utf-8", write_through=True)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        if arguments[0] != "-m":
            sys.path.insert(0, str(Path(arguments[0]).parent))
        atexit._clear()
        status = _status_of(arguments)
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
