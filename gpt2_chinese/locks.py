"""A lock between processes, also of several machines with a shared disk; the kernel releases it however its holder ends.

The lock is on a plain file that is open for writing. NFS and Lustre lock a folder within one machine only, and NFS gives no
exclusive lock on a file opened for reading. On a file system without locks every process gets the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def open_lock(path: Path) -> int:
    """Opens the file at `path`, created if missing: for all who may write in its folder, whatever the creator's umask."""
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.fchmod(handle, path.parent.stat().st_mode & 0o666)
        return handle
    return os.open(path, os.O_RDWR)  # no O_CREAT: Linux may refuse it for another user's file in /tmp


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
    """Waits until no other process holds the lock, and takes it."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """True when another process holds the lock of the file at `path`; creates no file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    finally:
        os.close(handle)
