"""The calls of Horovod that exercise 03 uses, in a few lines on torch.distributed, with the traps of the real one.

The real one averages in its own thread during backward. This one averages everything in synchronize(). With both, a program
may read the gradients only after synchronize().
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast_parameters(named: Mapping[str, Tensor], root_rank: int = 0) -> None:
    """Gives all ranks the values of rank `root_rank`, in place."""
    for _, tensor in sorted(dict(named).items()):
        dist.broadcast(tensor.detach(), src=root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """The same for the optimizer's tensors. A new optimizer creates them in a step with zero gradients, as in Horovod."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for parameter in parameters:
        for _, value in sorted(optimizer.state[parameter].items()):
            dist.broadcast(value, src=root_rank)


class DistributedOptimizer:
    """An optimizer that averages gradients over the ranks.

    Attributes:
        num_averages: how often it has averaged.
        norms: gradient norm at each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, backward_passes_per_step: int) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.parameters = list(model.parameters())
        self.passes, self.num_averages, self.norms = backward_passes_per_step, 0, []
        self._seen = dict.fromkeys(self.parameters, 0)
        self._synchronizes = True
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        self._seen[parameter] += 1
        if self._seen[parameter] > self.passes:
            raise RuntimeError(f"gradients were computed more than backward_passes_per_step={self.passes} times before "
                               "synchronize() or step(): they are on their way already")  # fmt: skip

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.zero_grad(*args, **kwargs)

    def synchronize(self) -> None:
        """Averages all gradients over the ranks."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        self.num_averages += 1
        self._seen = dict.fromkeys(self.parameters, 0)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context, step() does not average."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self) -> None:
        if self._synchronizes:
            self.synchronize()
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters]).norm()))
        self.optimizer.step()
