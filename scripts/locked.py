"""A lock between programs: what two starts at once must not both do, one does, and the other finds it done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from moving_line import say


@contextlib.contextmanager
def locked(path: Path, waiting: str, refuse: Callable[[OSError], Exception], inheritable: bool = False) -> Iterator[None]:
    """Holds a lock that the kernel releases however its holder ends, so it can never be stale.

    Args:
        path: of the lock; its folder is made. A file system without locks goes on without.
        waiting: the line for the user where somebody else holds it.
        refuse: from what went wrong in making the file to the exception to raise.
        inheritable: whether programs that this one starts hold it too, should this process be killed before they end.
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
