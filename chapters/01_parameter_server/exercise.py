"""Exercise 01: a parameter server. Three functions, about 25 lines in all.

    pytest tests/exercises -k 01                  # all of it
    pytest tests/exercises -k "01 and mean"       # one function: mean, wait, step

The grader works out means and waits by hand, then starts 2 and 3 real processes, each with a model of its own and
gradients of its own, and compares the weights of all of them with one process that stepped with the mean.

When you have tried: `mean_of` and `must_wait` in server.py beside this file; `push` and `pull` of its ParameterServer.
"""

from __future__ import annotations

import torch  # noqa: F401  (yours to use)
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import Tensor, nn


def mean_of(vectors: list[Tensor]) -> Tensor:
    """The mean of the gradients that the server has: its own and those that have arrived.

    Divide BEFORE you add: two gradients of 3e38 have a mean in float32, but no sum. The vectors stay as they are.

    Args:
        vectors: at least one, each (n,), float32.

    Returns:
        a new tensor, (n,).
    """
    raise NotImplementedError("mean_of is yours to write: each vector divided by their number, then added up")


def must_wait(step: int, works_on: int, bound: int | None) -> bool:
    """Whether the server, about to take `step`, has to wait for the gradient of a worker that is still at work.

    A gradient's staleness is how many steps the server has taken since the weights it was made with. The weights after
    step 7 are version 7. If step 8 is taken WITHOUT the worker, its gradient can be used in step 9 at the earliest: then it
    is one step staler than it would be now. No gradient may ever be staler than the bound.

    Args:
        step: that the server is about to take, from 1 on; its weights are version `step - 1`.
        works_on: version of the weights that the worker computes with.
        bound: the most staleness; None is the synchronous mode, where the server always waits.

    Hint: with a bound of 0 the answer is always yes, as in the synchronous mode.
    """
    raise NotImplementedError("must_wait is yours to write: how stale is the gradient now, and how stale may it be?")


def synchronous_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> None:
    """One step with rank 0 as the server: gradients go up, the server steps with their mean, weights come down.

        worker   gradients --->            ---> weights
        rank 0               mean, step --'

    Called on all ranks, after backward. Afterwards all ranks hold the same weights, bit for bit. Only rank 0 may call
    optimizer.step(): the others' optimizers have no state. Only dist.send and dist.recv (or isend, irecv) may be used.

    Args:
        model: the same architecture on all ranks; every parameter has its .grad, and there are no buffers. Before the
            step the ranks' weights are equal.
        optimizer: of model's parameters.
        rank, num_ranks: rank 0 is the server, and has gradients of its own too.

    Hint: one flat message each way is simplest: torch.cat of p.grad.reshape(-1), and back with split and view_as. Weights
    are changed inside torch.no_grad(). Who sends to whom first, so that nobody waits for ever?
    """
    raise NotImplementedError("synchronous_step is yours to write: send gradients up, step on rank 0, send weights down")
