"""The sockets of this process, also those that libraries have opened: gloo, the store, torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

FOLDER = "/proc/self/fd"


def open_sockets() -> Iterator[tuple[str, socket.socket]]:
    """(the kernel's name of it, a socket) for each one that is open now; the object is closed when the loop goes on.

    A socket that its owner closes meanwhile, and one that is no TCP connection, raise OSError in the loop.

    Raises:
        OSError: the system has no such folder. Only Linux has.
    """
    for number in os.listdir(FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{FOLDER}/{number}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as opened:
                    yield name, opened


def names() -> frozenset[str]:
    """The names of all that are open now; none elsewhere than on Linux."""
    with contextlib.suppress(OSError):
        return frozenset(name for name, _ in open_sockets())
    return frozenset()
