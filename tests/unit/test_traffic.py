"""The kernel's count of TCP bytes is what was written, whether or not the other end has acknowledged it."""

from __future__ import annotations

import socket

from gpt2_chinese.distributed.socket_bytes import tcp_bytes


def test_bytes_count_when_they_are_written_and_not_when_they_arrive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            ours.setblocking(False)
            before, written = tcp_bytes(), 0
            try:
                while True:  # nobody reads: at last it waits here, in the buffers of both ends
                    written += ours.send(bytes(1 << 16))
            except BlockingIOError:
                pass
            sent, received = (now - then for now, then in zip(tcp_bytes(), before, strict=True))
            assert sent == written > received > 0, "more is written than has arrived"
            theirs.setblocking(True)
            left = written
            while left:
                left -= len(theirs.recv(1 << 20))
            assert tuple(now - then for now, then in zip(tcp_bytes(), before, strict=True)) == (written, written)
