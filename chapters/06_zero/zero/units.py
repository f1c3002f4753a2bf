"""What is gathered, reduced and freed at a time: the parameters of one block, or those that lie in no block.

    full    | ln_1 | attn.c_attn.weight ......... | ... | mlp.c_proj.bias | 0 |    padded until p divides it
            |------ rank 0 ------|------ rank 1 ------|------ rank 2 -----|        pieces cut anywhere, all of one length

The parameters of the model are views of `full`, so that whoever fills it fills them. What a rank owns are runs of
parameters, here called pieces; the optimizer works on an fp32 copy of them, the masters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """A run of a parameter that this rank owns.

    Attributes:
        name: of the parameter in the model.
        shape: of the whole parameter.
        start: first of its flattened elements that belongs to the piece.
        offset: where that one lies in the rank's shard of the unit.
        numel: how many.
        master: fp32, (numel, 1) of a matrix and (numel,) of a vector: so a rule for matrices, such as weight decay
            for what has two dimensions, is right for their pieces too.
    """

    name: str
    shape: torch.Size
    start: int
    offset: int
    numel: int
    master: nn.Parameter


class Unit:
    """Some parameters in one flat tensor, and this rank's shard of it.

    Args:
        module: the block, None for what lies in no block.
        parameters: name to parameter, on the device; they become views of `full`.
        weights: their fp32 values after each other, padded until the number of shards divides their number.
        dtype: to compute in.
        shard: (which, of how many).

    Attributes:
        full: (padded,) in `dtype`.
        own: this rank's shard in `dtype`, a view of `full`.
        master: the same in fp32: `own` itself in fp32.
        pieces: what the optimizer works on, views of `master`.
        grad: the mean gradient of `own`, or None.
    """

    def __init__(self, module: nn.Module | None, parameters: dict[str, nn.Parameter], weights: Tensor, dtype: torch.dtype,
                 shard: tuple[int, int]) -> None:  # fmt: skip
        self.module, self.parameters = module, parameters
        self.numel = sum(p.numel() for p in parameters.values())
        self.full = weights.to(dtype)
        size = weights.numel() // shard[1]
        self.first = size * shard[0]
        self.own = self.full[self.first :][:size]
        self.master = self.own if dtype == torch.float32 else weights[self.first :][:size].clone()
        self.pieces: list[Piece] = []
        self.grad: Tensor | None = None
        begin = 0
        for parameter in parameters.values():
            parameter.data = self.full[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
        self.cut_pieces()

    def cut_pieces(self) -> None:
        """Makes the pieces anew, as views of `master`."""
        self.pieces, begin, size = [], 0, self.master.numel()
        for name, parameter in self.parameters.items():
            start, end = max(begin, self.first), min(begin + parameter.numel(), self.first + size)
            if start < end:
                run = self.master[start - self.first : end - self.first]
                master = nn.Parameter(run.view(-1, 1) if parameter.dim() >= 2 else run, parameter.requires_grad)
                shape = parameter.shape
                self.pieces.append(Piece(name, shape, start - begin, start - self.first, end - start, master))
            begin += parameter.numel()

    def take_gradients(self) -> Tensor:
        """The gradients of the parameters after each other, (padded,), 0 where there are none; the parameters' own go."""
        flat, begin = torch.zeros_like(self.full, memory_format=torch.contiguous_format), 0
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                flat[begin : begin + parameter.numel()] = parameter.grad.reshape(-1)
                parameter.grad = None
            begin += parameter.numel()
        return flat


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the outermost nn.ModuleLists by name: the layers that a forward pass goes through one by one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(other + ".") for other in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found.update({f"{name}.{number}": block for number, block in enumerate(module)})
    return found


def groups_of(model: nn.Module) -> list[tuple[nn.Module | None, dict[str, nn.Parameter]]]:
    """[(block, its parameters by name)], in the order of forward, and first (None, all others).

    A parameter that is used in two blocks, or in a block and outside, must be there in both: it belongs to the others.
    """
    blocks = blocks_of(model)
    places: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(block + ".")), "")
        places.setdefault(parameter, set()).add(block)
    groups: dict[str, dict[str, nn.Parameter]] = {"": {}, **{block: {} for block in blocks}}
    for name, parameter in model.named_parameters():
        groups[min(places[parameter]) if len(places[parameter]) == 1 else ""][name] = parameter
    return [(blocks.get(block), parameters) for block, parameters in groups.items() if parameters]


def flatten(parameters: dict[str, nn.Parameter], num_shards: int) -> Tensor:
    """The values of parameters after each other in fp32, and zeros until `num_shards` divides their number."""
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters.values()])
    return torch.nn.functional.pad(flat, (0, -flat.numel() % num_shards))
