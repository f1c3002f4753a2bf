"""Exercise 05: the order of a pipeline's stage, and a layer cut over ranks. About 35 lines in all.

    pytest tests/exercises -k 05                  # all of it
    pytest tests/exercises -k "05 and pipeline"   # one half: pipeline, tensor

The grader plays your orders through a simulation of all ranks (no deadlock, the bubble (p - 1) / (m + p - 1), no more
micro-batches alive than promised). Your layers run on 2 and 4 real processes: output, the gradient of the input and
every slice's gradient must be those of the whole layers.

When you have tried: `orders` in schedules.py; _F, _G, ColumnParallelLinear and RowParallelLinear in tensor.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import Tensor, nn


def one_f_one_b(rank: int, num_ranks: int, num_micros: int) -> list[tuple[str, int]]:
    """What a rank of a 1F1B pipeline computes, in order: ("F", n) is micro-batch n forward, ("B", n) backward.

    First rank r takes p - r micro-batches forward: that is how many fit between it and the end of the pipeline, there and
    back. Then it does one backward and one forward in turns, while there are forwards left; then the other backwards. So
    it never keeps the activations of more than p - r micro-batches, however many there are. p = 2, m = 3:

        rank 0   F0 F1 .  B0 F2 B1 .  B2
        rank 1   .  F0 B0 F1 B1 F2 B2 .

    Args:
        rank: r, 0 is the first stage.
        num_ranks: p.
        num_micros: m, may be smaller than p.
    """
    raise NotImplementedError("one_f_one_b is yours to write: forwards, then in turns, then the other backwards")


class CopyToAll(torch.autograd.Function):
    """Before a layer whose columns are cut. Forward: nothing. Backward: what is the gradient of an input of all ranks?"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """(B, T, C), the same on all ranks -> the same."""
        raise NotImplementedError("CopyToAll.forward is yours to write: the same values; x.view_as(x) makes autograd see it")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: (B, T, C), what THIS rank's columns say of x. All ranks used x."""
        raise NotImplementedError("CopyToAll.backward is yours to write: one collective")


class SumOfAll(torch.autograd.Function):
    """After a layer whose rows are cut. Forward: the sum over the ranks. Backward: the gradient of each summand of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """(B, T, C), a summand on each rank -> the sum, the same on all ranks. x itself stays as it is."""
        raise NotImplementedError("SumOfAll.forward is yours to write: one collective, on a copy")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: (B, T, C), of the sum; the same on all ranks."""
        raise NotImplementedError("SumOfAll.backward is yours to write: no collective")


class ColumnParallelLinear(nn.Module):
    """x W + b, of which this rank computes a t-th of the columns: (B, T, in) -> (B, T, out/t).

    Args:
        whole: has weight (in, out) and bias (out,), the same on all ranks; t divides out.
        rank, num_ranks: this rank keeps columns [rank * out/t, (rank + 1) * out/t) of both, as nn.Parameters of its own.

    Attributes:
        weight: (in, out/t).
        bias: (out/t,).
    """

    def __init__(self, whole: nn.Module, rank: int, num_ranks: int) -> None:
        super().__init__()
        raise NotImplementedError("ColumnParallelLinear is yours to write: keep a slice of the weight and of the bias")

    def forward(self, x: Tensor) -> Tensor:
        """Hint: a Function is called by CopyToAll.apply(x)."""
        raise NotImplementedError("ColumnParallelLinear.forward is yours to write: copy, multiply, add")


class RowParallelLinear(nn.Module):
    """x W + b, where this rank has a t-th of the columns of x and of the rows of W: (B, T, in/t) -> (B, T, out).

    Args:
        whole: has weight (in, out) and bias (out,), the same on all ranks; t divides in.
        rank, num_ranks: this rank keeps rows [rank * in/t, (rank + 1) * in/t) of the weight.

    Attributes:
        weight: (in/t, out).
        bias: (out,), whole on each rank. It must be added once, not t times.
    """

    def __init__(self, whole: nn.Module, rank: int, num_ranks: int) -> None:
        super().__init__()
        raise NotImplementedError("RowParallelLinear is yours to write: keep a slice of the weight and the whole bias")

    def forward(self, x: Tensor) -> Tensor:
        """The same result on all ranks."""
        raise NotImplementedError("RowParallelLinear.forward is yours to write: multiply, sum over the ranks, add")
