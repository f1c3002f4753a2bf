"""Programs that a command starts, forked from the server of ranks, however deep inside the command they are started.

    subprocess.run(["bash", "scripts/python.sh", "x.py"], env=handing_over(environment))

bash and its scripts run as for a user. Each `python x.py` and `python -m x` that they start, also as a rank of a launcher,
hands its arguments, environment, working directory and open files over before it imports anything. The program is forked
from a process that has torch loaded (tests/harness/program.py); Python waits for its end and ends with its status. A program
whose Python is killed is killed, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.harness.pool import pipe, start_process
from tests.harness.program import become

AT_START = Path(__file__).with_name("at_start")
VARIABLE = "TESTS_PROGRAMS"  # the address that at_start/sitecustomize.py connects to


def handing_over(environment: dict[str, str]) -> dict[str, str]:
    """An environment in which Python hands its program over."""
    path = [str(AT_START), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {"PYTHONPATH": os.pathsep.join(path), VARIABLE: f"{_server()[0]}/socket"}


@functools.cache
def _server() -> tuple[str, Any, Connection]:
    """The folder of the process that forks the programs, this process, and a pipe that ends it with the tests' process."""
    folder = tempfile.TemporaryDirectory(prefix="programs_")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder.name}/socket")
    listener.listen(64)
    here, there = pipe()
    start_process(_serve, listener, there, name="programs")
    listener.close()
    there.close()
    return folder.name, folder, here


def _serve(listener: socket.socket, tests: Connection) -> None:
    """Forks the programs that are handed over, until the tests' process ends."""
    running: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, tests, *running], [], [], 0.02 if running else None)
        ended = {connection: status for connection, pid in running.items() if (status := _status(pid)) is not None}
        for connection in [one for one in running if one in ready or tests in ready]:
            if connection not in ended:  # its Python was killed
                os.killpg(running[connection], signal.SIGKILL)
                ended[connection] = os.waitstatus_to_exitcode(os.waitpid(running[connection], 0)[1])
        for connection, status in ended.items():
            del running[connection]
            with connection:
                _answer(connection, status)
        if tests in ready:
            return
        if listener in ready:
            connection, _ = listener.accept()
            (arguments, environment, folder), files = _message(connection)
            pid = os.fork()
            if pid == 0:
                for one in (listener, tests, connection, *running):
                    one.close()
                become(arguments, environment, folder, dict(enumerate(files)))
            for file in files:
                os.close(file)
            running[connection] = pid
            _answer(connection, pid)


def _status(pid: int) -> int | None:
    """The exit status of a program, negative after a signal; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever asked was killed
        connection.sendall(f"{number}\n".encode())


def _message(connection: socket.socket) -> tuple[list[Any], list[int]]:
    """[arguments, environment, folder], and the three open files."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(length, "big"):
        text += connection.recv(1 << 16)
    return json.loads(text), list(files)
