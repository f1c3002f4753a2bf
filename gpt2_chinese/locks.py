"""A lock between processes, also on several machines of a shared disk; the kernel releases it however its holder ends.

It is on a plain file that is open for writing: NFS and Lustre lock a folder on each machine for itself, and NFS gives no
exclusive lock on what is open for reading only. A file system without locks lets everybody in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def open_lock(path: Path) -> int:
    """A descriptor of the file at `path`. Whoever may write in its folder may open it, whatever the umask of who made it."""
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.fchmod(handle, path.parent.stat().st_mode & 0o666)
        return handle
    return os.open(path, os.O_RDWR)  # without O_CREAT, which Linux may refuse in a folder like /tmp


def try_lock(handle: int) -> bool:
    """Takes the lock; False when another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def wait_for_lock(handle: int) -> None:
    """Takes the lock as soon as nobody else holds it."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """True when another process holds the lock of the file at `path`; makes none."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    finally:
        os.close(handle)
