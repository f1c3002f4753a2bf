"""A lock between programs: of two starts at the same time one does the work, and the other waits and finds it done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from moving_line import say


@contextlib.contextmanager
def locked(path: Path, waiting: str, refuse: Callable[[OSError], Exception], inheritable: bool = False) -> Iterator[None]:
    """Holds a lock that the kernel releases even if its holder is killed, so it is never stale.

    Args:
        path: the lock's file; its folder is made. On a file system without locks this goes on without one.
        waiting: the line for the user if another program holds the lock.
        refuse: from the error in making the file to the exception to raise.
        inheritable: child processes hold the lock too, in case this process is killed before they end.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise refuse(error) from error
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, inheritable)
    try:
        yield
    finally:
        os.close(lock)
