"""Ownership node: the ranks of a node share the pieces of each unit, and every node has a replica of all of them.

    all-gather                              reduce-scatter
    1. memory: a node's ranks exchange      1. memory: a node adds up its ranks' parts
       their pieces                         2. rail: the ranks of a rail exchange a part of their piece each, and add it up
                                            3. rail: they exchange the sums

Nothing is gathered over the network; only gradients cross it, twice (n - 1) / n of each unit. That is hybrid sharding (Zhao
and others 2023, "PyTorch FSDP", section 3.2.2), ZeRO's partition inside a node and data parallelism between nodes. Each rank
holds 1 / m of the model data, not 1 / p.

Sums have the order of pstar.comm.two_levels, and so the same bits as with the other ownerships there. The replicas get the
same sums, so they stay equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pstar.comm.shared_memory import add_up, on_host
from pstar.comm.two_levels import Stage, TwoLevelExchange, TwoLevels


class Replicas(TwoLevels):
    """Collectives of p = n * m ranks on n nodes, each of which has all m pieces of a unit."""

    def all_gather(self, flat: torch.Tensor) -> TwoLevelExchange:
        """In place: flat, (m * S,), holds this rank's piece at its place, and afterwards the pieces of its node's ranks."""
        lane = self._gathers

        def stages(flat: torch.Tensor) -> Iterator[Stage]:
            yield lane.memory.all_gather(flat)

        return self._begin(lane, on_host(stages, flat))

    def reduce_scatter_mean(self, piece: torch.Tensor, flat: torch.Tensor) -> TwoLevelExchange:
        """piece, (S,), becomes this rank's part of the mean of flat, (m * S,), over all p ranks."""
        lane, nodes = self._reductions, len(self.nodes)

        def stages(piece: torch.Tensor, flat: torch.Tensor) -> Iterator[Stage]:
            width = -(-piece.numel() // nodes)
            parts = piece.new_zeros(nodes, width)    # one for each node to add up
            inside = parts.view(-1)[: piece.numel()]
            yield lane.memory.reduce_scatter_rows(inside.view(1, -1), [flat.view(len(self.nodes[0]), -1).unbind(0)],
                                                  self.num_ranks)
            crossing = lane.rail.all_to_all(parts)
            self._count(parts[0], nodes - 1)
            yield crossing
            own = parts[self._node]
            add_up(crossing.rows, own)
            crossing = lane.rail.all_gather(own)
            self._count(own, nodes - 1)
            yield crossing
            for part, row in zip(parts, crossing.rows, strict=True):
                part.copy_(row)
            piece.copy_(inside)

        return self._begin(lane, on_host(stages, piece, flat))
