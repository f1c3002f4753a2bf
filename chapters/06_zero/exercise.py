"""Exercise 06: ZeRO stage 1. Which rank owns which elements, and a step in which each rank updates a p-th. About 35 lines.

    bash chapters/06_zero/exercise.sh             # all of it
    bash chapters/06_zero/exercise.sh -k pieces   # one half: pieces, step

The grader compares the pieces with known answers and checks that they cover every element once. It runs five AdamW steps on
2 and 3 real processes. Weights must match one process on the whole batch and have the same bits on all ranks. No rank may
keep more optimizer state than its share.

When you have tried: compare in zero/ with `Unit.cut_pieces` in units.py, `wait` in sharded.py, `publish` in stages012.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import nn


def pieces_of(sizes: dict[str, int], rank: int, num_ranks: int) -> list[tuple[str, int, int]]:
    """The runs of parameters that a rank owns: parameters are concatenated, and the result is cut into p equal shards.

        | wte ........... | wpe .... | h.0 ... | 0 |      zeros at the end, until p divides the length
        |---- rank 0 ---|---- rank 1 ---|-- rank 2 --|    a cut can fall inside a parameter

    Args:
        sizes: name -> number of elements, in order.
        rank, num_ranks: which of the p shards.

    Returns:
        (name, first element of the flattened parameter, number of elements) in order. Leave out the padding, and parameters
        without an element in the shard.

    Hint: a parameter [begin, end) and a shard [first, last) overlap in [max(begin, first), min(end, last)).
    """
    raise NotImplementedError("pieces_of is yours to write: where does each parameter overlap this rank's shard?")


class ShardedOptimizer:
    """An optimizer whose state is sharded over the ranks (ZeRO stage 1).

        backward | reduce-scatter: the mean gradients of MY shard | step of my shard | all-gather of the new weights

    Args:
        model: has the same weights on all ranks; all parameters are float32 and have gradients.
        make_optimizer: makes an optimizer from a list of nn.Parameters. Pass ONLY this rank's shard, so that the
            optimizer's state is a p-th as well. One flat parameter is enough.

    Attributes:
        optimizer: the result of make_optimizer. The grader checks the size of its state.

    Hint: pad the flat vector so that p divides it. dist.reduce_scatter_single(own, flat) sums, so divide by p first. Then
    dist.all_gather_single(flat, own), inside torch.no_grad(). (torch < 2.13: reduce_scatter_tensor, all_gather_into_tensor)
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        raise NotImplementedError("ShardedOptimizer is yours to write: optimize a copy of this rank's shard")

    def step(self) -> None:
        """Call after backward on all ranks. Then all ranks hold the new weights, and every .grad of the model is None."""
        raise NotImplementedError("ShardedOptimizer.step is yours to write: reduce-scatter, step, all-gather")
