"""Ownership node through process groups: one of the ranks of a node, and one of the ranks of the same place in each node.

For NCCL, and for gloo where the ranks of a node see no common memory. With host memory in common: pstar.comm.replicas.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pstar.comm.member_group import new_member_group
from pstar.comm.rail import all_gather_flat, reduce_scatter_flat
from pstar.memory import accelerator
from pstar.memory.tier import BETWEEN_NODES, MOVES, SUM, Ledger


class Chain:
    """A reduction inside a node, then one between nodes. On a GPU both are queued on streams; on the host the second begins
    when the first one is waited for: all ranks wait for reductions in the same order."""

    def __init__(self, inside: dist.Work, between: dist.ProcessGroup, piece: torch.Tensor):
        self._inside, self._between, self._piece, self._sums = inside, between, piece, None
        if accelerator.is_accelerator(piece.device):
            module = accelerator.module_of(piece.device)
            with module.stream(module.Stream(piece.device)):    # so that the compute stream does not wait for the first
                self._sum()

    def _sum(self) -> None:
        self._inside.wait()
        self._sums = dist.all_reduce(self._piece, group=self._between, async_op=True)

    def wait(self) -> None:
        """Returns when the piece is there (on a GPU: when the current stream is ordered after it)."""
        if self._sums is None:
            self._sum()
        self._sums.wait()


class NodeGroups:
    """Collectives of p = n * m ranks on n nodes, each of which has all m pieces of a unit.

    Args:
        inside: the numbers in the job of the ranks of this node.
        between: those of the ranks of this place in each node.
        num_ranks: p.
        backend: of the process groups.
        timeout: of each collective.
        ledger: counts the bytes received from other nodes, by the formula of a ring.
    """

    def __init__(self, inside: Sequence[int], between: Sequence[int], num_ranks: int, backend: str, timeout: timedelta,
                 ledger: Ledger):
        self._num_ranks, self._num_nodes, self._ledger = num_ranks, len(between), ledger
        self._place = list(inside).index(dist.get_rank())
        # torch alone keeps the groups: a reference here would keep their threads alive after destroy_process_group.
        self._inside, self._between = (
            weakref.ref(new_member_group(members, timeout, backend))
            for members in (inside, between))
        ledger.kinds = (*MOVES, SUM, BETWEEN_NODES)

    def all_gather(self, flat: torch.Tensor) -> dist.Work:
        """In place: flat, (m * S,), holds this rank's piece at its place, and afterwards the pieces of its node's ranks."""
        inside = self._inside()
        return all_gather_flat(flat, flat.view(inside.size(), -1)[self._place], group=inside, async_op=True)

    def reduce_scatter_mean(self, piece: torch.Tensor, flat: torch.Tensor) -> Chain:
        """piece, (S,), becomes this rank's part of the mean of flat, (m * S,), over all p ranks. Changes flat."""
        flat.div_(self._num_ranks)
        self._ledger.add(BETWEEN_NODES, 2 * (self._num_nodes - 1) * piece.nbytes // self._num_nodes)
        return Chain(reduce_scatter_flat(piece, flat, group=self._inside(), async_op=True), self._between(), piece)
