"""Bytes that this process has sent and received over TCP, counted by the kernel: gloo and its like talk over sockets.

A count of the program's own would only repeat its formula; the kernel's also sees what libraries send. Traffic between
GPUs (NVLink, shared memory) does not pass here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

TCP_INFO = 11  # linux/tcp.h
ACKED_AND_RECEIVED = struct.Struct("=120xQQ")  # of struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received


def tcp_bytes() -> tuple[int, int] | None:
    """(sent, received) over the connections that are open now, in bytes; None where the kernel does not tell."""
    sent = received = 0
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or no TCP connection
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKED_AND_RECEIVED.size)
                    acked, got = ACKED_AND_RECEIVED.unpack(info)
                    sent, received = sent + acked, received + got
    except (OSError, struct.error):
        return None
    return sent, received
