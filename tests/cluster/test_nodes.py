"""The two nodes themselves: separate, counted, limited, cut, killed, and gone afterwards. Nothing here loads torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chapters.program import ROOT, environment
from tests.cluster import nodes as nodes_module
from tests.cluster.conftest import skip_or_fail
from tests.cluster.nodes import ADDRESSES, BURST_BYTES, Node, reason_why_not, two_nodes
from tests.fakes import write_programs
from tests.limits import HANGS_S, wait_until
from tests.tally import STRICT_VARIABLE

RECEIVER = """
import socket
with socket.create_server(("", 4000)) as server:
    print("listens", flush=True)
    with server.accept()[0] as one:
        got = 0
        while piece := one.recv(1 << 16):
            got += len(piece)
        one.sendall(b"got it")
print(got)
"""
SENDER = """
import socket, sys, time
with socket.create_connection(("node1", 4000)) as one:
    begin = time.monotonic()
    one.sendall(bytes(int(sys.argv[1])))
    one.shutdown(socket.SHUT_WR)
    assert one.recv(10) == b"got it"
    print(time.monotonic() - begin)
"""
LOOK = """
hostname
touch /dev/shm/of_$(hostname)
ls /dev/shm
ls -d /proc/[0-9]* | wc -l
ip -brief -4 address show dev eth0
getent hosts node1 node2
"""
CONNECT = "import socket; socket.create_connection(('node1', 4000), timeout=0.5)"


def send(nodes: tuple[Node, Node], num_bytes: int, folder: Path) -> float:
    """Sends bytes from node2 to node1; returns the seconds until node1 has them."""
    log = folder / "receiver.log"
    receiver = nodes[0].start([sys.executable, "-c", RECEIVER], log)
    wait_until(lambda: "listens" in log.read_text(), "the receiver", lambda: receiver.poll() is None)
    seconds = float(nodes[1].run(sys.executable, "-c", SENDER, num_bytes))
    assert receiver.wait(HANGS_S) == 0 and log.read_text().split() == ["listens", str(num_bytes)]
    return seconds


def left(folder: Path) -> list[str]:
    """The processes that have `folder` on their command line: process 1 of each node, and what a test starts there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text().replace("\0", " ")
            found += [words] if str(folder) in words else []
    return found


def sleeper(folder: Path) -> list[str]:
    """A command that does not end."""
    return ["bash", "-c", f"sleep 1000; : {folder}"]


def test_each_node_has_its_own_name_network_processes_and_shared_memory(nodes) -> None:
    said = [node.run("bash", "-c", LOOK) for node in nodes]
    for node, words in zip(nodes, map(str.split, said), strict=True):
        assert words[:2] == [node.name, f"of_{node.name}"], "the other node's file is not there"
        assert int(words[2]) < 10, "it sees its own processes only"
        assert f"{node.address}/24" in words and words[-4:] == [w for name, at in ADDRESSES.items() for w in (at, name)]
    assert nodes[0].network() != nodes[1].network() and os.readlink("/proc/self/ns/net") not in map(Node.network, nodes)


def test_the_kernel_counts_what_crosses_the_veth_and_limits_the_rate(needs_nodes, tmp_path: Path) -> None:
    num_bytes, mbit_per_s = 3_000_000, 40
    with two_nodes(tmp_path, mbit_per_s) as nodes:
        before = nodes[1].sent(), nodes[0].received()
        seconds = send(nodes, num_bytes, tmp_path)
        sent, received = nodes[1].sent().since(before[0]), nodes[0].received().since(before[1])
    assert seconds > (num_bytes - BURST_BYTES) * 8 / (mbit_per_s * 1e6), "faster than the limit"
    for counted in (sent, received):
        assert counted.payload_bytes == pytest.approx(num_bytes, rel=0.01), counted  # a packet of ARP has shorter headers


def test_a_cut_link_carries_nothing_and_closes_nothing(needs_nodes, tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        send(nodes, 1000, tmp_path)
        nodes[0].cut()
        counted = nodes[0].received()
        said = nodes[1].run(sys.executable, "-c", CONNECT, status=1)
        assert "TimeoutError" in said or "No route to host" in said, said
        assert nodes[0].received() == counted


def test_a_killed_node_loses_all_its_processes_and_keeps_its_network(needs_nodes, tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        launched = nodes[1].start(["bash", "-c", "sleep 1000 & echo ready; sleep 1000"], tmp_path / "log")
        other = nodes[0].start(["sleep", "1000"], tmp_path / "other")
        wait_until(lambda: "ready" in (tmp_path / "log").read_text(), "the start")
        nodes[1].kill()
        assert launched.wait(HANGS_S) == -signal.SIGKILL
        wait_until(lambda: "sleep" not in nodes[1].run("ps", "ax"), "the end of the process in the background")
        assert other.poll() is None, "the other node goes on"
        send(nodes, 1000, tmp_path)
    assert other.wait(HANGS_S) == -signal.SIGKILL


def test_nothing_is_left_after_an_error_in_the_block(needs_nodes, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), two_nodes(tmp_path) as nodes:
        process = nodes[0].start(sleeper(tmp_path), tmp_path / "log")
        wait_until(lambda: len(left(tmp_path)) >= 6, "two nodes (unshare, process 1), nsenter and the sleeper")
        raise ZeroDivisionError
    assert process.wait(HANGS_S) == -signal.SIGKILL
    assert not left(tmp_path)


def test_nothing_is_left_if_the_start_fails_half_way(needs_nodes, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(nodes_module, "DEVICE", "a name that is too long for a device")
    with pytest.raises(AssertionError, match="not a valid ifname"), two_nodes(tmp_path):
        pass
    assert not left(tmp_path)
    assert "node1" not in Path("/etc/hosts").read_text()


OWNER = """
import sys, time
from pathlib import Path
from tests.cluster.nodes import two_nodes
folder = Path(sys.argv[1])
with two_nodes(folder) as nodes:
    nodes[0].start(["bash", "-c", f"sleep 1000; : {folder}"], folder / "log")
    print("started", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_if_the_test_itself_is_ended(needs_nodes, tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], env=environment(), cwd=ROOT, stdout=subprocess.PIPE,
                          text=True) as owner:  # fmt: skip
        assert owner.stdout.readline() == "started\n"
        wait_until(lambda: len(left(tmp_path)) >= 7, "the owner, two nodes, nsenter and the sleeper")
        owner.send_signal(number)
        assert owner.wait(HANGS_S) == -number
    wait_until(lambda: not left(tmp_path), "the end of the nodes")


def test_two_runs_at_once_do_not_collide(nodes, tmp_path: Path) -> None:
    with two_nodes(tmp_path) as others:
        assert len({node.network() for node in (*nodes, *others)}) == 4
        send(others, 1000, tmp_path)


def test_the_reason_names_what_is_missing(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert reason_why_not() == ("two nodes need root, for namespaces and a veth pair", True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason_why_not() == ("two nodes need unshare, nsenter, ip, tc: apt-get install iproute2 util-linux", True)
    refuses = "#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n"
    write_programs(tmp_path, **dict.fromkeys(nodes_module.TOOLS, refuses))
    why, could_change = reason_why_not()
    assert why.endswith("refuses namespaces or a veth pair: unshare failed: Operation not permitted") and not could_change


SKIPPED, FAILED = pytest.skip.Exception, pytest.fail.Exception


@pytest.mark.parametrize("strict, could_change, outcome", [
    (False, True, SKIPPED), (True, True, FAILED), (True, False, SKIPPED)])  # fmt: skip
def test_where_ci_is_set_only_the_kernel_s_refusal_is_a_skip(monkeypatch, strict: bool, could_change: bool, outcome) -> None:
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    if strict:
        monkeypatch.setenv(STRICT_VARIABLE, "true")
    with pytest.raises(outcome, match="no root"):
        skip_or_fail("no root", could_change)
