"""Collectives in two levels against sums in fp64, on four ranks of one machine that call themselves two nodes."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpt2_chinese.distributed.socket_bytes import between, tcp_bytes
from pstar.comm import shared_memory
from pstar.comm.collectives import Collectives
from pstar.comm.rail import Rail
from pstar.comm.two_levels import Lane, TwoLevelExchange
from pstar.layout.nodes import ranks_by_node, sent_by_flat_ring, sent_in_two_levels
from pstar.memory.tier import BETWEEN_NODES, Ledger
from tests.elsewhere import Elsewhere, elsewhere
from tests.limits import HANGS_S, timeout_s
from tests.pstar.comm.test_collectives_ranks import late_case, stay, values

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="no shared memory with ordered writes on this machine")
SLICE_BYTES = 2**16    # so that the largest size needs several slices
SIZES = [0, 1, 7, 50_001]
CASES = [(numel, dtype) for numel in SIZES for dtype in (torch.float32, torch.bfloat16, torch.float16)]
NODES = {"in order": "aabb", "in turn": "abab", "nested": "abba", "one a node": "abcd"}
"""The names of the nodes of ranks 0 to 3."""


def exchange_case(rank: int, num_ranks: int, names: str, move=stay):
    """(nodes, bytes received from other nodes, results in host memory) of all collectives, on tensors that `move` places."""
    with mock.patch.object(shared_memory, "SLICE_BYTES", SLICE_BYTES):
        return exchange(Collectives(None, Ledger(), node=names[rank]), rank, num_ranks, move)


def exchange(collectives: Collectives, rank: int, num_ranks: int, move):
    results = []
    for numel, dtype in CASES:
        own = values(rank, numel * num_ranks, dtype)
        flat, piece = move(own.clone()), move(torch.empty(numel, dtype=dtype))
        collectives.reduce_scatter_mean(piece, flat).wait()
        gathered = move(torch.full((num_ranks, numel), float("nan"), dtype=dtype))
        gathered[rank] = piece
        collectives.all_gather(gathered.view(-1)).wait()
        whole = move(torch.empty(num_ranks, numel, dtype=dtype))
        for owner in range(num_ranks):    # the same by whole chunks: each owner reduces one, and sends it to all
            mean = move(own.view(num_ranks, numel)[owner].clone())
            collectives.reduce_mean(mean, owner).wait()
            if rank != owner:
                mean.fill_(float("nan"))
            collectives.broadcast(mean, owner).wait()
            whole[owner] = mean
        results += [gathered, whole]
    total = collectives.sum(move(torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1)))
    assert all(type(result) is type(move(torch.zeros(1))) for result in (total, *results)), "results stay on their device"
    results.append(total)
    return collectives.num_nodes, collectives.ledger.moved_bytes[BETWEEN_NODES], [result.cpu() for result in results]


def node_by_node(terms: list[torch.Tensor], names: str, dtype: torch.dtype) -> torch.Tensor:
    """The documented order, written plainly: quotients, sums of a node in fp32, rounded, and their sum in fp32."""
    total = None
    for ranks in ranks_by_node(names):
        inside = sum((terms[rank] / len(terms)).float() for rank in ranks).to(dtype).float()
        total = inside if total is None else total + inside
    return total.to(dtype)


@pytest.mark.parametrize("names", NODES.values(), ids=NODES)
def test_each_collective_gives_the_mean_in_the_documented_order(ranks, names: str) -> None:
    found = ranks(4).run_once(exchange_case, names)
    assert [result[0] for result in found] == [len(set(names))] * 4
    for _, _, results in found:
        *pairs, total = results
        assert total.tolist() == [[0, 10, 20], [30, 40, 50]]
        for (numel, dtype), gathered, whole in zip(CASES, pairs[::2], pairs[1::2], strict=True):
            terms = [values(rank, 4 * numel, dtype) for rank in range(4)]
            assert torch.equal(gathered.view(-1), node_by_node(terms, names, dtype)), "the same bits on every rank"
            assert torch.equal(gathered, whole), "the same bits with both ownerships"
            exact, eps = sum(term.double() for term in terms) / 4, torch.finfo(dtype).eps
            torch.testing.assert_close(gathered.double().view(-1), exact, rtol=3 * eps, atol=6 * eps)


def test_the_flat_sum_and_a_second_run_agree(ranks) -> None:
    """In fp32 to 1e-6: the two levels add in another order."""
    first, again = (run(exchange_case, "aabb")[0][2] for run in (ranks(4).run_once, ranks(4).run))
    flat = ranks(4).run(exchange_case, "aaaa")[0][2]
    for (_, dtype), ours, later, theirs in zip(CASES, first[::2], again[::2], flat[::2], strict=False):
        assert torch.equal(ours, later)
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_tensors_of_a_gpu_that_ranks_share_go_through_host_memory(ranks) -> None:
    here, there = ranks(4).run_once(exchange_case, "aabb"), ranks(4).run(exchange_case, "aabb", elsewhere)
    for expected, result in zip(here, there, strict=True):
        assert result[:2] == expected[:2]
        assert all(torch.equal(a, b) and not isinstance(a, Elsewhere) for a, b in zip(result[2], expected[2], strict=True))


def traffic_case(rank: int, num_ranks: int, names: str, whole: bool):
    """(bytes that the kernel counted on this rank's sockets, sent and received; the ledger's count)."""
    collectives, numel = Collectives(None, Ledger(), node=names[rank]), 100_000
    dist.barrier()
    before, counted = tcp_bytes(), collectives.ledger.moved_bytes[BETWEEN_NODES]
    flat = torch.ones(num_ranks * numel)
    if whole:
        for owner, chunk in enumerate(flat.view(num_ranks, -1)):
            collectives.reduce_mean(chunk, owner).wait()
            collectives.broadcast(chunk, owner).wait()
    else:
        collectives.reduce_scatter_mean(torch.empty(numel), flat).wait()
        collectives.all_gather(flat).wait()
    collectives.sum(torch.ones(1000))
    dist.barrier()
    return *between(before, tcp_bytes()), collectives.ledger.moved_bytes[BETWEEN_NODES] - counted


@pytest.mark.parametrize("whole", [False, True], ids=["sharded", "whole"])
@pytest.mark.parametrize("names", ["aabb", "abcd"])
def test_the_kernel_the_ledger_and_the_formula_count_the_same_bytes(ranks, names: str, whole: bool) -> None:
    if tcp_bytes() is None:
        pytest.skip("the kernel gives no counts")
    found, unit, nodes = ranks(4).run(traffic_case, names, whole), 4 * 4 * 100_000, len(set(names))
    a_node = sent_in_two_levels(nodes, unit, unit)
    for inside in ranks_by_node(names):
        sent, received, counted = (sum(found[rank][kind] for rank in inside) for kind in range(3))
        assert sent == pytest.approx(a_node, rel=0.02) and received == pytest.approx(a_node, rel=0.02)
        assert counted == pytest.approx(received, rel=0.02)
    assert sent_in_two_levels(2, 2 * unit, unit) == 0.5 * sent_by_flat_ring(4, 2 * unit, unit), "what 2 x 2 gains"


def overlap_case(rank: int, num_ranks: int):
    """Ranks begin and wait for gathers and reductions in different orders. Small slices: none is done before the waits."""
    with mock.patch.object(shared_memory, "SLICE_BYTES", 2**12):
        return overlap(Collectives(None, Ledger(), node="aabb"[rank]), rank, num_ranks, 50_000)


def overlap(collectives: Collectives, rank: int, num_ranks: int, numel: int):
    pieces, gathered = torch.empty(3, numel), torch.empty(3, num_ranks * numel)
    handles = []
    for unit in range(3):
        gathered[unit].view(num_ranks, -1)[rank] = 10 * unit + rank
        for reduces in (True, False) if rank % 2 else (False, True):
            collectives.about(unit)
            if reduces:
                handles.append(collectives.reduce_scatter_mean(pieces[unit], torch.full((num_ranks * numel,), float(unit))))
            else:
                handles.append(collectives.all_gather(gathered[unit]))
    for handle in handles[:: 1 if rank < 2 else -1]:
        handle.wait()
        collectives.progress()
    return [part.unique().tolist() for part in (*pieces, *gathered)]


def test_gathers_and_reductions_neither_mix_nor_wait_for_each_other(ranks) -> None:
    expected = [[float(unit)] for unit in range(3)] + [[10.0 * unit + rank for rank in range(4)] for unit in range(3)]
    assert ranks(4).run(overlap_case) == [expected] * 4


class Part:
    """A stage that ends when the test says so."""

    done = False


def test_a_later_collective_overtakes_an_earlier_one_in_no_stage() -> None:
    """gloo works on two exchanges at once, and the second may end first; on another rank it may not."""
    lane = Lane(mock.Mock(), mock.Mock())
    parts = [[Part(), Part()], [Part(), Part()]]
    first, second = (TwoLevelExchange(mock.Mock(), lane, unit, iter(each)) for unit, each in enumerate(parts))
    lane.begin(first)
    lane.begin(second)
    assert (first.num_begun, second.num_begun) == (1, 1), "they overlap"
    parts[1][0].done = True
    lane.progress()
    assert (first.stage, second.stage) == (parts[0][0], parts[1][0])
    parts[0][0].done = parts[1][1].done = True
    lane.progress()
    assert (first.stage, second.stage) == (parts[0][1], parts[1][1]) and not second.done
    assert lane.memory.subject == lane.rail.subject == 1, "the unit of the collective that began last"
    parts[0][1].done = True
    lane.progress()
    assert first.done and second.done


def flat_case(rank: int, num_ranks: int, names: str):
    collectives = Collectives(None, Ledger(), node=names[rank])
    return collectives.through_memory, collectives.num_nodes, collectives.sum(torch.ones(2)).tolist()


@pytest.mark.parametrize("names, through_memory", [("aaab", False), ("aaaa", True)])
def test_nodes_with_unequal_numbers_of_ranks_use_the_process_group(ranks, names: str, through_memory: bool) -> None:
    assert ranks(4).run(flat_case, names) == [(through_memory, 1, [4.0, 4.0])] * 4


def group_case(rank: int, num_ranks: int):
    """An engine's collectives in a group without rank 0; then, and with it, what the process group was made with."""
    three, found = dist.new_group([1, 2, 3], timeout=timedelta(seconds=HANGS_S)), None
    if rank:
        made = []
        with mock.patch("pstar.comm.collectives.Rail", lambda *given: made.append(Rail(*given)) or made[-1]):
            collectives = Collectives(three, Ledger(), node="_abc"[rank])
        flat = torch.zeros(3)
        flat[rank - 1] = rank
        collectives.all_gather(flat).wait()
        of_rails = [timeout_s(rail._made()) for rail in made]
        found = collectives.num_nodes, flat.tolist(), of_rails
    later = dist.new_group(list(range(num_ranks)))
    total = torch.ones(1)
    dist.all_reduce(total, group=later)
    return found, total.item()


def test_a_group_without_all_ranks_has_its_own_rails_with_its_timeout(ranks) -> None:
    inside = ((3, [1.0, 2.0, 3.0], [HANGS_S, HANGS_S]), 4.0)
    assert ranks(4).run(group_case) == [(None, 4.0), inside, inside, inside]


def other_unit_case(rank: int, num_ranks: int):
    """Rank 3 reduces another unit than rank 2; the other node makes no call."""
    collectives, message = Collectives(None, Ledger(), node="aabb"[rank]), ""
    if rank > 1:
        collectives.about(rank)
        try:
            collectives.reduce_scatter_mean(torch.empty(10), torch.ones(40)).wait()
        except Exception as error:
            message = str(error)
    dist.barrier()
    return message


def test_ranks_of_a_node_with_different_units_raise_and_name_the_ranks_of_the_job(ranks) -> None:
    *others, message = ranks(4).run(other_unit_case)
    assert "rank 2 is in a reduction of unit 2 (40 elements) where rank 3 is in a reduction of unit 3" in message, others


def test_a_rank_of_this_node_that_does_not_come_is_named(ranks) -> None:
    assert "rank 0 waited 0 s in collective 1 for ranks [1]: they hang" in ranks(4).run(late_case, "aabb")[0]
