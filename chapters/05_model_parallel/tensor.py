"""Tensor parallel: cuts every matrix of a layer over t ranks; a block needs two all-reduces forward and two backward.

    Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, section 4.2, for sequence parallel.

    x (B, T, C), the same on all ranks          the columns of A and the rows of B are cut:     A = [A0 A1]   B = [B0]
      |                                                                                                           [B1]
      f        forward: nothing;    backward: all-reduce
      |
    [x A0 | x A1]                               each rank has some columns, heads and hidden units:
      |                                         GELU and attention act on columns: nothing is sent
    [x A0 B0 + x A1 B1]                         each rank has one summand of the result
      |
      g        forward: all-reduce; backward: nothing        f and g are each other's conjugates
      |
    y (B, T, C), the same on all ranks

With sequence parallel, each rank computes norm, dropout and residual, between g and the next f, on T / t positions: g
becomes a reduce-scatter, f an all-gather. The bytes are the same, because a ring all-reduce consists of these two.
Parameters that are not cut (norms, the biases after g, positions) then get gradients from some positions only, so their
gradients are summed over the ranks.

This file has f, g and the layers. tensor_loss.py has the loss over a cut vocabulary. tensor_dropout.py makes the random
numbers of ranks that share a layer. tensor_apply.py changes the model.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from places import Place
from torch import Tensor, nn

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13


class TensorGroup:
    """The t ranks that share each layer. Each rank has one such object.

    Attributes:
        group, rank, num_ranks: the process group, this rank in it, and its size t.
        sequence: whether sequence parallel is on.
        sent: bytes that this rank has sent for each kind of layer, counted as a ring sends them.
    """

    def __init__(self, group: Any, sequence: bool = False) -> None:
        self.group, self.sequence = group, sequence
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.sent: Counter[str] = Counter()

    def note(self, name: str, num_bytes: int, rounds: int) -> None:
        """Counts a collective on a whole tensor of `num_bytes`: 1 round to gather or to scatter, 2 to all-reduce."""
        self.sent[name] += rounds * num_bytes * (self.num_ranks - 1) // self.num_ranks

    def all_reduce(self, x: Tensor, name: str, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A new tensor, summed over the ranks."""
        x = x.contiguous().clone()
        dist.all_reduce(x, op=op, group=self.group)
        self.note(name, x.nbytes, rounds=2)
        return x

    def gather(self, x: Tensor, name: str) -> Tensor:
        """(B, T/t, ...) -> (B, T, ...)"""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.num_ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        self.note(name, x.nbytes * self.num_ranks, rounds=1)
        return torch.cat(parts, dim=1)

    def scatter(self, x: Tensor, name: str) -> Tensor:
        """(B, T, ...), a partial sum on each rank -> (B, T/t, ...), the sum."""
        parts = torch.stack(x.chunk(self.num_ranks, dim=1))
        own = torch.empty_like(parts[0])
        reduce_scatter(own, parts.flatten(0, 1), group=self.group)
        self.note(name, x.nbytes, rounds=1)
        return own


class _F(torch.autograd.Function):
    """f, before a cut matrix: all ranks get the same input; backward sums its gradients, one from each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return ranks.gather(x, name) if ranks.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        act = ctx.ranks.scatter if ctx.ranks.sequence else ctx.ranks.all_reduce
        return act(grad, ctx.name), None, None


class _G(torch.autograd.Function):
    """g, after a cut matrix: forward sums the ranks' results; each summand gets the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return ranks.scatter(x, name) if ranks.sequence else ranks.all_reduce(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.gather(grad, ctx.name) if ctx.ranks.sequence else grad, None, None


# ---- the layers -------------------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """A Conv1D, weight (in, out), of which this rank has out/t columns; every rank needs the whole input.

    Args:
        linear: has the weights of the whole layer; this rank copies its slice.
        ranks: the ranks that share the layer.
        name: the key under which the bytes of f are counted.
        num_blocks: number of equal blocks of columns, each of which is cut: 3 for q, k, v.
    """

    def __init__(self, linear: nn.Module, ranks: TensorGroup, name: str, num_blocks: int = 1) -> None:
        super().__init__()
        self.ranks, self.name = ranks, name
        self.weight = _cut(linear.weight, 1, ranks, num_blocks)
        self.bias = _cut(linear.bias, 0, ranks, num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in), with sequence parallel (B, T/t, in) -> (B, T, out/t)"""
        return F.linear(_F.apply(x, self.ranks, self.name), self.weight.t(), self.bias)


class RowParallelLinear(nn.Module):
    """A Conv1D, weight (in, out), of which this rank has in/t rows. The bias is whole; it is added once, after the sum."""

    def __init__(self, linear: nn.Module, ranks: TensorGroup, name: str) -> None:
        super().__init__()
        self.ranks, self.name = ranks, name
        self.weight, self.bias = _cut(linear.weight, 0, ranks), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in/t) -> (B, T, out), with sequence parallel (B, T/t, out)"""
        return _G.apply(F.linear(x, self.weight.t()), self.ranks, self.name) + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has V/t rows; ids of other ranks' rows give zeros, and g sums over the ranks."""

    def __init__(self, embedding: nn.Embedding, ranks: TensorGroup) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = _cut(embedding.weight, 0, ranks)
        self.first = ranks.rank * self.weight.shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C), with sequence parallel (B, T/t, C)"""
        own = ids - self.first
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        x = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return _G.apply(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.ranks, "embedding")


class VocabularyParallelHead(nn.Module):
    """The tied head: logits of this rank's V/t entries."""

    def __init__(self, weight: nn.Parameter, ranks: TensorGroup) -> None:
        super().__init__()
        self.weight, self.ranks = weight, ranks

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C), with sequence parallel (B, T/t, C) -> (B, T, V/t)"""
        return F.linear(_F.apply(x, self.ranks, "head"), self.weight)


class SequenceParallelPositions(nn.Module):
    """The embedding of positions: a rank looks up only its T/t positions, but has the whole weight."""

    def __init__(self, embedding: nn.Embedding, ranks: TensorGroup) -> None:
        super().__init__()
        self.weight, self.ranks = embedding.weight, ranks

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) or (B, T) int64 -> (T/t, C) or (B, T/t, C)"""
        return F.embedding(positions.chunk(self.ranks.num_ranks, dim=-1)[self.ranks.rank], self.weight)


def _cut(tensor: Tensor, dim: int, ranks: TensorGroup, num_blocks: int = 1) -> nn.Parameter:
    """This rank's slice of a whole tensor; its `place` is the position in the whole tensor (places.py)."""
    place = Place.cut(tensor.shape, dim, ranks.rank, ranks.num_ranks, num_blocks)
    parameter = nn.Parameter(place.take(tensor.detach()).clone())
    parameter.place = place
    return parameter
