"""Linear layers larger than near: cut into tiles of rows, each a separate module, so that one tile is in near at a time.

A module's own parameters are its working set, and near must hold at least the largest working set. The rows of a linear
layer are independent: y = x W^T + b gives the features of y tile by tile (ZeRO-Infinity, section 5.1.3, memory-centric
tiling):

    y[..., rows of tile i] = x W_i^T + b_i        dx = sum over the tiles of dy_i W_i

The result equals that of the whole layer except for roundings: a matrix product of another shape may add in another order,
and dx is summed over the tiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from pstar.errors import ConfigError
from pstar.modules.scope import mode_of


class Tile(nn.Module):
    """Some rows of a linear layer: weight (rows, in_features), bias (rows,) or None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class TiledLinear(nn.Module):
    """nn.Linear whose weight is split between several modules. Its initial values are those of nn.Linear.

    Its parameters are `tiles.0.weight`, `tiles.0.bias`, ... state_dict() gives whole copies, `weight` and `bias`;
    load_state_dict takes these, or the tiles. Code that reads `layer.weight` directly cannot use it.

    Args:
        in_features, out_features, bias: as for nn.Linear.
        num_tiles: 1 to out_features; tiles differ by one row at most.

    Raises ConfigError for another num_tiles.

    forward: (..., in_features) -> (..., out_features).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, num_tiles: int = 2):
        super().__init__()
        self._cut(nn.Linear(in_features, out_features, bias), num_tiles)

    @classmethod
    def from_linear(cls, linear: nn.Linear, num_tiles: int) -> TiledLinear:
        """A layer with the same values; its parameters are views of the linear layer's memory, no second copy."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._cut(linear, num_tiles)
        return self.train(linear.training)

    def _cut(self, linear: nn.Linear, num_tiles: int) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        if not 1 <= num_tiles <= self.out_features:
            raise ConfigError(f"num_tiles is {num_tiles}; give 1 to {self.out_features}, the number of output features")
        rows, longer = divmod(self.out_features, num_tiles)
        self.num_rows = [rows + (index < longer) for index in range(num_tiles)]
        parts = [_parts(param, self.num_rows) for param in (linear.weight, linear.bias)]
        self.tiles = nn.ModuleList(Tile(weight, bias) for weight, bias in zip(*parts, strict=True))
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, num_tiles={len(self.tiles)}"


def _parts(param: nn.Parameter | None, num_rows: list[int]) -> list[nn.Parameter | None]:
    """Consecutive rows, as parameters that are views of the whole one and carry its marks."""
    if param is None:
        return [None] * len(num_rows)
    parts = [nn.Parameter(rows, requires_grad=param.requires_grad) for rows in param.detach().split(num_rows)]
    for part in parts:
        part.__dict__.update(param.__dict__)
    return parts


def _join(layer: TiledLinear, state: dict, prefix: str, local_metadata: dict) -> None:
    state.update(_joined(layer, state, prefix))


def _joined(layer: TiledLinear, state: dict, prefix: str) -> dict[str, torch.Tensor]:
    """Removes the tiles of one layer from state; returns the joined weight and bias by plain names."""
    found = {}
    for kind in ("weight", "bias"):
        names = [f"{prefix}tiles.{index}.{kind}" for index in range(len(layer.tiles))]
        if all(name in state for name in names):
            found[prefix + kind] = torch.cat([state.pop(name) for name in names])
    return found


def _split(layer: TiledLinear, state: dict, prefix: str, local_metadata: dict, strict: bool, missing: list[str],
           unexpected: list[str], errors: list[str]) -> None:
    for kind in ("weight", "bias"):
        whole = state.pop(prefix + kind, None)
        if whole is None:
            continue
        if whole.shape[:1] != (layer.out_features,):
            errors.append(f"size mismatch for {prefix}{kind}: it has the shape {tuple(whole.shape)}, the layer has "
                          f"{layer.out_features} output features")
            continue
        state.update({f"{prefix}tiles.{index}.{kind}": part for index, part in enumerate(whole.split(layer.num_rows))})


def join_tiles(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of an engine (gather_state, a file of export_weights), with tiles joined, by the names of the untiled model.

    module: the tiled model, for example engine.module.
    """
    state = dict(weights)
    for name, layer in module.named_modules():
        if isinstance(layer, TiledLinear):
            state |= _joined(layer, state, f"{name}." if name else "")
    return state


def tile_linears(module: nn.Module, max_elems: int) -> int:
    """Replaces every nn.Linear inside module whose weight has more than max_elems elements by a TiledLinear.

    Call it inside model_func, on the finished model. Values are not changed, and no memory is allocated. Returns the number
    of replaced layers. Not replaced, with a warning that names them: layers whose weight another module uses as well, and
    layers with hooks. Not replaced, without a warning: subclasses of nn.Linear, and layers in no chunk (torch_scope).

    Raises ConfigError if a single row is larger than max_elems, and for a module that is itself an nn.Linear.
    """
    if type(module) is nn.Linear:
        raise ConfigError("tile_linears replaces layers inside a module, and this one is a Linear itself: use "
                          "TiledLinear.from_linear")
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, child in module.named_modules():
        for param in child._parameters.values():
            owners.setdefault(id(param), []).append((name, child))
    replaced: dict[int, TiledLinear] = {}    # one module may be registered in several places
    for parent_name, parent in list(module.named_modules()):
        for child_name, child in list(parent._modules.items()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if id(child) in replaced:
                setattr(parent, child_name, replaced[id(child)])
            elif _is_large(child, max_elems) and not _obstacle(child, name, owners):
                rows = max_elems // child.in_features
                if not rows:
                    raise ConfigError(f"one row of {name} has {child.in_features} elements, more than max_elems, which is "
                                      f"{max_elems}; give at least {child.in_features}")
                replaced[id(child)] = TiledLinear.from_linear(child, -(-child.out_features // rows))
                setattr(parent, child_name, replaced[id(child)])
    return len(replaced)


def _is_large(child: nn.Module | None, max_elems: int) -> bool:
    weight = child._parameters.get("weight") if type(child) is nn.Linear else None
    return weight is not None and weight.numel() > max_elems and mode_of(weight) is None


def _obstacle(linear: nn.Linear, name: str, owners: dict[int, list[tuple[str, nn.Module]]]) -> bool:
    """Whether a large layer cannot be replaced; warns why."""
    uses = [use for param in linear._parameters.values() if param is not None for use in owners[id(param)]]
    others = sorted({other for other, child in uses if child is not linear})
    hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    if others:
        warnings.warn(f"tile_linears: {name} is left whole, for {', '.join(others)} uses its parameters too", stacklevel=3)
    elif hooks:
        warnings.warn(f"tile_linears: {name} is left whole, it has hooks, which would be lost", stacklevel=3)
    return bool(others or hooks)
