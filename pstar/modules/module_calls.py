"""Replaces the methods of torch.nn.Module that do not work on parameters in chunks: they raise StateError or do nothing."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch

from pstar.errors import StateError
from pstar.modules.scope import parameters_of


def replace_calls(model: torch.nn.Module, in_chunks: set[int]) -> None:
    """Replaces state_dict, load_state_dict, copying, pickling, moves (to, cpu, cuda) and casts (half, bfloat16 ...).

    Args:
        model: its modules that have a parameter in chunks, of their own or in a submodule, get the replaced methods.
        in_chunks: the ids of the parameters in chunks.
    """
    for module in model.modules():
        if any(id(param) in in_chunks for param in parameters_of(module)):
            module.register_state_dict_pre_hook(_refuse_state_dict)
            module.register_load_state_dict_pre_hook(_refuse_state_dict)
            module.__reduce_ex__ = refuse_copy    # copy and pickle look it up on the object
            module._apply = partial(_stay, weakref.ref(module))    # what moves and casts call


def _refuse_state_dict(*_: Any) -> None:
    """Raises StateError: a file of placeholders would look like a model until it is loaded."""
    raise StateError("parameters in chunks have no state_dict, it would be without bytes: use model.save_checkpoint and "
                     "load_checkpoint for a run, export_weights and import_weights for a file, gather_state and load_state "
                     "for tensors")


def refuse_copy(protocol: Any) -> Any:
    raise StateError("an engine and its module cannot be copied or pickled, the parameters are in chunks: "
                     "model.gather_state() gives plain tensors, model.save_checkpoint() a file")


def _stay(reference: weakref.ref, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
    """In place of torch.nn.Module._apply: nothing moves. Programs call `to` by habit, and Lightning calls it for them.

    Raises StateError for another dtype, because the masters, the moments and the layout depend on it, and for share_memory,
    because other processes would see placeholders instead of the parameters.
    """
    module = reference()
    for device, dtype in dict.fromkeys((each.device, each.dtype) for each in chain(parameters_of(module), module.buffers())):
        empty = torch.empty(0, device=device, dtype=dtype)
        was_shared = empty.is_shared()
        result = convert(empty)
        if result.is_shared() and not was_shared and result.device == device:
            raise StateError(f"{type(module).__name__} is in chunks, which cannot be shared with other processes: "
                             "start processes with torchrun, each builds its own engine")
        if result.dtype != dtype:
            raise StateError(f"{type(module).__name__} is in chunks and stays {dtype}, it does not become {result.dtype}: "
                             "choose bf16 or fp16 in the configuration, or cast tensors in the model's forward")
        if result.device != device:
            warnings.warn(f"{type(module).__name__} is in chunks, and the engine keeps it on {device}: moving it to "
                          f"{result.device} has no effect", stacklevel=4)
    return module
