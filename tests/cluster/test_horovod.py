"""Chapter 03, and chapter 04 over Horovod, on two nodes: a real horovodrun on node1 starts the ranks of node2 over ssh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chapters.horovod import needs_horovod
from tests.chapters.law import LONG, assert_same_curve, flags_of
from tests.chapters.program import Chapter, environment
from tests.cluster import ssh
from tests.cluster.conftest import skip_or_fail
from tests.cluster.nodes import DEVICE, Node, two_nodes
from tests.cluster.test_torchrun import weight_bytes, worst_gap
from tests.limits import HANGS_S

PROGRAMS = {"03": ("03_horovod", ()), "04 over Horovod": ("04_apex", ("--opt-level", "O0", "--comm", "horovod"))}


@pytest.fixture(scope="module")
def ssh_nodes(needs_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes with ssh between them."""
    if why := ssh.reason_why_not():
        skip_or_fail(why, could_change=True)
    folder = tmp_path_factory.mktemp("nodes")
    with two_nodes(folder) as nodes, ssh.ssh_between(nodes, folder):
        yield nodes


@pytest.mark.deep
@needs_horovod
@pytest.mark.parametrize("ranks_a_node", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_horovod_on_two_nodes_follows_the_curve(ssh_nodes, curve, tmp_path: Path, name: str, ranks_a_node: int) -> None:
    program, flags = PROGRAMS[name]
    chapter, log, num_ranks = Chapter(program, tmp_path), tmp_path / "log", 2 * ranks_a_node
    hosts = ",".join(f"{node.name}:{ranks_a_node}" for node in ssh_nodes)
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(num_ranks), "-H", hosts]
    command = [*launcher, "--network-interfaces", DEVICE, "--disable-cache", *chapter.command(*flags_of(LONG), *flags)]
    before = [node.sent() for node in ssh_nodes]
    status = ssh_nodes[0].start(command, log, environment()).wait(HANGS_S)
    assert status == 0, f"status {status}\n{log.read_text()}"
    sent = [node.sent().since(count).payload_bytes for node, count in zip(ssh_nodes, before, strict=True)]
    rows = chapter.metrics()
    print(f"{name}, 2 x {ranks_a_node}: worst gap {worst_gap(rows, curve(LONG)):.1e}, sent {sent}")
    assert_same_curve(rows, curve(LONG), rel=1e-4)
    ring = 2 * (num_ranks - 1) / num_ranks * weight_bytes(chapter) * LONG
    assert min(sent) > ring, "the gradients cross the link; negotiation comes on top, more of it the longer a step takes"
