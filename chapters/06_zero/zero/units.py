"""A unit is gathered, reduced and freed at once: the parameters of one block, or all parameters outside the blocks.

    full    | ln_1 | attn.c_attn.weight ......... | ... | mlp.c_proj.bias | 0 |    padded until p divides it
            |------ rank 0 ------|------ rank 1 ------|------ rank 2 -----|        pieces cut anywhere, all of one length

The parameters of the model are views of `full`, so filling `full` fills them. A rank owns runs of parameters, here called
pieces. The optimizer updates the pieces in fp32, the masters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """A run of a parameter that this rank owns.

    Attributes:
        name: the parameter's name in the model.
        shape: the shape of the whole parameter.
        start: index of the piece's first element in the flattened parameter.
        offset: index of that element in the rank's shard of the unit.
        numel: number of elements.
        master: fp32, (numel, 1) for a matrix and (numel,) for a vector. So rules for tensors of two dimensions, such as
            weight decay, also apply to pieces of matrices.
    """

    name: str
    shape: torch.Size
    start: int
    offset: int
    numel: int
    master: nn.Parameter


class Unit:
    """Some parameters in one flat tensor, with this rank's shard of it.

    Args:
        module: the block, or None for the parameters outside the blocks.
        parameters: name -> parameter, on the device; they become views of `full`.
        weights: the parameters' fp32 values, concatenated and padded to a multiple of the number of shards.
        dtype: the type in which the model computes.
        shard: (index of this rank's shard, number of shards).

    Attributes:
        full: all parameters, (padded,), in `dtype`.
        own: this rank's shard in `dtype`, a view of `full`.
        master: the shard in fp32; with dtype fp32 it is `own`.
        pieces: the runs that the optimizer updates; their masters are views of `master`.
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

    @property
    def name(self) -> str:
        """For the report of a hang: that of its first parameter."""
        return f"unit of {next(iter(self.parameters), 'nothing')}"

    def cut_pieces(self) -> None:
        """Makes new pieces, as views of `master`."""
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
        """The concatenated gradients, (padded,), 0 for a parameter without one; sets the parameters' .grad to None."""
        flat, begin = torch.zeros_like(self.full, memory_format=torch.contiguous_format), 0
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                flat[begin : begin + parameter.numel()] = parameter.grad.reshape(-1)
                parameter.grad = None
            begin += parameter.numel()
        return flat


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules in the outermost nn.ModuleLists, by name: the layers that a forward pass runs one after the other."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(other + ".") for other in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found.update({f"{name}.{number}": block for number, block in enumerate(module)})
    return found


def groups_of(model: nn.Module) -> list[tuple[nn.Module | None, dict[str, nn.Parameter]]]:
    """[(block, its parameters by name)] in the order of forward, after (None, all other parameters).

    A parameter shared by two blocks, or by a block and the rest, must be whole for both: it belongs to the others.
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
    """The parameters' values, concatenated in fp32 and padded with zeros to a multiple of `num_shards`."""
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters.values()])
    return torch.nn.functional.pad(flat, (0, -flat.numel() % num_shards))
