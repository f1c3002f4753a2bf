"""Collectives of ownership node, on four ranks of one machine that call themselves two nodes: means over all ranks, and
gathers inside a node."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpt2_chinese.distributed.socket_bytes import between, tcp_bytes
from pstar.comm import shared_memory
from pstar.comm.collectives import Collectives
from pstar.errors import ConfigError
from pstar.layout.nodes import ranks_by_node, sent_by_replicas
from pstar.memory.tier import BETWEEN_NODES, Ledger
from tests.elsewhere import Elsewhere, elsewhere
from tests.pstar.comm.test_collectives_ranks import stay, values
from tests.pstar.comm.test_two_levels_ranks import CASES, SLICE_BYTES, node_by_node

ORDERS = {"in order": "aabb", "in turn": "abab", "nested": "abba"}
"""The names of the nodes of ranks 0 to 3."""


def exchange_case(rank: int, num_ranks: int, names: str, through_memory: bool, move=stay):
    """(node, piece, this rank's results in host memory) of reductions and gathers, on tensors that `move` places."""
    with mock.patch.object(shared_memory, "SLICE_BYTES", SLICE_BYTES):
        ours = Collectives(None, Ledger(), through_memory, names[rank], replicate=True)
        results = []
        for numel, dtype in CASES:
            own = values(rank, numel * ours.num_pieces, dtype)
            flat, piece = move(own.clone()), move(torch.empty(numel, dtype=dtype))
            ours.reduce_scatter_mean(piece, flat).wait()
            gathered = move(torch.full((ours.num_pieces, numel), float("nan"), dtype=dtype))
            gathered[ours.piece] = piece
            ours.all_gather(gathered.view(-1)).wait()
            results += [gathered.cpu(), ours.gather_pieces(piece.cpu())]
        total = ours.sum(torch.tensor([float(rank + 1)]))
        return ours.replica, ours.piece, results, total.item(), ours.where


@pytest.mark.parametrize("through_memory", [True, False], ids=["memory", "groups"])
@pytest.mark.parametrize("names", ORDERS.values(), ids=ORDERS)
def test_every_node_has_the_mean_of_all_ranks_in_the_documented_order(ranks, names: str, through_memory: bool) -> None:
    """Process groups of gloo add up in an order of their own."""
    if through_memory and not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")
    found = ranks(4).run(exchange_case, names, through_memory)
    nodes = ranks_by_node(names)
    for rank, (replica, piece, results, total, where) in enumerate(found):
        assert nodes[replica][piece] == rank and total == 10 and where == " on 2 nodes, each with all chunks"
        for (numel, dtype), gathered, at_first in zip(CASES, results[::2], results[1::2], strict=True):
            terms = [values(other, 2 * numel, dtype) for other in range(4)]
            if through_memory:
                assert torch.equal(gathered.view(-1), node_by_node(terms, names, dtype))
            exact, eps = sum(term.double() for term in terms) / 4, torch.finfo(dtype).eps
            torch.testing.assert_close(gathered.double().view(-1), exact, rtol=3 * eps, atol=6 * eps)
            assert torch.equal(gathered, found[0][2][2 * CASES.index((numel, dtype))]), "the same bits on every rank"
            assert (at_first is None) == (rank != 0) and (rank or torch.equal(at_first, gathered.view(-1)))


def test_tensors_of_a_gpu_that_ranks_share_go_through_host_memory(ranks) -> None:
    if not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")
    here, there = (ranks(4).run(exchange_case, "aabb", True, move) for move in (stay, elsewhere))
    for expected, result in zip(here, there, strict=True):
        for a, b in zip(result[2][::2], expected[2][::2], strict=True):
            assert torch.equal(a, b) and not isinstance(a, Elsewhere)


def traffic_case(rank: int, num_ranks: int, through_memory: bool):
    """(bytes that the kernel counted on this rank's sockets, sent and received; the ledger's counts)."""
    ours, numel = Collectives(None, Ledger(), through_memory, "aabb"[rank], replicate=True), 200_001
    dist.barrier()
    before, counted = tcp_bytes(), ours.ledger.moved_bytes[BETWEEN_NODES]
    flat = torch.ones(2 * numel)
    ours.reduce_scatter_mean(torch.empty(numel), flat).wait()
    dist.barrier()
    after = tcp_bytes()
    if through_memory:    # a gather of process groups crosses sockets inside the node
        ours.all_gather(flat).wait()
        after = tcp_bytes()
    return *between(before, after), ours.ledger.moved_bytes[BETWEEN_NODES] - counted, dict(ours.ledger.moved_bytes)


def test_the_kernel_the_ledger_and_the_formula_count_the_same_bytes(ranks) -> None:
    """Gathers stay inside a node."""
    if tcp_bytes() is None or not shared_memory.available():
        pytest.skip("the kernel gives no counts, or no shared memory with ordered writes")
    found, unit = ranks(4).run(traffic_case, True), 4 * 2 * 200_001
    for inside in ranks_by_node("aabb"):
        sent, received, counted = (sum(found[rank][kind] for rank in inside) for kind in range(3))
        assert sent == pytest.approx(sent_by_replicas(2, unit), rel=0.02) and received == pytest.approx(sent, rel=0.02)
        assert counted == pytest.approx(received, rel=0.02)
    assert all(each[3]["gather"] == each[3]["reduce"] == unit // 2 for each in found)


def refused_case(rank: int, num_ranks: int, names: str):
    try:
        ours = Collectives(None, Ledger(), node=names[rank], replicate=True)
    except ConfigError as error:
        return str(error)
    return ours.num_pieces, ours.num_nodes, ours.replica


@pytest.mark.parametrize("names, expected", [("aaab", "3 on a, 1 on b: give each node equally many, at least 2"),
                                             ("abcd", "1 on a, 1 on b, 1 on c, 1 on d: give"), ("aaaa", (4, 1, 0))])
def test_nodes_without_equally_many_ranks_are_refused_and_one_node_is_sharded(ranks, names: str, expected) -> None:
    for got in ranks(4).run(refused_case, names):
        assert got == expected if isinstance(expected, tuple) else expected in got
