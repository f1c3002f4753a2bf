"""The process groups of chapter 05's mesh."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from gpt2_chinese.distributed.ranks import Ranks
from tests.chapters.technique import technique
from tests.limits import timeout_s


def timeout_case(rank: int, num_ranks: int) -> set[float]:
    ranks = Ranks(rank, num_ranks, rank, group=dist.group.WORLD, timeout=timedelta(seconds=1234))
    mesh = technique("05_model_parallel", "mesh").Mesh(ranks, tp=2, pp=2)
    groups = (mesh.tensor, mesh.pipeline, mesh.replica, mesh.ends)
    found = {timeout_s(group) for group in groups}
    dist.barrier()    # a rank that closes its groups would end the connections of one that still makes them
    mesh.close()
    return found


def test_the_groups_of_the_mesh_wait_as_long_as_the_run_says(ranks):
    assert ranks(4).run(timeout_case) == [{1234}] * 4
