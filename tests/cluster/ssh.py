"""sshd on the two nodes, with keys of their own: node1 can start programs on node2, as horovodrun and mpirun do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.nodes import Node
from tests.limits import HANGS_S, wait_until

SSHD = "/usr/sbin/sshd"  # it starts itself again, so it must have an absolute path


def reason_why_not() -> str:
    """Why the nodes cannot have sshd, "" if they can."""
    if shutil.which(SSHD) and shutil.which("ssh"):
        return ""
    return "ssh between the nodes needs sshd: apt-get install openssh-server"


@contextlib.contextmanager
def ssh_between(nodes: tuple[Node, Node], folder: Path) -> Iterator[None]:
    """Lets root log in from each node to the other. What it changes below /etc and /run, only the nodes see."""
    for name in ("host", "user"):
        make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make_key, check=True, timeout=HANGS_S)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPermitRootLogin yes\nStrictModes no\n"
        "UsePAM no\nPidFile none\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    servers = []
    try:
        for node in nodes:
            node.run("bash", "-ec", f"""
                mount --bind {folder}/ssh_config /etc/ssh/ssh_config
                mount -t tmpfs tmpfs /run
                mkdir /run/sshd""")
            log = folder / f"sshd.{node.name}"
            servers.append(node.start([SSHD, "-D", "-e", "-f", f"{folder}/sshd_config"], log))
            wait_until(lambda log=log: "listening" in log.read_text(), lambda log=log: f"sshd\n{log.read_text()}",
                       lambda server=servers[-1]: server.poll() is None)  # fmt: skip
        yield
    finally:
        for node in nodes:
            node.kill()
        for server in servers:
            server.wait(HANGS_S)
