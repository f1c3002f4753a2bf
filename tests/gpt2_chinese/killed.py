"""Kills a process before a given change of the disk. Changes are counted, not timed, so a test reaches each of them on
every machine.

Call it in a separate process that has imported its modules and has no threads: `killed_before` forks.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def killed_before(number: int, function: Callable[[], object]) -> bool:
    """Runs function in a child that is killed before its number-th change of the disk (0: never). Returns whether it was.

    Raises AssertionError if the child ends in any other way than by the kill or by returning.
    """
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in CHANGES or (event == "open" and arguments[2] & WRITING):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        os.fsync = lambda _: None  # a kill loses nothing that was written; only a machine that loses power does
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), ended
    return ended != 0
