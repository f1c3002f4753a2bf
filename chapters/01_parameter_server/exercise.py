"""Exercise 01: a parameter server. Three functions, about 25 lines in all.

    bash chapters/01_parameter_server/exercise.sh           # all of it
    bash chapters/01_parameter_server/exercise.sh -k mean   # one function: mean, wait, step

The grader compares means and waits with cases worked out by hand. Then it starts 2 and 3 real processes with different
gradients. The weights of each must equal those of one process that stepped with the mean gradient.

When you have tried: compare with `mean_of`, `must_wait`, ParameterServer's `push` and `pull` in server.py in this folder.
"""

from __future__ import annotations

import torch  # noqa: F401  (yours to use)
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import Tensor, nn


def mean_of(vectors: list[Tensor]) -> Tensor:
    """The mean of the server's own gradient and of those that have arrived from workers.

    Divide BEFORE you add: in float32 two gradients of 3e38 have a mean, but their sum overflows. Do not change the vectors.

    Args:
        vectors: at least one, each (n,), float32.

    Returns:
        a new tensor, (n,).
    """
    raise NotImplementedError("mean_of is yours to write: each vector divided by their number, then added up")


def must_wait(step: int, works_on: int, bound: int | None) -> bool:
    """Whether the server must wait, before it takes `step`, for the gradient of a worker that is still computing.

    A gradient's staleness is the number of steps that the server has taken since the weights it was computed with. The
    weights after step 7 are version 7. If the server takes step 8 WITHOUT the worker, it can use the worker's gradient in
    step 9 at the earliest. It is then one step staler than in step 8. No gradient may ever be staler than the bound.

    Args:
        step: the server's next step, counted from 1; the server's weights are version `step - 1`.
        works_on: version of the weights that the worker computes with.
        bound: the largest staleness allowed; None is the synchronous mode, where the server always waits.

    Hint: with a bound of 0 the answer is always yes, as in the synchronous mode.
    """
    raise NotImplementedError("must_wait is yours to write: how stale is the gradient now, and how stale may it be?")


def synchronous_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> None:
    """One step with rank 0 as the server: workers send gradients, rank 0 steps with the mean and sends the weights.

        worker   gradients --->            ---> weights
        rank 0               mean, step --'

    Called on all ranks, after backward. Afterwards all ranks hold the same weights, bit for bit. Only rank 0 may call
    optimizer.step(): the others' optimizers have no state. Use only dist.send and dist.recv (or isend, irecv).

    Args:
        model: the same architecture on all ranks; every parameter has its .grad, and there are no buffers. Before the
            step all ranks have equal weights.
        optimizer: updates model's parameters.
        rank, num_ranks: rank 0 is the server, and has computed gradients too.

    Hint: one flat message in each direction is simplest: torch.cat of p.grad.reshape(-1), and back with split and view_as.
    Change weights inside torch.no_grad(). Which rank must send first, so that no rank waits for ever?
    """
    raise NotImplementedError("synchronous_step is yours to write: send gradients up, step on rank 0, send weights down")
