"""Models for tests of the engine: their forwards use parameters of other modules, in every way that people write.

Each takes (rows, 16) and returns a scalar mean over rows, so the mean over ranks equals the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pstar

WIDTH = 16
ROWS = 12


def rows(step: int, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
    """This rank's rows of a batch, (ROWS / num_ranks, WIDTH). The batch depends only on the step."""
    size = ROWS // num_ranks
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole[rank * size : (rank + 1) * size]


class Deep(nn.Module):
    """Five layers that use only their own parameters, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 24)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed((x[:, 0].abs() * 9).long()) + x
        for layer in self.layers:
            h = layer(h).tanh()
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x)).square().mean()


class TiedByLinear(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(x), self.embed.weight).square().mean() + super().forward(x)


class TiedByProduct(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) @ self.embed.weight.T).square().mean() + super().forward(x)


class NeverCalledHead(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(x), self.head.weight, self.head.bias).square().mean()


class TiledLoss(Deep):
    """Computes a loss over the embedding's rows by tiles, and is a mean over rows like the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        targets = (x[:, 1].abs() * 9).long()
        return pstar.tiled_loss(self.hidden(x), self.embed.weight, targets, tiles=2) + super().forward(x)


class SlicedTable(Deep):
    """A view of a table. It is taken before all layers run, and used after them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.embed.weight[3:19]
        return (self.hidden(x) @ places + places.sum(0)).square().mean() + super().forward(x)


class Penalty(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.01 * sum(param.square().sum() for param in self.parameters())


class AllNormsAtOnce(Deep):
    """One operation that reads every parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = torch._foreach_norm(list(self.parameters()))
        return super().forward(x) + 0.01 * torch.stack(norms).square().sum()


class OneVector(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.utils.parameters_to_vector(self.parameters()).square().mean()


class Block(nn.Module):
    """Computes with its own weight, then with the weights of other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.lenders: list[Block] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (x @ self.weight).tanh()
        for block in self.lenders:
            h = (h @ block.weight.T).tanh() + x
        return h


class AcrossBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        for block, lender in ((0, 3), (2, 0), (4, 2), (4, 1)):
            self.blocks[block].lenders.append(self.blocks[lender])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Checkpointed(AcrossBlocks):
    """Backward runs a block's forward once more, with the parameters that it borrows."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Lists(Deep):
    """A ParameterList and a ParameterDict. Nothing calls them; their parent module and a sibling read them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(3))
        self.named = nn.ParameterDict({"in": torch.rand(WIDTH), "out": torch.rand(WIDTH)})
        self.sibling = Reader(self.named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x * self.named["in"])
        for scale in self.scales:
            h = h * scale
        return self.sibling(h).square().mean()


class Reader(nn.Module):
    """A module without parameters and children. It gets a container inside a list, which does not register it."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.container = [container]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.container[0]["out"]


class Functional(Deep):
    """Calls one layer with another layer's parameters, and one layer with scaled copies of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        h = torch.func.functional_call(self.layers[0], dict(self.layers[3].named_parameters()), (h,))
        own = {name: param * 0.5 for name, param in self.layers[1].named_parameters()}
        return torch.func.functional_call(self.layers[1], own, (h,)).square().mean()


class Parametrized(Deep):
    """Weight norm and spectral norm. Their modules and the model read the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = parametrizations.weight_norm(self.layers[1])
        self.layers[2] = parametrizations.spectral_norm(self.layers[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) @ self.layers[1].weight).square().mean() + self.layers[2].weight.square().mean()


class Captured(Deep):
    """References to parameters that __init__ keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.head.weight, self.layers[1].bias]
        weight = self.layers[2].weight
        self.function = lambda h: h @ weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.function(self.hidden(x)) @ self.kept[0].T + self.kept[1].sum()).square().mean()


class NormsLogged(Deep):
    """Records the norms of all weights in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norms = [param.detach().norm().item() for param in self.parameters()]
        assert all(0 <= norm < 100 for norm in self.norms)
        with torch.no_grad():
            mean = self.layers[4].weight.mean() + self.layers[0].weight.data.std()
        return super().forward(x) * (1 + mean) + sum(self.norms) * 1e-3


class Product(torch.autograd.Function):
    """x @ w.T; saves the parameter for backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class KeptInContext(torch.autograd.Function):
    """The same, but keeps the parameter as an attribute, against the advice of torch."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad @ ctx.weight, grad.T @ ctx.x


class OwnFunctions(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Product.apply(self.hidden(x), self.layers[0].weight)
        h = KeptInContext.apply(h, self.layers[1].weight)
        return F.linear(h, self.layers[0].weight).square().mean() + self.head(h).square().mean()


class InputGradient(Deep):
    """A gradient penalty in forward: backward runs twice through a borrowed weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = F.linear(self.hidden(x), self.embed.weight).square().mean(1)
        grad, = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out + grad.square().sum(1)).mean()


class NowAndThen(Deep):
    """Borrows only in every other step, so the traces of the steps differ."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.hidden(x)
        if self.calls % 2:
            h = h @ self.layers[3].weight
        return self.head(h).square().mean()


class Attention(Deep):
    """Calls torch's attention function with the weights of other modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x).unsqueeze(1)
        stacked = torch.cat([self.layers[index].weight for index in range(3)])
        out, _ = F.multi_head_attention_forward(h[:1], h[:1], h[:1], WIDTH, 2, stacked, None, None, None, False, 0.0,
                                                self.layers[3].weight, self.layers[3].bias)
        return self.head(h + out * 0).square().mean() + out.mean() * 0 + stacked.square().mean()


class Mapped(Deep):
    """torch.vmap unpacks a tensor without a check of its class, so the model passes a clone of the parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = torch.vmap(lambda row: row.square().sum())(self.layers[1].weight.clone())
        return super().forward(x) + squares.sum() * 1e-3


class Frozen(Deep):
    """A borrowed table that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.hidden(x) @ self.embed.weight.T).square().mean()


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def penalty_outside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The training loop adds a penalty to the loss."""
    return model(x) + 0.01 * sum(param.square().sum() for param in model.parameters())


def two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + model(x.flip(1))


# Code that people write -> (model, function from the model and this rank's rows to the loss).
PATTERNS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], torch.Tensor]]] = {
    "F.linear(h, self.embed.weight)": (TiedByLinear, whole),
    "h @ self.embed.weight.T": (TiedByProduct, whole),
    "pstar.tiled_loss(h, self.embed.weight, targets)": (TiledLoss, whole),
    "F.linear(h, self.head.weight), head never called": (NeverCalledHead, whole),
    "self.table.weight[3:19]": (SlicedTable, whole),
    "a penalty over self.parameters() in forward": (Penalty, whole),
    "a penalty over model.parameters() in the loop": (Deep, penalty_outside),
    "torch._foreach_norm(self.parameters())": (AllNormsAtOnce, whole),
    "parameters_to_vector(self.parameters())": (OneVector, whole),
    "another block's weight": (AcrossBlocks, whole),
    "another block's weight, checkpointed": (Checkpointed, whole),
    "ParameterList and ParameterDict": (Lists, whole),
    "torch.func.functional_call": (Functional, whole),
    "weight norm and spectral norm": (Parametrized, whole),
    "a reference that the constructor keeps": (Captured, whole),
    "norms logged in forward": (NormsLogged, whole),
    "an autograd.Function that saves a parameter": (OwnFunctions, whole),
    "a gradient penalty": (InputGradient, whole),
    "a borrow in every other step": (NowAndThen, whole),
    "multi_head_attention_forward": (Attention, whole),
    "torch.vmap, given a clone": (Mapped, whole),
    "a frozen table": (Frozen, whole),
    "two forwards in a step": (TiedByLinear, two_forwards),
}

# In this pattern torch multiplies buffers with a weight. The engine leaves buffers in fp32, so it cannot run in 16 bit.
FLOATING_BUFFERS = "weight norm and spectral norm"
