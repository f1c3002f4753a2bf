"""The limits of gpt2_chinese/distributed/lost_links.py; tests/cluster cuts a link between two nodes."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from gpt2_chinese.distributed import lost_links, sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's sockets, and has the limit")


def test_each_tcp_connection_gets_its_limit_and_works_on() -> None:
    user_timeout = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    local, other = socket.socketpair()
    with (
        local,
        other,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        assert client.getsockopt(*user_timeout) == 0
        lost_links.limit_all()
        lost_links.limit_all()
        for connection in (client, accepted, server):
            assert connection.getsockopt(*user_timeout) == lost_links.LOST_S * 1000
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        client.sendall(b"there")
        local.sendall(b"here")
        assert (accepted.recv(5), other.recv(4)) == (b"there", b"here")


def test_a_rank_hangs_up_on_the_others_but_not_on_the_store_nor_for_its_parent() -> None:
    with contextlib.ExitStack() as opened:
        server, store = (opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))

        def connection(to: socket.socket) -> tuple[socket.socket, socket.socket]:
            ours = opened.enter_context(socket.create_connection(to.getsockname()))
            return ours, opened.enter_context(to.accept()[0])

        of_parent = connection(server)
        inherited = sockets.names()
        of_rank, of_store, local = connection(server), connection(store), socket.socketpair()
        for end in local:
            opened.enter_context(end)
        lost_links.hang_up(store.getsockname()[1], inherited)
        for ours, theirs in (of_parent, of_store, local):
            ours.sendall(b"there")
            assert theirs.recv(5) == b"there"
        assert of_rank[1].recv(5) == b"", "the other end learns of it at once"
        with pytest.raises(BrokenPipeError):
            of_rank[0].sendall(b"there")
