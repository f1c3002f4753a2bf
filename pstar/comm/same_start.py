"""All ranks start alike: with the same model and the same configuration, or with one line that names the difference.

A chunk's initial values are those of its owner, so parameters in chunks are the same on all ranks whatever each rank drew.
Buffers and parameters that stay with PyTorch are on every rank. They begin with rank 0's values, as in DDP: programs often
give each rank a seed of its own.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from pstar.comm.collectives import Collectives
from pstar.config import Config
from pstar.errors import ConfigError
from pstar.modules.scope import Outside, mode_of

OF_EACH_RANK = ("disk_path", "profile")
"""Keys of the configuration that name files: they may differ."""
SEED = "the state of torch's random generator"


def check_same(module: torch.nn.Module, config: Config, collectives: Collectives) -> None:
    """Raises ConfigError on all ranks if one of them has another model or configuration than rank 0. If every node has its
    own copy of all chunks (ownership node), the ranks must draw the same initial values, too."""
    if collectives.num_ranks == 1:
        return
    own = dict(_described(module)) | {f"{name} of the configuration": value for name, value in _values(config)}
    if collectives.num_pieces < collectives.num_ranks:
        own[SEED] = hashlib.sha256(torch.get_rng_state().numpy()).hexdigest()[:8]
    if len(set(collectives.from_all(hashlib.sha256(repr(own).encode()).digest()))) == 1:
        return
    first, *others = collectives.from_all(own)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                advice = ": call torch.manual_seed with the same number before initialize_engine" if name == SEED else ""
                raise ConfigError(f"the ranks do not start alike: {name} is {first.get(name, 'missing')} on rank 0 and "
                                  f"{other.get(name, 'missing')} on rank {rank}{advice}")
        if list(first) != list(other):
            name, its = next(pair for pair in zip(first, other, strict=True) if pair[0] != pair[1])
            raise ConfigError(f"the ranks do not start alike: rank 0 has {name} where rank {rank} has {its}")


def _described(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """The name and the form of every parameter and buffer; the form of what every rank has its own is not compared."""
    for name, param in module.named_parameters():
        form = "one of each rank" if mode_of(param) == Outside.LOCAL else _form(param)
        yield f"parameter {name}", form + ("" if param.requires_grad else ", frozen")
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", _form(buffer)


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def _values(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the configuration with its value."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{each.name}.")
        elif prefix + each.name not in OF_EACH_RANK:
            yield prefix + each.name, repr(value)
