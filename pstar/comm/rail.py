"""A rail: the ranks of the same place in each node, which exchange data between nodes through a process group of their own.

              node a    node b    node c
    place 0   rank 0 -- rank 2 -- rank 4      rail 0
    place 1   rank 1 -- rank 3 -- rank 5      rail 1

Collectives return at once; process groups of gloo work in their own threads. Tensors are in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from durable.calls import name_next
from pstar.comm.member_group import new_member_group

# torch 2.13 renamed them and warns of the old names; 2.11 has only those.
all_gather_flat = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Crossing:
    """Data on their way between nodes.

    Attributes:
        rows: (S,) from each node, by node; complete once `done` is true. Empty if this rank receives nothing.
    """

    def __init__(self, work: dist.Work, rows: Sequence[torch.Tensor] = ()):
        self._work, self.rows = work, rows

    @property
    def done(self) -> bool:
        """Whether the data have arrived. Raises RuntimeError if a rank was lost or the group's timeout is over."""
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


class Rail:
    """Exchanges between one rank of each of n nodes.

    Args:
        members: the numbers in the job of its ranks, by node. All of them make it at the same time, nobody else need.
        node: the number of this rank's node.
        timeout: of each exchange.
    """

    def __init__(self, members: Sequence[int], node: int, timeout: timedelta):
        self.num_nodes, self.node = len(members), node
        in_group = sorted(members)    # a process group numbers its ranks in this order
        self._places = [in_group.index(member) for member in members]
        self.subject = -1
        """Number of the next exchange's unit, -1 for none; it names the exchange in the report of a hang."""
        # torch alone keeps the group: a reference here would keep its threads alive after destroy_process_group.
        self._made = weakref.ref(new_member_group(in_group, timeout))

    def all_gather(self, piece: torch.Tensor) -> Crossing:
        """Every node receives the pieces, (S,), of all."""
        flat = piece.new_empty(self.num_nodes * piece.numel())
        return Crossing(all_gather_flat(flat, piece, group=self._group(), async_op=True), self._by_node(flat))

    def all_to_all(self, pieces: torch.Tensor) -> Crossing:
        """Node j receives pieces[j], of (n, S), of all nodes."""
        sent = pieces.view(-1)
        if self._places != sorted(self._places):
            sent = torch.cat([pieces[self._places.index(place)] for place in range(self.num_nodes)])
        flat = torch.empty_like(sent)
        return Crossing(dist.all_to_all_single(flat, sent, group=self._group(), async_op=True), self._by_node(flat))

    def broadcast(self, flat: torch.Tensor, node: int) -> Crossing:
        """In place: flat, (S,), receives the values of a node."""
        return Crossing(dist.broadcast(flat, group=self._group(), group_src=self._places[node], async_op=True))

    def gather(self, piece: torch.Tensor, node: int) -> Crossing:
        """A node receives the pieces, (S,), of all."""
        rows = list(piece.new_empty(self.num_nodes, piece.numel()).unbind(0)) if node == self.node else None
        work = dist.gather(piece, rows, group=self._group(), group_dst=self._places[node], async_op=True)
        return Crossing(work, [rows[place] for place in self._places] if rows else ())

    def _group(self) -> dist.ProcessGroup:
        """The process group, for the next exchange."""
        if self.subject >= 0:
            name_next(f"unit {self.subject}")
        self.subject = -1
        return self._made()

    def _by_node(self, flat: torch.Tensor) -> list[torch.Tensor]:
        rows = flat.view(self.num_nodes, -1)
        return [rows[place] for place in self._places]
