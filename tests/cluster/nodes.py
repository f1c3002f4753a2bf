"""Two nodes on one machine: each has its own network, host name, processes and /dev/shm, by Linux namespaces.

    with two_nodes(tmp_path, mbit_per_s=1000) as (first, second):     # node1 is 10.0.0.1, node2 is 10.0.0.2
        first.run("hostname")                                         # "node1\n"
        second.start(["python", "program.py"], log)                   # a subprocess.Popen
        first.sent(), second.received()                               # what the kernel counted on the veth
        first.cut()                                                   # as if somebody pulled the cable
        second.kill()                                                 # SIGKILL to all its processes

    node1                                  node2
    processes - lo   eth0 === veth pair === eth0   lo - processes         tbf limits what each eth0 sends
                         \\                 /
                          one disk: the same files, except /dev/shm and /etc/hosts

The namespaces have no name, so two test runs cannot collide. Process 1 of each node reads a pipe that the test holds open.
When the test closes the pipe or ends, however it ends, process 1 ends; then the kernel kills the node's other processes and
removes the namespaces with the veth pair.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from tests.limits import HANGS_S

TOOLS = ("unshare", "nsenter", "ip", "tc")
DEVICE = "eth0"  # the node's end of the veth pair
ADDRESSES = {"node1": "10.0.0.1", "node2": "10.0.0.2"}
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, TCP with its time stamps: the veth counts them once for each packet
BURST_BYTES = 1 << 17  # that a node may send at once: a packet has up to 64 KiB
NAMESPACES = ("--net", "--uts", "--ipc", "--mount")

PROCESS_1 = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec 2>/dev/null
while read -r _; do :; done
"""


class Traffic(NamedTuple):
    """What the kernel has counted on one end of the veth pair, in one direction.

    Attributes:
        frame_bytes: with the headers.
        packets: as the veth hands them over, up to 64 KiB each.
    """

    frame_bytes: int
    packets: int

    @property
    def payload_bytes(self) -> int:
        """The bytes without the headers, as the programs have sent them, and those that TCP has sent twice."""
        return self.frame_bytes - HEADER_BYTES * self.packets

    def since(self, before: Traffic) -> Traffic:
        """The traffic between an earlier count and this one."""
        return Traffic(self.frame_bytes - before.frame_bytes, self.packets - before.packets)


def counts_of(process: int | str) -> tuple[Traffic, Traffic]:
    """(received, sent) over the veth pair by the node of a process, "self" for this one."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == DEVICE:
            numbers = [int(number) for number in counts.split()]
            return Traffic(*numbers[:2]), Traffic(*numbers[8:10])
    raise AssertionError(f"process {process} has no {DEVICE}")


@dataclass
class Node:
    """One of the two nodes.

    Attributes:
        name: its host name, which both nodes resolve.
        holder: the `unshare` that waits for process 1; its stdin is the pipe that keeps the node alive.
    """

    name: str
    holder: subprocess.Popen[str]

    @property
    def address(self) -> str:
        """The address of its end of the veth pair."""
        return ADDRESSES[self.name]

    def enter(self, *command: object) -> list[str]:
        """The command line that runs a command in this node."""
        processes = f"--pid=/proc/{self.holder.pid}/ns/pid_for_children"
        return ["nsenter", "--target", str(self.holder.pid), *NAMESPACES, processes, "--", *map(str, command)]

    def start(
        self, command: list[str], log: Path | IO[str] | int, environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Starts a command; its stdout and stderr go to `log`. If it is killed, so ends the returned process."""
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("w")) if isinstance(log, Path) else log
            return subprocess.Popen(
                self.enter(*command), env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, text=True)  # fmt: skip

    def run(self, *command: object, status: int = 0) -> str:
        """Runs a command; returns stdout and stderr together, asserts the exit status."""
        done = subprocess.run(
            self.enter(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS_S
        )
        assert done.returncode == status, f"{self.name}: {command}: status {done.returncode}\n{done.stdout}"
        return done.stdout

    def sent(self) -> Traffic:
        """What this node has sent over the veth pair since it exists."""
        return counts_of(self.holder.pid)[1]

    def received(self) -> Traffic:
        """What this node has received over the veth pair since it exists."""
        return counts_of(self.holder.pid)[0]

    def cut(self) -> None:
        """Cuts the link: neither node hears from the other, and no connection is closed."""
        self.run("ip", "link", "set", DEVICE, "down")

    def kill(self) -> None:
        """Sends SIGKILL to all processes of this node but process 1: its kernel and its network stay, its jobs do not."""
        self.run("bash", "-c", "kill -KILL -1 || true")  # it fails if there is none

    def network(self) -> str:
        """The identity of its network namespace, as the kernel names it."""
        return os.readlink(f"/proc/{self.holder.pid}/ns/net")


def reason_why_not() -> tuple[str, bool]:
    """Why this machine cannot have two nodes ("" if it can), and whether whoever set it up could change that."""
    if os.geteuid() != 0:
        return "two nodes need root, for namespaces and a veth pair", True
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"two nodes need {', '.join(missing)}: apt-get install iproute2 util-linux", True
    add = ["ip", "link", "add", DEVICE, "type", "veth"]
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--pid", "--fork", "--mount-proc", *add], capture_output=True, text=True, timeout=HANGS_S
    )
    if tried.returncode:
        return f"the kernel refuses namespaces or a veth pair: {tried.stderr.strip()}", False
    return "", False


@contextlib.contextmanager
def two_nodes(folder: Path, mbit_per_s: float = 1000) -> Iterator[tuple[Node, Node]]:
    """Two nodes that are gone after the block.

    Args:
        folder: a temporary folder, for their /etc/hosts.
        mbit_per_s: the most that a node sends.
    """
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **ADDRESSES}.items()))
    with contextlib.ExitStack() as started:
        first, second = (started.enter_context(_node(name, hosts)) for name in ADDRESSES)
        ends = [str(node.holder.pid) for node in (first, second)]
        pair = ["ip", "link", "add", DEVICE, "netns", ends[0], "type", "veth", "peer", "name", DEVICE, "netns", ends[1]]
        done = subprocess.run(pair, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS_S)
        assert done.returncode == 0, done.stdout
        burst = max(BURST_BYTES, int(mbit_per_s * 1e6 / 8 / 100))  # what is sent in a tick of the kernel's clock
        for node in (first, second):
            node.run("bash", "-ec", f"""
                ip addr add {node.address}/24 dev {DEVICE}
                ip link set {DEVICE} up
                tc qdisc add dev {DEVICE} root tbf rate {mbit_per_s}mbit burst {burst} latency 100ms""")
        yield first, second


@contextlib.contextmanager
def _node(name: str, hosts: Path) -> Iterator[Node]:
    command = ["unshare", *NAMESPACES, "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", PROCESS_1]
    holder = subprocess.Popen([*command, "node", name, str(hosts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        said = holder.stdout.readline()
        assert said == "ready\n", f"{name} does not start: {said}{holder.stdout.read()}"
        yield Node(name, holder)
    finally:
        holder.stdin.close()  # process 1 reads this end
        try:
            holder.wait(HANGS_S)
        finally:
            holder.kill()
            holder.stdout.close()
