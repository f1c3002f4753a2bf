"""Tensor parallel: every matrix of a layer cut over t ranks, two all-reduces forward and two backward a block.

    Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, section 4.2, for sequence parallel.

    x (B, T, C), the same on all ranks          the columns of A and the rows of B are cut:     A = [A0 A1]   B = [B0]
      |                                                                                                           [B1]
      f        forward: nothing;    backward: all-reduce
      |
    [x A0 | x A1]                               each rank has its columns, its heads, its part of the hidden layer:
      |                                         GELU and attention act on columns, so nothing need be sent here
    [x A0 B0 + x A1 B1]                         each rank has a summand of the whole result
      |
      g        forward: all-reduce; backward: nothing        f and g are each other's conjugates
      |
    y (B, T, C), the same on all ranks

With sequence parallel what lies between g and the next f (norm, dropout, residual) is done on T / t positions a rank:
g becomes a reduce-scatter, f an all-gather. The bytes are the same, for a ring all-reduce is just these two.
Parameters that are not cut (norms, the biases after g, positions) then see a part of the positions: their gradients are
summed over the ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from places import Place
from torch import Tensor, nn

from gpt2_chinese.data.batches import IGNORED


class TensorGroup:
    """The t ranks that share each layer, seen from one of them.

    Attributes:
        group, rank, num_ranks: of torch.distributed.
        sequence: with sequence parallel.
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
        """(B, T, ...), a summand on each rank -> (B, T/t, ...), the sum."""
        parts = torch.stack(x.chunk(self.num_ranks, dim=1))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=self.group)
        self.note(name, x.nbytes, rounds=1)
        return own


class _F(torch.autograd.Function):
    """Before a cut matrix: the same input for all; its gradients, one from each rank, are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return ranks.gather(x, name) if ranks.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        act = ctx.ranks.scatter if ctx.ranks.sequence else ctx.ranks.all_reduce
        return act(grad, ctx.name), None, None


class _G(torch.autograd.Function):
    """After a cut matrix: the summands of all ranks become one; its gradient is for each summand the same."""

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
        linear: with the weights of the whole layer; this rank takes its slice.
        ranks: who shares it.
        name: under which the bytes of f are counted.
        num_blocks: equal blocks side by side in the columns, each of them cut: 3 for q, k, v.
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
    """A Conv1D, weight (in, out), of which this rank has in/t rows; the bias is whole and added once, after the sum."""

    def __init__(self, linear: nn.Module, ranks: TensorGroup, name: str) -> None:
        super().__init__()
        self.ranks, self.name = ranks, name
        self.weight, self.bias = _cut(linear.weight, 0, ranks), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in/t) -> (B, T, out), with sequence parallel (B, T/t, out)"""
        return _G.apply(F.linear(x, self.weight.t()), self.ranks, self.name) + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has V/t rows; ids of other ranks' rows give zeros, and g sums."""

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
    """The embedding of positions, of which this rank's activations have T/t; the weight is whole on each rank."""

    def __init__(self, embedding: nn.Embedding, ranks: TensorGroup) -> None:
        super().__init__()
        self.weight, self.ranks = embedding.weight, ranks

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) int64 -> (T/t, C)"""
        return F.embedding(positions.chunk(self.ranks.num_ranks)[self.ranks.rank], self.weight)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax of the target, of logits whose columns are cut: three numbers a token travel instead of V logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: TensorGroup) -> Tensor:
        first, width = ranks.rank * logits.shape[-1], logits.shape[-1]
        largest = ranks.all_reduce(logits.max(-1).values, "loss", dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        own = targets - first
        elsewhere = (own < 0) | (own >= width)
        own = own.masked_fill(elsewhere, 0)
        at_target = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exp = shifted.exp_()
        both = ranks.all_reduce(torch.stack([exp.sum(-1), at_target]), "loss")
        ctx.save_for_backward(exp.div_(both[0].unsqueeze(-1)), own, elsewhere)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, elsewhere = ctx.saved_tensors
        hit = torch.ones_like(grad).masked_fill(elsewhere, 0.0).unsqueeze(-1)
        return softmax.scatter_add(-1, own.unsqueeze(-1), -hit) * grad.unsqueeze(-1), None, None


class VocabularyParallelLoss:
    """Takes the place of next_token_loss where each rank has the logits of its part of the vocabulary."""

    def __init__(self, ranks: TensorGroup) -> None:
        self.ranks = ranks

    def __call__(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """(B, T, V/t) and (B, T) -> nats, mean or sum over the targets that count, float32, the same on all ranks."""
        losses = _CrossEntropy.apply(logits.float().flatten(0, 1), targets.flatten(), self.ranks)
        counted = targets.flatten() != IGNORED
        total = losses.masked_fill(~counted, 0.0).sum()
        return total / counted.sum() if reduction == "mean" else total

    def guesses(self, logits: Tensor) -> Tensor:
        """(B, T, V/t) -> (B, T) int64, the most likely entry of the whole vocabulary, the same on all ranks."""
        best, place = logits.float().max(-1)
        highest = self.ranks.all_reduce(best, "loss", dist.ReduceOp.MAX)
        place = (place + self.ranks.rank * logits.shape[-1]).masked_fill(best < highest, torch.iinfo(torch.int64).max)
        return self.ranks.all_reduce(place, "loss", dist.ReduceOp.MIN)


# ---- applied to the model ---------------------------------------------------------------------------------------------


def apply_tensor_parallel(model: nn.Module, ranks: TensorGroup) -> None:
    """Cuts a GPT2LMHeadModel, which is whole and the same on all ranks, in place. Call it before the optimizer is made.

    Heads, hidden width and vocabulary must divide by t; with sequence parallel also T.
    """
    body = model.transformer
    for block in body.h:
        attention, mlp = block.attn, block.mlp
        attention.num_heads //= ranks.num_ranks
        attention.c_attn = ColumnParallelLinear(attention.c_attn, ranks, "attention", num_blocks=3)
        attention.c_proj = RowParallelLinear(attention.c_proj, ranks, "attention")
        mlp.c_fc = ColumnParallelLinear(mlp.c_fc, ranks, "mlp")
        mlp.c_proj = RowParallelLinear(mlp.c_proj, ranks, "mlp")
        different_dropout(attention.c_attn, attention.c_proj, attention.dropout, ranks)
    body.wte = VocabularyParallelEmbedding(body.wte, ranks)
    model.lm_head = VocabularyParallelHead(body.wte.weight, ranks)
    model.loss = VocabularyParallelLoss(ranks)
    if ranks.sequence:
        body.wpe = SequenceParallelPositions(body.wpe, ranks)
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            different_dropout(dropout, dropout, dropout.p, ranks, around=True)


def _cut(tensor: Tensor, dim: int, ranks: TensorGroup, num_blocks: int = 1) -> nn.Parameter:
    """This rank's slice of a whole tensor, and the note of where in the whole it lies (places.py)."""
    place = Place.cut(tensor.shape, dim, ranks.rank, ranks.num_ranks, num_blocks)
    parameter = nn.Parameter(place.take(tensor.detach()).clone())
    parameter.place = place
    return parameter


def different_dropout(first: nn.Module, last: nn.Module, p: float, ranks: TensorGroup, around: bool = False) -> None:
    """Between `first` and `last` each rank draws random numbers of its own; before and after, all draw the same.

    Heads and sequence parts differ by rank, so their dropout must; what is the same on all ranks must stay the same. The
    own seed comes out of the common state, so that a recomputation, which starts from the same state, draws the same again.

    Args:
        first, last: enter after the one's forward and leave before the other's; with `around`, before and after one module.
        p: probability; nothing is done at 0.
        ranks: who shares the layer.
    """
    if not p:
        return
    kept: list[Tensor] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if module.training:
            device = next((a.device for a in _[0] if isinstance(a, Tensor)), torch.device("cpu"))
            seed = int(torch.randint(2**62, (), device=device))
            kept.append(_state(device))
            kept.append(device)
            torch.manual_seed(seed + 1 + ranks.rank)

    def leave(module: nn.Module, *_: Any) -> None:
        if kept:
            device, state = kept.pop(), kept.pop()
            torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)

    if around:
        first.register_forward_pre_hook(enter)
        first.register_forward_hook(leave)
    else:
        first.register_forward_hook(enter)
        last.register_forward_pre_hook(leave)


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
