"""The ring all-reduce, written out from sends and receives (Patarasuk and Yuan 2009), and the bytes it sends."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from durable.calls import message


class Turn(NamedTuple):
    """One turn of the ring, in which every rank sends one chunk to the next rank.

    Attributes:
        phase: "reduce-scatter", where the receiver adds the chunk to its own, or "all-gather", where it copies it.
        sends: for each rank, the number of the chunk that it sends. It receives chunk sends[rank - 1].
    """

    phase: str
    sends: tuple[int, ...]


def ring_turns(num_ranks: int) -> list[Turn]:
    """The 2 (p - 1) turns of a ring of p ranks: the executor below runs this table, and the site draws it."""
    p = num_ranks
    adds = [Turn("reduce-scatter", tuple((rank - turn) % p for rank in range(p))) for turn in range(p - 1)]
    copies = [Turn("all-gather", tuple((rank + 1 - turn) % p for rank in range(p))) for turn in range(p - 1)]
    return adds + copies


def ring_all_reduce(flat: Tensor, group: Any = None, name: str = "") -> int:
    """Sums a tensor over the ranks, in place; each rank only sends to the next rank and receives from the previous one.

    The tensor is cut into p chunks. Reduce-scatter: p - 1 times each rank sends a chunk on and adds the one it receives to
    its own; then rank r holds the complete sum of chunk r + 1. All-gather: p - 1 times each rank passes a complete sum on.

        p = 3, chunks that ranks 0, 1, 2 send:   a0 b1 c2 -> c(0+2) a(1+0) b(2+1) | sums: b0 c1 a2 -> a0 b1 c2

    Each rank sends 2 (p - 1) / p of the tensor, less than twice its bytes for any p: so the ring scales. All ranks end with
    the same bits, because each chunk is summed along one path and then copied.

    Args:
        flat: (n,), contiguous; n need not be divisible by the number of ranks, and may be smaller.
        group: of torch.distributed, None is the default one.
        name: of the tensor, for the report of a hang.

    Returns:
        the bytes that this rank has sent.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent_bytes = 0
    chunks = list(flat.tensor_split(num_ranks))
    following, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    received = torch.empty_like(chunks[0])  # the first chunk is the largest
    sender = dist.get_process_group_ranks(group)[before]  # its number among all ranks, for the report of a hang

    def pass_on(send: Tensor, receive: Tensor) -> None:
        # start both at once: if every rank sent first and received later, all would wait for ever
        operations = [(dist.isend, send, following), (dist.irecv, receive, before)]
        operations = [dist.P2POp(call, part, group=group, group_peer=peer) for call, part, peer in operations if len(part)]
        with message("receive", f"chunk of {name}", sender):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    for phase, sends in ring_turns(num_ranks):
        send, receive = chunks[sends[rank]], chunks[sends[before]]
        if phase == "reduce-scatter":
            pass_on(send, received[: len(receive)])
            receive += received[: len(receive)]
        else:
            pass_on(send, receive)
        sent_bytes += send.nbytes
    return sent_bytes


def ring_bytes(num_bytes: int, num_ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `num_bytes`."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
