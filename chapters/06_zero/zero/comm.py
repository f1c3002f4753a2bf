"""The three collectives of ZeRO, and the bytes that each rank sends for them.

    all-reduce       2 (p - 1) / p of the tensor     stage 0 does this with gradients
    reduce-scatter     (p - 1) / p                   the first half: every rank gets the sum of only its piece
    all-gather         (p - 1) / p                   the second half: every rank gets the pieces of all ranks

Each call starts a transfer and returns a function that waits for the result. The next layer can compute meanwhile. With one
process the calls send nothing.

Gloo (torch 2.13) does an fp32 reduce-scatter by a whole all-reduce; the kernel's counter shows twice the bytes. With gloo
this file uses an all-to-all instead: every rank sends each other rank its piece, and each rank sums in fp32. NCCL has a true
reduce-scatter, which adds in the tensor's type. So gradients are divided first: in fp16 a sum of p of them may overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Result = Callable[[], Tensor]


class Comm:
    """The processes over which tensors are sharded.

    Args:
        ranks: the ranks of the run; if its group is None, there is one process.

    Attributes:
        sent: bytes that this rank has sent since `end_step`, by collective, computed by the formulas above.
    """

    def __init__(self, ranks: Any) -> None:
        self.rank, self.num_ranks = ranks.rank, ranks.num_ranks if ranks.group is not None else 1
        # No reference to the default group: gloo threads that outlive destroy_process_group abort the process at exit.
        self.group = None if ranks.group is None or ranks.group is dist.group.WORLD else ranks.group
        self.by_all_to_all = self.num_ranks > 1 and dist.get_backend(self.group) == "gloo"
        self.sent: dict[str, int] = {}
        self.last_sent: dict[str, int] = {}

    def _count(self, what: str, num_bytes: int, times: int = 1) -> None:
        self.sent[what] = self.sent.get(what, 0) + times * num_bytes * (self.num_ranks - 1) // self.num_ranks

    def end_step(self) -> None:
        """Moves the counts of the step to `last_sent` and starts new ones."""
        self.last_sent, self.sent = self.sent, {}

    def broadcast(self, tensor: Tensor) -> None:
        """Copies rank 0's values to all ranks, in place."""
        if self.num_ranks > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def all_reduce_mean(self, flat: Tensor) -> Result:
        """The mean over the ranks, in place."""
        if self.num_ranks == 1:
            return lambda: flat
        self._count("all-reduce", flat.nbytes, times=2)
        work = dist.all_reduce(flat.div_(self.num_ranks), group=self.group, async_op=True)
        return lambda: (work.wait(), flat)[1]

    def reduce_scatter_mean(self, flat: Tensor) -> Result:
        """This rank's piece, (numel / p,), of the mean of `flat` over the ranks; p must divide numel."""
        if self.num_ranks == 1:
            return lambda: flat
        self._count("reduce-scatter", flat.nbytes)
        if self.by_all_to_all:
            pieces = torch.empty_like(flat)  # row r: rank r's values for this rank's piece
            work = dist.all_to_all_single(pieces, flat, group=self.group, async_op=True)
            rows = pieces.view(self.num_ranks, -1)
            return lambda: (work.wait(), rows.sum(0, dtype=torch.float32).div_(self.num_ranks).to(flat.dtype))[1]
        own = flat.new_empty(flat.numel() // self.num_ranks)
        work = reduce_scatter(own, flat.div_(self.num_ranks), group=self.group, async_op=True)
        return lambda: (work.wait(), own)[1]

    def all_gather(self, full: Tensor, own: Tensor) -> Result:
        """Fills `full` with the pieces of all ranks; `own` may be this rank's piece of it."""
        if self.num_ranks == 1:
            if full.data_ptr() != own.data_ptr():
                full.copy_(own)
            return lambda: full
        self._count("all-gather", full.nbytes)
        work = all_gather(full, own, group=self.group, async_op=True)
        return lambda: (work.wait(), full)[1]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks of a small tensor, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(value, group=self.group)
        return value
