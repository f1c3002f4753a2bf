"""Exercise 03: a step with an optimizer that averages gradients over the ranks. Two functions, about 20 lines in all.

    bash chapters/03_horovod/exercise.sh           # all of it
    bash chapters/03_horovod/exercise.sh -k step   # one function: broadcast, step

You need not build Horovod: the grader uses a small version of 80 lines (tests/exercises/small_horovod.py) with the same
calls and the same traps, on real processes. The grader compares the weights with those of one process on the whole batch,
and counts how often gradients were averaged.

When you have tried: compare with `broadcast` in distributed_optimizer.py, and the loop of train.py, in this folder.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (yours to use)
from torch import Tensor, nn


def broadcast(hvd: Any, model: nn.Module, optimizer: Any) -> None:
    """Gives all ranks rank 0's weights, and its optimizer state if it has one.

    Args:
        hvd: has broadcast_parameters(name -> tensor, root_rank=0) and broadcast_optimizer_state(optimizer, root_rank=0).
            Trap: if the optimizer has no state, the latter creates one by a step with zero gradients. That counts as a
            step and applies weight decay. So do not call it if optimizer.state is empty.
        model: the same architecture on all ranks, with different weights on each.
        optimizer: updates the model's parameters; fresh on all ranks, or with state on all of them.
    """
    raise NotImplementedError("broadcast is yours to write: the parameters always, the optimizer's state if it has one")


def train_step(model: nn.Module, optimizer: Any, micro_batches: list[tuple[Tensor, Tensor]], max_norm: float
               ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step: zero, backward over all micro-batches, average over the ranks, clip, step.

    The order of the last three matters:
        - synchronize() returns when all gradients are averaged. If you clip before it, each rank clips its local gradients
          by its local norm, while another thread is averaging them;
        - step() also synchronizes, unless it is called inside `with optimizer.skip_synchronize():`. Without that, all
          gradients are averaged and sent twice.

    Args:
        model: model(inputs, targets) is the mean loss over the rows.
        optimizer: hvd.DistributedOptimizer with backward_passes_per_step = K: it averages after K backward passes.
        micro_batches: this rank's K pairs of inputs and targets, with equally many rows.
        max_norm: largest global norm of the clipped gradients.

    Returns:
        this rank's mean loss (detached from the graph) and the norm of the averaged gradients before clipping; scalars.

    Hint: nn.utils.clip_grad_norm_ returns the norm.
    """
    raise NotImplementedError("train_step is yours to write: backward passes, synchronize, clip, step without synchronizing")
