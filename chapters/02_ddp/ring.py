"""The ring all-reduce, written out from sends and receives (Patarasuk and Yuan 2009), and what it costs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(flat: Tensor, group: Any = None) -> int:
    """Sums a tensor over the ranks, in place, by sends to the next rank and receives from the one before alone.

    The tensor is cut into p chunks. Reduce-scatter: p - 1 times each rank passes a chunk on and adds the one it receives
    to its own, so that after it rank r holds the whole sum of chunk r + 1. All-gather: p - 1 times the sums go round.

        p = 3, what rank 0, 1, 2 send:      a0 b1 c2 -> c(0+2) a(1+0) b(2+1) | sums: b0 c1 a2 -> a0 b1 c2

    Each rank sends 2 (p - 1) / p of the tensor, however many ranks there are: that is why it scales. All ranks end with
    the same bits, because each chunk is added up in one place and copied from there.

    Args:
        flat: (n,), contiguous; n need not divide by the number of ranks, and may be smaller.
        group: of torch.distributed, None is the default one.

    Returns:
        the bytes this rank has sent.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent_bytes = 0
    chunks = list(flat.tensor_split(num_ranks))
    following, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    received = torch.empty_like(chunks[0])  # the first chunk is the largest

    def pass_on(send: Tensor, receive: Tensor) -> None:
        # both at once: two ranks that each send first and receive after would wait for each other for ever
        operations = [(dist.isend, send, following), (dist.irecv, receive, before)]
        operations = [dist.P2POp(call, part, group=group, group_peer=peer) for call, part, peer in operations if len(part)]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    for turn in range(num_ranks - 1):  # reduce-scatter
        send, add = chunks[(rank - turn) % num_ranks], chunks[(rank - turn - 1) % num_ranks]
        pass_on(send, received[: len(add)])
        add += received[: len(add)]
        sent_bytes += send.nbytes
    for turn in range(num_ranks - 1):  # all-gather
        send, receive = chunks[(rank + 1 - turn) % num_ranks], chunks[(rank - turn) % num_ranks]
        pass_on(send, receive)
        sent_bytes += send.nbytes
    return sent_bytes


def ring_bytes(num_bytes: int, num_ranks: int) -> float:
    """What each rank sends in a ring all-reduce of `num_bytes`."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
