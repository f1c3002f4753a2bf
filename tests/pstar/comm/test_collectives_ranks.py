"""Collectives through shared memory against the process group's, and against sums in fp64."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pstar.comm import collectives as collectives_module
from pstar.comm import node_groups, shared_memory
from pstar.comm.collectives import Collectives
from pstar.comm.shared_memory import SharedMemory
from pstar.errors import LateError
from pstar.memory.tier import Ledger
from tests.cover import quick_only
from tests.elsewhere import Elsewhere, elsewhere

SIZES = [1, 7, 300_001, 1_500_000]    # the last needs several slices of the staging area
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchange_case(rank: int, num_ranks: int, through_memory: bool):
    """(through memory, bytes, results, files that this case made and left behind)."""
    made, make_file = [], shared_memory.make_file

    def remember(num_ranks: int) -> str | None:
        made.append(make_file(num_ranks))
        return made[-1]

    with mock.patch.object(shared_memory, "make_file", remember):
        collectives = Collectives(None, Ledger(), through_memory)
    results = []
    for numel in SIZES:
        for dtype in DTYPES:
            flat, piece = values(rank, numel * num_ranks, dtype), torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter_mean(piece, flat).wait()
            flat = torch.full((num_ranks, numel), float("nan"), dtype=dtype)
            flat[rank] = piece
            collectives.all_gather(flat.view(-1)).wait()
            results.append(flat)
    results.append(collectives.sum(torch.arange(5, dtype=torch.float64) * (rank + 1)))
    return collectives.through_memory, dict(collectives.ledger.moved_bytes), results, made


@pytest.mark.parametrize("num_ranks", quick_only([2, 3, 4], 3))
def test_shared_memory_gives_the_results_of_the_process_group(ranks, num_ranks):
    if not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")
    ours = ranks(num_ranks).run(exchange_case, True)
    theirs = ranks(num_ranks).run(exchange_case, False)
    again = ranks(num_ranks).run(exchange_case, True)
    assert [result[0] for result in ours + theirs] == [True] * num_ranks + [False] * num_ranks
    assert ours[0][1] == theirs[0][1], "the same bytes are received either way"
    [[made], *others] = [result[3] for result in ours]
    assert made.startswith("/dev/shm/pstar_") and not Path(made).exists() and not any(others), "no file is left behind"
    for mine, gloo, later in zip(ours, theirs, again, strict=True):
        for first, a, b, c in zip(ours[0][2], mine[2], gloo[2], later[2], strict=True):
            assert torch.equal(a, first) and torch.equal(a, c), "the same bits on every rank and in every run"
            if num_ranks == 2 and a.dtype != torch.float16:
                assert torch.equal(a, b), "a sum of two has one order"
            elif a.dtype in (torch.float32, torch.float64):    # in 16 bits gloo rounds after every addition, we do once
                torch.testing.assert_close(a, b)
    cases = [(numel, dtype) for numel in SIZES for dtype in DTYPES]
    for (numel, dtype), got in zip(cases, ours[0][2], strict=False):
        exact = sum(values(rank, numel * num_ranks, dtype).double() for rank in range(num_ranks)) / num_ranks
        eps = torch.finfo(dtype).eps    # each term is rounded once when it is divided, and the sum once
        torch.testing.assert_close(got.double().view(-1), exact, rtol=2 * eps, atol=4 * eps)


def other_device_case(rank: int, num_ranks: int, move):
    """Results of every collective, in host memory, on tensors that `move` places."""
    collectives, results = Collectives(None, Ledger()), []
    for numel in SIZES[:3]:
        for dtype in DTYPES:
            flat, piece = move(values(rank, numel * num_ranks, dtype)), move(torch.empty(numel, dtype=dtype))
            collectives.reduce_scatter_mean(piece, flat).wait()
            gathered = move(torch.full((num_ranks, numel), float("nan"), dtype=dtype))
            gathered[rank] = piece
            collectives.all_gather(gathered.view(-1)).wait()
            shared, mean = move(values(rank, numel, dtype)), move(values(10 + rank, numel, dtype))
            collectives.broadcast(shared, 1).wait()
            collectives.reduce_mean(mean, 0).wait()
            results += [gathered, shared] + [mean] * (rank == 0)
    results.append(collectives.sum(move(torch.arange(5, dtype=torch.float64) * (rank + 1))))
    assert all(type(result) is type(move(torch.zeros(1))) for result in results), "results are on the tensors' device"
    return collectives.through_memory, [result.cpu() for result in results]


def stay(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_tensors_of_a_gpu_that_ranks_share_go_through_host_memory_with_the_same_bits(ranks):
    """Two ranks on one GPU, with gloo: NCCL refuses that. On a made-up device, whose tensors cannot meet host memory's."""
    with pytest.raises(RuntimeError, match="same device"):
        elsewhere(torch.ones(2)) + torch.ones(2)
    in_host_memory = ranks(2).run(other_device_case, stay)
    for expected, found in zip(in_host_memory, ranks(2).run(other_device_case, elsewhere), strict=True):
        assert found[0] == expected[0] and len(found[1]) == len(expected[1])
        assert all(torch.equal(a, b) and not isinstance(a, Elsewhere) for a, b in zip(found[1], expected[1], strict=True))


def subset_case(rank: int, num_ranks: int):
    """Ranks 0 and 2 use an engine's collectives in a group of their own, as under NCCL; rank 1 makes no such call."""
    pair = dist.new_group([0, 2])
    found = None
    if rank != 1:
        with mock.patch.object(dist, "get_backend", lambda group=None: "nccl"):
            collectives = Collectives(pair, Ledger())
        found = collectives.from_all(rank), collectives.host_group is not pair, collectives.from_rank_0(f"of {rank}")
    later = dist.new_group([0, 1, 2])
    total = torch.ones(1)
    dist.all_reduce(total, group=later)
    dist.destroy_process_group(later)
    return found, total.item()


def test_ranks_outside_of_the_group_need_not_take_part(ranks):
    """torch numbers the groups that a rank makes: after a group that only its members made, the next one of all ranks would
    have another number on each, and would never meet."""
    inside = ([0, 2], True, "of 0")
    assert ranks(3).run(subset_case, timeout=60) == [(inside, 3.0), (None, 3.0), (inside, 3.0)]


def fallback_case(rank: int, num_ranks: int, what: str):
    original = shared_memory.make_file
    shared_memory.make_file = lambda num_ranks: {"no room": None, "other /dev/shm": "/dev/shm/pstar_not_there"}[what]
    unlink, shared_memory.os.unlink = shared_memory.os.unlink, lambda path: None
    try:
        collectives = Collectives(None, Ledger())
    finally:
        shared_memory.make_file, shared_memory.os.unlink = original, unlink
    return collectives.through_memory, collectives.sum(torch.ones(3))


@pytest.mark.parametrize("what", ["no room", "other /dev/shm"])
def test_without_shared_memory_the_process_group_takes_over_on_all_ranks(ranks, what):
    for through_memory, total in ranks(2).run(fallback_case, what):
        assert not through_memory and total.tolist() == [2, 2, 2]


def memories(collectives: Collectives) -> list[SharedMemory]:
    memory = collectives._memory
    return [memory] if isinstance(memory, SharedMemory) else [memory._gathers.memory, memory._reductions.memory]


def late_case(rank: int, num_ranks: int, nodes: str = ""):
    """Rank 0 sums alone. nodes: a letter for each rank's node; the system's if empty."""
    collectives = Collectives(None, Ledger(), node=nodes[rank : rank + 1] or None)
    for memory in memories(collectives):
        memory.timeout_s = 0.5
    message = ""
    if rank == 0:
        try:
            collectives.sum(torch.ones(1))
        except LateError as error:
            message = str(error)
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named(ranks):
    assert "for ranks [1]: they hang, died, or made other collective calls" in ranks(2).run(late_case)[0]


def timeout_case(rank: int, num_ranks: int, nodes: str) -> list[float]:
    """Seconds that collectives wait in shared memory, if the process group's timeout is 1234 s."""
    group = dist.new_group(timeout=timedelta(seconds=1234))
    return [memory.timeout_s for memory in memories(Collectives(group, Ledger(), node=nodes[rank]))]


@pytest.mark.parametrize("nodes", ["aaaa", "aabb"])
def test_shared_memory_waits_as_long_as_the_process_group(ranks, nodes):
    assert {seconds for found in ranks(4).run(timeout_case, nodes) for seconds in found} == {1234}


def without_cpu_case(rank: int, num_ranks: int) -> list[float]:
    """Timeouts of the groups that the collectives make from a group which, as one of NCCL, has no backend for the CPU."""
    group = dist.new_group(timeout=timedelta(hours=2), backend="cuda:gloo")
    make = mock.Mock(wraps=node_groups.new_member_group)
    with mock.patch.object(collectives_module, "new_member_group", make), mock.patch.object(
            node_groups, "new_member_group", make):    # fmt: skip
        Collectives(group, Ledger(), node="aabb"[rank], replicate=True)
    return [call.args[1].total_seconds() for call in make.call_args_list]


def test_ownership_node_starts_in_a_process_group_without_a_cpu_backend_and_keeps_its_timeout(ranks):
    assert ranks(4).run(without_cpu_case) == [[7200] * 4] * 4    # of the host, of the pieces, inside a node, between nodes


@pytest.mark.parametrize("backend", [SimpleNamespace(), SimpleNamespace(options=None)])
def test_a_backend_that_tells_no_timeout_gets_that_of_torch(backend):
    """As torch's "fake", or one from outside of torch."""
    group = SimpleNamespace(_device_types=["cuda"], _get_backend={"cuda": backend}.get)
    assert Collectives._timeout(SimpleNamespace(group=group)) == default_pg_timeout
