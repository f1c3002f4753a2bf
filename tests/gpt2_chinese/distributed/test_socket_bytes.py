"""The kernel's count of TCP bytes is what was written, whether or not the other end has acknowledged it."""

from __future__ import annotations

import socket

from gpt2_chinese.distributed.socket_bytes import between, tcp_bytes


def test_bytes_count_when_they_are_written_and_not_when_they_arrive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            ours.setblocking(False)
            before, written = tcp_bytes(), 0
            try:
                while True:  # the other end does not read, so send raises when the buffers of both ends are full
                    written += ours.send(bytes(1 << 16))
            except BlockingIOError:
                pass
            sent, received = between(before, tcp_bytes())
            assert sent == written > received > 0, "more is written than has arrived"
            theirs.setblocking(True)
            unread = written
            while unread:
                unread -= len(theirs.recv(1 << 20))
            assert between(before, tcp_bytes()) == (written, written)


def test_closing_a_connection_subtracts_nothing_from_the_bytes_of_the_others() -> None:
    def send(ours: socket.socket, theirs: socket.socket, num_bytes: int) -> None:
        ours.sendall(bytes(num_bytes))
        assert len(theirs.recv(num_bytes, socket.MSG_WAITALL)) == num_bytes

    with socket.create_server(("127.0.0.1", 0)) as server:
        old, new = ((socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(2))
        send(*old, 5000)
        before = tcp_bytes()
        for end in old:
            end.close()
        send(*new, 3000)
        assert between(before, tcp_bytes()) == (3000, 3000)
        for end in new:
            end.close()
