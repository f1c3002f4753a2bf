"""Data parallelism for few trained parameters: one all-reduce of one flat tensor after backward.

Chapter 02 cuts gradients into buckets and reduces them while backward computes. Here one short all-reduce suffices: LoRA
of rank 8 trains one parameter of 80 in the tiny model, so a ring sends one byte of 80. The frozen base has no gradients.

    rank 0   grad a | grad b | ...  -> flat / p \\
    rank 1   grad a | grad b | ...  -> flat / p  > all-reduce -> the mean, copied back into the gradients
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MIB = 1 << 20


class SmallReplica:
    """Averages the gradients of trained parameters over the ranks.

    Args:
        model: with the same frozen parameters on all ranks; afterwards the trained ones are rank 0's, too.
        group: of torch.distributed; None is one process, which averages nothing.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        # The default group is not stored: gloo threads that outlive destroy_process_group abort the process at exit.
        self.group = None if group is None or group is dist.group.WORLD else group
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.all_bytes = sum(p.numel() for p in model.parameters()) * 4
        self.reduced_bytes = 0
        if self.num_ranks > 1:
            for parameter in self.trained:
                dist.broadcast(parameter.detach(), group=self.group, group_src=0)

    def wait(self) -> None:
        """Makes every gradient the mean over the ranks. Call it once a step, on all ranks, before clipping."""
        if self.num_ranks == 1:
            return
        grads = [p.grad for p in self.trained if p.grad is not None]  # the same ones on all ranks: all run the same graph
        flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self.num_ranks)  # before the sum, which may overflow
        dist.all_reduce(flat, group=self.group)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
        self.reduced_bytes = flat.nbytes

    def step_scalars(self) -> dict[str, float]:
        """For metrics.jsonl: bytes given to all-reduce in the last step, and what each rank sends by the ring's formula."""
        if self.num_ranks == 1:
            return {}
        return {"reduced_bytes": self.reduced_bytes, "num_reductions": 1, "formula_bytes": self._sent(self.reduced_bytes)}

    def rows(self) -> list[tuple[str, str]]:
        """For the closing summary: the communication of a step, and that of training every parameter."""
        if self.num_ranks == 1:
            return [("communication", "none: one process")]
        own, full = self._sent(self.reduced_bytes), self._sent(self.all_bytes)
        measured = f"{self.reduced_bytes:,} bytes of gradients in one all-reduce a step"
        formula = f"each of {self.num_ranks} ranks sends {own / MIB:.2f} MiB; all parameters would need {full / MIB:.2f} MiB"
        return [("communication", measured), ("by the formula", formula)]

    def _sent(self, num_bytes: int) -> int:
        """Bytes that each rank sends in a ring all-reduce: 2 (p - 1) / p of the tensor."""
        return 2 * (self.num_ranks - 1) * num_bytes // self.num_ranks
