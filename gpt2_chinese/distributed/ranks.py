"""The processes of a run, seen from one of them: its number, and the collectives that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from durable.hang_report import Watch

GRACE_S = 2.0  # ranks that wait for the same rank give up within this time of each other


@dataclass
class Ranks:
    """The processes of a run, seen from one of them.

    Attributes:
        rank, num_ranks: number of this process, and of all processes.
        local_rank: number of this process on its machine.
        device: where this rank computes.
        group: the process group of all ranks, None for a single process.
        watch: reports a hang, or None.
        timeout: of a collective, for groups that are made of these ranks; None: torch's.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    group: Any = None
    watch: Watch | None = None
    timeout: timedelta | None = None

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over all ranks, a new tensor on the same device; all ranks must call together."""
        if self.group is None:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def mean(self, value: torch.Tensor | float) -> float:
        """Mean of a number over all ranks, in double precision; all ranks must call together."""
        return self.sum(torch.as_tensor(value, dtype=torch.float64).detach()).item() / self.num_ranks

    def max(self, value: float) -> float:
        """Largest of a number over all ranks; all ranks must call together."""
        if self.group is None:
            return float(value)
        largest = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest.item()

    def barrier(self) -> None:
        """Waits until every rank has called this."""
        self.max(0.0)

    def apart(self) -> Ranks:
        """The same ranks on the CPU with a process group of their own, for another thread; all ranks must call together."""
        if self.group is None:
            return Ranks(self.rank, self.num_ranks, self.local_rank)
        group = dist.new_group(dist.get_process_group_ranks(self.group), self.timeout, backend="gloo")
        return Ranks(self.rank, self.num_ranks, self.local_rank, group=group)

    def close(self) -> None:
        """Leaves the process group."""
        if self.watch is not None:
            self.watch.close()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
