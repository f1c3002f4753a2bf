"""Bytes that this process has sent and received over TCP, as the kernel counts them: gloo, for one, uses sockets.

A count in the program would only repeat its formula; the kernel also counts what libraries send. Traffic between GPUs
(NVLink, shared memory) is not counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios

from gpt2_chinese.distributed.sockets import open_sockets

TCP_INFO = 11  # linux/tcp.h
ACKED_AND_RECEIVED = struct.Struct("=120xQQ")  # of struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received


Counts = dict[str, tuple[int, int]]
"""The name of a connection to (sent, received) since it was opened, in bytes."""


def tcp_bytes() -> Counts | None:
    """The counts of the connections that are open now; None where the kernel gives no counts."""
    counts: Counts = {}
    try:
        for name, connection in open_sockets():
            with contextlib.suppress(OSError):  # closed meanwhile, or no TCP connection
                counts[name] = _of(connection)
    except (OSError, struct.error):
        return None
    return counts


def between(before: Counts, now: Counts) -> tuple[int, int]:
    """(sent, received) from one call of tcp_bytes to a later one, over the connections that are still open at the later one.

    A connection that was closed in between is left out: its bytes must not be subtracted from the others.
    """
    sent = sum(count[0] - before.get(name, (0, 0))[0] for name, count in now.items())
    return sent, sum(count[1] - before.get(name, (0, 0))[1] for name, count in now.items())


def _of(connection: socket.socket) -> tuple[int, int]:
    """(written, received). Written bytes are acknowledged or still wait for that; on a busy machine many wait."""
    while True:
        acked, got = _acked_and_received(connection)
        (waiting,) = struct.unpack("=i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        if _acked_and_received(connection)[0] == acked:  # else bytes moved from one count to the other in between
            return acked + waiting, got


def _acked_and_received(connection: socket.socket) -> tuple[int, int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKED_AND_RECEIVED.size)
    return ACKED_AND_RECEIVED.unpack(info)
