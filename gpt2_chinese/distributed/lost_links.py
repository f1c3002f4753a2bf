"""Ends TCP connections whose other end is no longer there, and tells the other ranks when one of them has gone.

A link that is cut closes no connection. Linux by itself sends what is not acknowledged for a quarter of an hour, and a
process that only receives waits for ever. A process that is busy, stopped or being debugged is not lost: its kernel
acknowledges for it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Collection

from gpt2_chinese.distributed.sockets import open_sockets

LOST_S = 20  # torchrun counts a node as dead that it has not heard of for 15 s
STORE_S = 5  # the same for the connection to the store, as soon as another rank is lost
PROBE_S = 1  # all ranks of a node lose another node within a second, and report that node together
EVERY_S = 2.0  # libraries open connections at any time: new groups, a torchrun that meets the others again


def watch() -> None:
    """Starts a thread that limits all connections, also later ones. Elsewhere than on Linux it does nothing."""
    if sys.platform == "linux":
        threading.Thread(target=_repeat, daemon=True, name="lost_links").start()


def _repeat() -> None:
    while True:
        limit_all()
        time.sleep(EVERY_S)


def limit_all() -> None:
    """Limits the connections that are open now: LOST_S without an answer, to what is sent or to a probe every PROBE_S."""
    limit = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT  # in milliseconds
    for _, connection in open_sockets():
        with contextlib.suppress(OSError):
            if connection.getsockopt(*limit) == 0:
                connection.setsockopt(*limit, LOST_S * 1000)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def hang_up(store_port: int, inherited: Collection[str]) -> None:
    """Shuts down the TCP connections of this rank to other ranks, for when one of them is lost: others wait for this one.

    In a ring each rank waits for its neighbour, so only the neighbour of the lost rank has learnt of it. The connection to
    the store stays, but has only STORE_S: it may lead over the same link.

    Args:
        inherited: the names of sockets that a forked rank shares with its parent; they stay as they are.
    """
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        for name, connection in open_sockets():
            with contextlib.suppress(OSError):
                if name in inherited or connection.family == socket.AF_UNIX:
                    continue
                if store_port in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STORE_S * 1000)
                else:
                    connection.shutdown(socket.SHUT_RDWR)
