"""Collectives of ranks on several nodes, in two levels: inside a node through shared memory, between nodes along rails.

    all-gather                                           reduce-scatter
    1. rail: each piece goes to every other node once    1. memory: a node adds up its ranks' parts, for every piece
    2. memory: a node's ranks exchange what came         2. rail: each node's sum goes to the piece's node, which adds

So each byte crosses the network once to each other node, and all ranks of a node share that work (pstar.layout.nodes has
the number of bytes). A flat ring through all ranks sends more, because gloo's reduce-scatter is an all-reduce.

Every term is first divided by p. A node adds up in the order of its ranks, in fp32, and rounds the sum to the gradients'
type. The piece's owner adds these sums in the order of the nodes' first ranks. So the bits depend neither on the run nor on
the ownership of chunks, but on the grouping: they differ from the flat sum's in the last bits.

Only for gloo: NCCL knows the nodes by itself, and its own rings and trees use NVLink inside a node.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch

from pstar.comm.rail import Crossing, Rail
from pstar.comm.shared_memory import NAP_S, SharedMemory, add_up, on_host
from pstar.memory.tier import BETWEEN_NODES, MOVES, SUM, Ledger

LONG_NAP_S = 1e-3
"""The longest sleep between two looks at the network, which is slower than memory; its threads need the cores."""


class Stage(Protocol):
    """A part of a collective that was begun: in shared memory, or between nodes."""

    @property
    def done(self) -> bool: ...


class Nothing:
    """The stage of a rank that has nothing to do in it."""

    done = True


class Lane:
    """Collectives of one direction, in the order of the calls; nothing else uses its memory and its rail.

    A collective begins a stage when its previous stage is done and the collective before it has begun the same stage. So
    all ranks begin the exchanges in one memory, and those on one rail, in the same order, whatever their speed.
    """

    def __init__(self, memory: SharedMemory, rail: Rail):
        self.memory, self.rail = memory, rail
        self._begun: deque[TwoLevelExchange] = deque()

    def begin(self, exchange: TwoLevelExchange) -> None:
        self._begun.append(exchange)
        self.progress()

    def progress(self) -> None:
        """Advances the begun collectives as far as possible without waiting."""
        self.memory.progress()
        limit = float("inf")
        for exchange in self._begun:
            exchange.advance(limit)
            limit = exchange.num_begun
        while self._begun and self._begun[0].done:
            self._begun.popleft()


class TwoLevelExchange:
    """A collective that was begun; `wait` ends it. Its tensors must not be used before that.

    Attributes:
        num_begun: stages that were begun; infinite once it is done.
        stage: the last of them.
    """

    def __init__(self, levels: TwoLevels, lane: Lane, unit: int, stages: Iterator[Stage]):
        self._levels, self.lane, self._unit, self._stages = levels, lane, unit, stages
        self.num_begun: float = 0
        self.stage: Stage = Nothing()

    @property
    def done(self) -> bool:
        return self.num_begun == float("inf")

    def advance(self, limit: float) -> None:
        """Begins the next stages as long as the one before is done, and fewer than `limit` were begun."""
        while self.num_begun < limit and self.stage.done:
            self.lane.memory.subject = self.lane.rail.subject = self._unit
            try:
                self.stage = next(self._stages)
                self.num_begun += 1
            except StopIteration:
                self.num_begun = float("inf")
                return

    def wait(self) -> None:
        """Returns when the result is there. Raises LateError if a rank of this node does not come, StateError if it makes
        another call, and RuntimeError if another node is lost."""
        self._levels.finish(self)


class TwoLevels:
    """Collectives of p = n * m ranks on n nodes of m ranks. The calls are those of SharedMemory.

    Args:
        nodes: the ranks of each node (pstar.layout.nodes.ranks_by_node).
        rank: this rank.
        gathers, reductions: separate, because a gather crosses the network first, and a reduction last: each kind keeps the
            order of its calls, and neither waits for the other.
        ledger: counts the bytes received from other nodes.
    """

    def __init__(self, nodes: list[list[int]], rank: int, gathers: Lane, reductions: Lane, ledger: Ledger):
        self.nodes, self.rank, self.num_ranks = nodes, rank, sum(map(len, nodes))
        self._node, self._place = self._find(rank)
        self._gathers, self._reductions, self._ledger = gathers, reductions, ledger
        ledger.kinds = (*MOVES, SUM, BETWEEN_NODES)
        self.subject = -1
        """Number of the next collective's unit, -1 for none."""

    def all_gather(self, flat: torch.Tensor) -> TwoLevelExchange:
        """In place: flat, (p * S,), holds this rank's piece at its position, and afterwards the pieces of all ranks."""
        lane = self._gathers

        def stages(flat: torch.Tensor) -> Iterator[Stage]:
            pieces = flat.view(self.num_ranks, -1)
            crossing = lane.rail.all_gather(pieces[self.rank])
            self._count(pieces[0], len(self.nodes) - 1)
            yield crossing
            for ranks, row in zip(self.nodes, crossing.rows, strict=True):
                pieces[ranks[self._place]].copy_(row)
            yield lane.memory.all_gather_rows(self._by_node(pieces))

        return self._begin(lane, on_host(stages, flat))

    def reduce_scatter_mean(self, piece: torch.Tensor, flat: torch.Tensor) -> TwoLevelExchange:
        """piece, (S,), becomes this rank's part of the mean of flat, (p * S,): divided first, then summed in fp32."""
        lane = self._reductions

        def stages(piece: torch.Tensor, flat: torch.Tensor) -> Iterator[Stage]:
            pieces, sums = flat.view(self.num_ranks, -1), flat.new_empty(len(self.nodes), piece.numel())
            yield lane.memory.reduce_scatter_rows(sums, self._by_node(pieces), self.num_ranks)
            crossing = lane.rail.all_to_all(sums)
            self._count(piece, len(self.nodes) - 1)
            yield crossing
            add_up(crossing.rows, piece)

        return self._begin(lane, on_host(stages, piece, flat))

    def broadcast(self, flat: torch.Tensor, owner: int) -> TwoLevelExchange:
        """In place: flat, (S,), receives the owner's values: along the owner's rail, then inside every node."""
        lane, (node, place) = self._gathers, self._find(owner)

        def stages(flat: torch.Tensor) -> Iterator[Stage]:
            yield lane.rail.broadcast(flat, node) if place == self._place else Nothing()
            self._count(flat, int(place == self._place and node != self._node))
            yield lane.memory.broadcast(flat, place)

        return self._begin(lane, on_host(stages, flat))

    def reduce_mean(self, flat: torch.Tensor, owner: int) -> TwoLevelExchange:
        """In place on the owner: flat, (S,), becomes the mean over the ranks, with the bits of reduce_scatter_mean."""
        lane, (node, place) = self._reductions, self._find(owner)

        def stages(flat: torch.Tensor) -> Iterator[Stage]:
            yield lane.memory.reduce_mean(flat, place, self.num_ranks)
            if place != self._place:
                yield Nothing()
                return
            crossing = lane.rail.gather(flat, node)
            yield crossing
            if crossing.rows:
                self._count(flat, len(self.nodes) - 1)
                add_up(crossing.rows, flat)

        return self._begin(lane, on_host(stages, flat))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values over the ranks, node by node; waits for it. Each rank of a node adds up a part."""
        lane, places = self._reductions, len(self.nodes[0])
        width = -(-values.numel() // places)
        whole = torch.zeros(width * places, dtype=values.dtype, device="cpu")
        whole[: values.numel()].copy_(values.reshape(-1))

        def stages() -> Iterator[Stage]:
            total = torch.empty_like(whole)
            yield lane.memory.begin_sum(total, whole)
            part = total.view(places, width)[self._place]
            crossing = lane.rail.all_gather(part)
            self._count(part, len(self.nodes) - 1)
            yield crossing
            part.copy_(crossing.rows[0])
            for row in crossing.rows[1:]:
                part += row
            yield lane.memory.all_gather(total)
            whole.copy_(total)

        self._begin(lane, stages()).wait()
        return torch.empty_like(values).copy_(whole[: values.numel()].view(values.shape))

    def progress(self) -> None:
        """Advances the begun collectives as far as possible without waiting."""
        self._gathers.progress()
        self._reductions.progress()

    def finish(self, exchange: TwoLevelExchange) -> None:
        """Waits until this collective is done. Meanwhile it advances all others, for which other ranks may wait."""
        with exchange.lane.memory.watched():
            self._finish(exchange)

    def _finish(self, exchange: TwoLevelExchange) -> None:
        stage, nap = None, NAP_S
        while True:
            self.progress()
            if exchange.done:
                return
            if exchange.stage is not stage:
                stage, nap, deadline = exchange.stage, NAP_S, time.monotonic() + exchange.lane.memory.timeout_s
            time.sleep(nap)
            if isinstance(stage, Crossing):    # it has the timeout of its process group
                nap = min(2 * nap, LONG_NAP_S)
            elif time.monotonic() > deadline:
                raise exchange.lane.memory.late()

    def _begin(self, lane: Lane, stages: Iterator[Stage]) -> TwoLevelExchange:
        exchange = TwoLevelExchange(self, lane, self.subject, stages)
        self.subject = -1
        lane.begin(exchange)
        return exchange

    def _by_node(self, pieces: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[pieces[rank] for rank in ranks] for ranks in self.nodes]

    def _find(self, rank: int) -> tuple[int, int]:
        """(number of a rank's node, its place there)."""
        return next((node, ranks.index(rank)) for node, ranks in enumerate(self.nodes) if rank in ranks)

    def _count(self, piece: torch.Tensor, times: int) -> None:
        if times:
            self._ledger.add(BETWEEN_NODES, times * piece.nbytes)
