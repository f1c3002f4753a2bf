"""A hang in pstar's shared memory, and in its collectives by the process group, names operation, unit and rank."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from durable import hang_report
from pstar.comm import shared_memory
from pstar.comm.collective_log import CollectiveLog
from pstar.comm.collectives import Collectives
from pstar.memory.tier import Ledger
from tests.limits import HANGS_S

AFTER_S = 0.4


def stop_working(rank: int, num_ranks: int, folder: str, skips: bool):
    """All ranks gather units 0 and 1. Then rank 1 sleeps, or skips the reduction of unit 1 and then sleeps."""
    reported, ends = threading.Event(), []

    def end(others_wait: bool, silent: list[int]) -> None:
        ends.append((others_wait, silent))
        reported.set()

    collectives = Collectives(None, Ledger())
    log = CollectiveLog(collectives, torch.device("cpu"))
    store = dist.distributed_c10d._get_default_store()
    watch = hang_report.Watch(store, rank, num_ranks, AFTER_S, Path(folder), end)
    for unit in range(2):
        log.gather(unit)
        collectives.all_gather(torch.ones(10 * num_ranks)).wait()
    piece, flat = torch.ones(10), torch.ones(10 * num_ranks)
    if rank == 1:
        assert reported.wait(HANGS_S)
    log.reduce(0 if skips and rank == 1 else 1)
    message = ""
    try:
        collectives.reduce_scatter_mean(piece, flat).wait()
    except Exception as error:
        message = str(error)
    assert reported.wait(HANGS_S)
    watch.close()
    return collectives.through_memory, ends, message


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
@pytest.mark.parametrize("skips", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_rank_that_sleeps_or_skips_in_shared_memory_is_named_with_the_unit(ranks, tmp_path, num_ranks, skips):
    if not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")
    for rank, (through_memory, ends, message) in enumerate(ranks(num_ranks).run(stop_working, str(tmp_path), skips)):
        assert through_memory and ends == [(rank == 1, [])]
        found = json.loads((tmp_path / f"hang-rank{rank}.json").read_text())
        assert found["missing"] == [1] and found["at"]
        assert f"rank 0 has been in reduction 3 (unit 1, {10 * num_ranks} elements) for" in found["line"]
        last = f"its last was gather 2 (unit 1, {10 * num_ranks} elements)"
        assert f"rank 1 is missing: it is in no collective, {last}" in found["line"]
        assert ("of unit 0" in message) == skips, "a rank that makes another call is told so at once, when it comes"
