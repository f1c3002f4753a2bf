"""A model's inputs: casts floating tensors to the parameters' dtype, and reads the shapes."""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def cast_inputs(args: tuple, kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments with floating tensors in another dtype, inside lists, tuples and dicts too.

    An argument that needs no cast stays the same object, because a model may write into it (a cache, for example).
    """
    return tuple(_cast(value, dtype) for value in args), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    leaves, spec = tree_flatten(value)
    made = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    same = all(new is old for new, old in zip(made, leaves, strict=True))
    return value if same else tree_unflatten(made, spec)


def shape_of(value: Any) -> Any:
    """The part of an argument that decides which trace a step follows: the shapes and dtypes of its tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    if isinstance(value, (list, tuple)):
        return tuple(map(shape_of, value))
    if isinstance(value, dict):
        return tuple((str(key), shape_of(item)) for key, item in value.items())
    return value if isinstance(value, (str, bool, type(None))) else type(value).__name__    # a number may be a counter
