"""A hang in pstar's shared memory, and in its collectives by the process group, names operation, unit and rank."""

from __future__ import annotations

import pytest
import torch

from gpt2_chinese.errors import LOST_PEER
from pstar.comm import shared_memory
from pstar.comm.collective_log import CollectiveLog
from pstar.comm.collectives import Collectives
from pstar.memory.tier import Ledger
from tests.hanging import Job, reports


def stop_working(
    rank: int, num_ranks: int, folder: str, through_memory: bool, names: str = "aaaa"
) -> tuple[bool, list[int]]:
    """All ranks gather units 0 and 1. Then rank 1 sleeps before it reduces unit 1.

    names: of the nodes, by rank. Returns whether chunks went through memory, and the statuses of the rank.
    """
    collectives = Collectives(None, Ledger(), through_memory, names[rank])
    job, log = Job(rank, num_ranks, folder), CollectiveLog(collectives, torch.device("cpu"))
    for unit in range(2):
        log.gather(unit)
        collectives.all_gather(torch.ones(10 * num_ranks)).wait()
    if rank == 1:
        job.watch()
        job.sleep()
    log.reduce(1)
    begun = collectives.reduce_scatter_mean(torch.ones(10), torch.ones(10 * num_ranks))
    if rank != 1:
        job.watch()
    begun.wait()
    return collectives.through_memory, job.end()


@pytest.mark.parametrize("num_ranks, through_memory, gathered, reduced", [
    (2, True, "gather 2 (unit 1, 20 elements)", "reduction 3 (unit 1, 20 elements)"),
    pytest.param(3, True, "gather 2 (unit 1, 30 elements)", "reduction 3 (unit 1, 30 elements)", marks=pytest.mark.deep),
    pytest.param(2, False, "all_gather 2 (unit 1, 10 float)", "all_reduce 3 (unit 1, 20 float)", marks=pytest.mark.deep),
])  # fmt: skip
def test_a_rank_that_does_not_come_is_named_with_operation_and_unit(
    ranks, tmp_path, num_ranks, through_memory, gathered, reduced
):
    """gloo reduces and scatters by a whole all-reduce."""
    if through_memory and not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")
    for rank, (used, statuses) in enumerate(ranks(num_ranks).run(stop_working, str(tmp_path), through_memory)):
        assert used == through_memory and statuses == [1 if rank == 1 else LOST_PEER]
        found = reports(tmp_path)[rank]
        assert found["missing"] == [1]
        assert f"has been in {reduced} for" in found["line"]
        assert f"rank 1 is missing: it is in no collective, its last was {gathered}" in found["line"]


def test_on_two_nodes_the_rank_that_does_not_come_is_named_and_the_call_between_nodes_has_its_unit(ranks, tmp_path):
    """Rank 0 waits for rank 1 in the memory of their node, rank 2 for rank 0 on the network."""
    if not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")
    ranks(4).run(stop_working, str(tmp_path), True, "aabb")
    found = reports(tmp_path)
    for report in found.values():
        assert report["missing"] == [1] and "has been in reduction 1 (unit 1, 40 elements) for" in report["line"]
        assert "rank 1 is missing: it is in no collective, its last was gather 2 (unit 1, 40 elements)" in report["line"]
    (waits,) = found[2]["waiting"]
    assert waits["ranks"] == [0, 2] and waits["what"] == "unit 1"
