"""A lock between processes: of two starts at once, one does the work, the other waits and finds it done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from moving_line import say


@contextlib.contextmanager
def locked(path: Path, waiting: str, refuse: Callable[[OSError], Exception], inheritable: bool = False) -> Iterator[None]:
    """Holds a lock that the kernel releases when its holder ends in any way, so it is never stale.

    Args:
        path: the lock's file; its folder is made. On a file system without locks the block runs without one.
        waiting: the line to print if another process holds the lock.
        refuse: makes the exception to raise from the OSError of opening the file.
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
