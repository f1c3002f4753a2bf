"""Random models for tests/programs.py: layers of many kinds, used in an order that is drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar

WIDTH, VOCAB, PLACES = 8, 13, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.drop(self.down(F.gelu(self.up(self.norm(h)))))


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.rnn(h)[0]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.inner(h, h, h, need_weights=False)[0]


class Scale(nn.Module):
    """Parameters without a module of torch, in a list too."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shifts = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(2))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale + self.shifts[0] - 0.5 * self.shifts[1]


class Statistics(nn.Module):
    """Buffers that change in training."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h.flatten(0, 1)).view_as(h)


class Two(nn.Module):
    """Returns a tuple in a dict."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"both": (self.first(h), self.second(h).tanh())}


KINDS = (Block, Block, Recurrent, Attention, Scale, Statistics, Two)
USES = ("call", "call", "call", "checkpoint", "reentrant", "weight", "bias", "slice", "penalty", "sometimes", "norm",
        "dropout", "no gradient", "late")  # fmt: skip
"""What a forward does, one use after the other."""


class FailsOnce(torch.autograd.Function):
    """A backward that fails once after `armed` was set."""

    armed = False

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if FailsOnce.armed:
            FailsOnce.armed = False
            raise ZeroDivisionError("on purpose")
        return grad


class Model(nn.Module):
    """Uses its layers and the parameters of its linear layers in an order drawn from the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(PLACES, WIDTH))
        self.layers = nn.ModuleList(draw.choice(KINDS)(draw.choice([0.0, 0.2])) for _ in range(draw.randint(2, 6)))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if draw.random() < 0.5:
            self.head.weight = self.embed.weight
        self.unused = nn.Linear(WIDTH, WIDTH) if draw.random() < 0.3 else None
        if draw.random() < 0.1:
            pstar.exclude(self.linears[0])
        self.uses = [(draw.choice(USES), draw.randint(0, 9)) for _ in range(draw.randint(2, 7))]
        frozen = draw.random() < 0.25
        for param in self.parameters():
            param.requires_grad_(not (frozen and draw.random() < 0.4))
        self.head.requires_grad_()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        h, kept, late = self.embed(tokens) + self.places[: tokens.shape[1]], None, []
        for use, number in self.uses:
            layer, linear = self.layers[number % len(self.layers)], self.linears[number % 3]
            if use == "slice":
                kept = linear.weight[number % WIDTH]
            elif use == "late":
                late.append(linear)
            else:
                h = self._use(use, h, layer, linear)
            h = torch.tanh(h if kept is None else h + kept)
        for linear in late:
            h = h + linear(h)
        logits = self.head(FailsOnce.apply(h)).float()
        if targets is None:
            return logits.logsumexp(-1).mean()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _use(self, use: str, h: torch.Tensor, layer: nn.Module, linear: nn.Linear) -> torch.Tensor:
        if use == "call" or (use == "sometimes" and int(self.step) % 3):
            return result_of(layer, h)
        if use in ("checkpoint", "reentrant"):
            return checkpoint(result_of, layer, h, use_reentrant=use == "reentrant")
        if use == "weight":
            return F.linear(h, linear.weight)
        if use == "bias":
            return h + linear.bias
        if use == "penalty":
            return h + 0.01 * sum(param.square().sum() for param in self.linears.parameters())
        if use == "norm":
            return h / (1 + float(linear.weight.detach().norm()))
        if use == "dropout":
            return h + F.dropout(linear(h), 0.3, self.training)
        if use == "no gradient":
            with torch.no_grad():
                return h + result_of(layer, h).mean()
        return h


def result_of(layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
    out = layer(h)
    return out["both"][0] * out["both"][1] if isinstance(out, dict) else out
