"""Exercise 05: the order of work of a pipeline rank, and a linear layer split over ranks. About 35 lines in all.

    bash chapters/05_model_parallel/exercise.sh               # all of it
    bash chapters/05_model_parallel/exercise.sh -k pipeline   # one half: pipeline, tensor

The grader simulates your orders on all ranks: no deadlock, a bubble of (p - 1) / (m + p - 1), and at most p - r
micro-batches alive on rank r. It runs your layers on 2 and 4 real processes. Their output, the gradient of the input and
every slice's gradient must equal those of the whole layers.

When you have tried: compare with `orders` in schedules.py; _F, _G, ColumnParallelLinear, RowParallelLinear in tensor.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import Tensor, nn


def one_f_one_b(rank: int, num_ranks: int, num_micros: int) -> list[tuple[str, int]]:
    """The work of a rank in a 1F1B pipeline, in order: ("F", n) is micro-batch n forward, ("B", n) backward.

    First rank r runs p - r forwards: then every rank from r to the last one has a micro-batch. Then it runs one
    backward and one forward in turns, until no forward is left; then the remaining backwards. So it never keeps the
    activations of more than p - r micro-batches, for any m. p = 2, m = 3:

        rank 0   F0 F1 .  B0 F2 B1 .  B2
        rank 1   .  F0 B0 F1 B1 F2 B2 .

    Args:
        rank: r, 0 is the first stage.
        num_ranks: p.
        num_micros: m, may be smaller than p.
    """
    raise NotImplementedError("one_f_one_b is yours to write: forwards, then backward and forward in turns, then backwards")


class CopyToAll(torch.autograd.Function):
    """Before a column-parallel layer. Forward: identity. Backward: what is the gradient of an input that all ranks use?"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """(B, T, C), the same on all ranks -> the same."""
        raise NotImplementedError("CopyToAll.forward is yours to write: the same values; autograd needs x.view_as(x)")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: (B, T, C), the gradient of x through THIS rank's columns only. All ranks used x."""
        raise NotImplementedError("CopyToAll.backward is yours to write: one collective")


class SumOfAll(torch.autograd.Function):
    """After a row-parallel layer. Forward: the sum over the ranks. Backward: the gradient of each summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """(B, T, C), a partial sum on each rank -> the sum, the same on all ranks. Do not change x."""
        raise NotImplementedError("SumOfAll.forward is yours to write: one collective, on a copy")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: (B, T, C), the gradient of the sum; the same on all ranks."""
        raise NotImplementedError("SumOfAll.backward is yours to write: no collective")


class ColumnParallelLinear(nn.Module):
    """x W + b, where this rank computes out/t of the columns (t ranks): (B, T, in) -> (B, T, out/t).

    Args:
        whole: has weight (in, out) and bias (out,), the same on all ranks; t divides out.
        rank, num_ranks: this rank keeps columns [rank * out/t, (rank + 1) * out/t) of both, as new nn.Parameters.

    Attributes:
        weight: (in, out/t).
        bias: (out/t,).
    """

    def __init__(self, whole: nn.Module, rank: int, num_ranks: int) -> None:
        super().__init__()
        raise NotImplementedError("ColumnParallelLinear is yours to write: keep a slice of the weight and of the bias")

    def forward(self, x: Tensor) -> Tensor:
        """Hint: call a Function by CopyToAll.apply(x)."""
        raise NotImplementedError("ColumnParallelLinear.forward is yours to write: copy, multiply, add")


class RowParallelLinear(nn.Module):
    """x W + b, where this rank has in/t of the columns of x and rows of W (t ranks): (B, T, in/t) -> (B, T, out).

    Args:
        whole: has weight (in, out) and bias (out,), the same on all ranks; t divides in.
        rank, num_ranks: this rank keeps rows [rank * in/t, (rank + 1) * in/t) of the weight.

    Attributes:
        weight: (in/t, out).
        bias: (out,), whole on each rank. Add it once, not t times.
    """

    def __init__(self, whole: nn.Module, rank: int, num_ranks: int) -> None:
        super().__init__()
        raise NotImplementedError("RowParallelLinear is yours to write: keep a slice of the weight and the whole bias")

    def forward(self, x: Tensor) -> Tensor:
        """Returns the same result on all ranks."""
        raise NotImplementedError("RowParallelLinear.forward is yours to write: multiply, sum over the ranks, add")
