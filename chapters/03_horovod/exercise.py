"""Exercise 03: a step with an optimizer that averages by itself. Two functions, about 20 lines in all.

    pytest tests/exercises -k 03                  # all of it
    pytest tests/exercises -k "03 and step"       # one function: broadcast, step

Horovod itself need not be built: the grader brings a small one of 80 lines (tests/exercises/small_horovod.py) that has
the same calls, and the same traps, on real processes. It compares weights with those of one process on the whole batch, and
counts how often gradients were averaged.

When you have tried: `broadcast` in distributed_optimizer.py, and the loop of train.py, beside this file.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (yours to use)
from torch import Tensor, nn


def broadcast(hvd: Any, model: nn.Module, optimizer: Any) -> None:
    """Gives all ranks rank 0's weights, and its optimizer state where there is one.

    Args:
        hvd: has broadcast_parameters(name -> tensor, root_rank=0) and broadcast_optimizer_state(optimizer, root_rank=0).
            Trap: for an optimizer without state the latter makes one, by a step with gradients of zero. That counts as a
            step, and weights decay. So where optimizer.state is empty it must not be called.
        model: the same architecture on all ranks, with weights of its own on each.
        optimizer: of the model's parameters; fresh on all ranks, or with state on all of them.
    """
    raise NotImplementedError("broadcast is yours to write: the parameters always, the optimizer's state where there is one")


def train_step(model: nn.Module, optimizer: Any, micro_batches: list[tuple[Tensor, Tensor]], max_norm: float
               ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step: zero, backward over all micro-batches, average over the ranks, clip, step.

    The order of the last three is all there is to it:
        - synchronize() returns when all gradients are averages. Clipped before, each rank would clip gradients of its own
          by a norm of its own, while another thread is averaging them;
        - step() synchronizes by itself, unless it is called inside `with optimizer.skip_synchronize():`. Averaged twice,
          everything travels twice.

    Args:
        model: model(inputs, targets) is the mean loss over the rows.
        optimizer: hvd.DistributedOptimizer with backward_passes_per_step = K: after K backward passes it averages.
        micro_batches: this rank's K pairs of inputs and targets, with equally many rows.
        max_norm: global norm to which gradients are clipped.

    Returns:
        this rank's mean loss (no graph), and the norm of the averaged gradients before clipping, scalars.

    Hint: nn.utils.clip_grad_norm_ returns the norm.
    """
    raise NotImplementedError("train_step is yours to write: backward passes, synchronize, clip, step without synchronizing")
