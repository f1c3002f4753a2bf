"""Exercise 06: ZeRO stage 1. Who owns what, and a step of which each rank takes a p-th. About 35 lines in all.

    pytest tests/exercises -k 06                  # all of it
    pytest tests/exercises -k "06 and pieces"     # one half: pieces, step

The grader works out pieces by hand and checks that they cover every element once. The sharded optimizer runs five steps of
AdamW on 2 and 3 real processes: weights must be those of one process on the whole batch, the same bits on all ranks, and no
rank may keep more optimizer state than its share.

When you have tried: in the folder zero, `Unit.cut_pieces` in units.py, `Sharded.wait` in sharded.py and `Zero012.publish` in
stages012.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import nn


def pieces_of(sizes: dict[str, int], rank: int, num_ranks: int) -> list[tuple[str, int, int]]:
    """The runs of parameters that a rank owns, when all of them lie after each other and are cut into p equal shards.

        | wte ........... | wpe .... | h.0 ... | 0 |      zeros at the end, until p divides the length
        |---- rank 0 ---|---- rank 1 ---|-- rank 2 --|    cut anywhere, also inside a parameter

    Args:
        sizes: name -> number of elements, in order.
        rank, num_ranks: which of the p shards.

    Returns:
        (name, first element of the flattened parameter, number of elements) in order; padding belongs to no parameter, and
        a parameter with no element in the shard is not there.

    Hint: where a parameter [begin, end) and a shard [first, last) overlap, it is [max(begin, first), min(end, last)).
    """
    raise NotImplementedError("pieces_of is yours to write: where does each parameter overlap this rank's shard?")


class ShardedOptimizer:
    """An optimizer whose state is cut over the ranks (ZeRO stage 1).

        backward | reduce-scatter: the mean gradients of MY shard | step of my shard | all-gather of the new weights

    Args:
        model: the same weights on all ranks; all parameters are float32 and have gradients.
        make_optimizer: from a list of nn.Parameters to an optimizer. Give it parameters of this rank's shard ALONE: then
            its state is a p-th as well. One flat parameter will do.

    Attributes:
        optimizer: what make_optimizer made. The grader looks at the size of its state.

    Hint: the length of the flat vector has to divide by p, so pad it. dist.reduce_scatter_tensor(own, flat) sums: divide
    by p before. dist.all_gather_into_tensor(flat, own) is the other half. Weights are changed in torch.no_grad().
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        raise NotImplementedError("ShardedOptimizer is yours to write: optimize a copy of this rank's shard")

    def step(self) -> None:
        """After backward, on all ranks. Afterwards all ranks hold the new weights, and all .grad of the model are None."""
        raise NotImplementedError("ShardedOptimizer.step is yours to write: reduce-scatter, step, all-gather")
