"""The owner of a parameter: marks parameters that stay with PyTorch, and finds those that a module's own forward uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_MARK = "_pstar_outside"

# Children that a torch module never calls: the module's own forward computes with their parameters.
BORROWED = ((torch.nn.MultiheadAttention, "out_proj"),)


def parameters_of(module: torch.nn.Module, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
    """All parameters of a module, also if its class overrides parameters() to give an optimizer fewer of them."""
    return torch.nn.Module.parameters(module, recurse)


def used_by(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters with which a module's own forward computes."""
    own = list(parameters_of(module, recurse=False))
    for kind, child in BORROWED:
        if isinstance(module, kind):
            own += parameters_of(getattr(module, child), recurse=False)
    return own


class Outside(Enum):
    """How the gradient of a parameter outside the chunks is treated."""

    AVERAGED = "averaged over the ranks: every rank has the same parameter"
    LOCAL = "not averaged: every rank has another parameter, under the same name"
    FAR = "averaged over the ranks; it stays in host memory, where its module computes (see pstar.modules.host_embedding)"


@contextmanager
def torch_scope(do_allreduce: bool = True) -> Iterator[None]:
    """Inside model_func: parameters that are made in this scope stay with PyTorch and go into no chunk.

    They are ordinary tensors on near's device, always there, outside the budgets and the ledger. The engine's optimizer
    updates them with the rest (the same formula, masters, loss scale, clipping and skipped steps). Use it for parameters
    that cannot be in chunks: the experts of a mixture of experts, which differ from rank to rank.

    More exactly: it marks the parameters and whole submodules that any module registers inside the scope.

    Args:
        do_allreduce: average their gradients over the ranks. False: each rank updates its parameter with its gradients; in
            the global norm the parameters of different ranks count as different parameters.
    """
    kind = Outside.AVERAGED if do_allreduce else Outside.LOCAL

    def mark_param(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
        setattr(param, _MARK, kind)

    def mark_module(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        for param in parameters_of(child) if child is not None else ():
            if mode_of(param) is None:    # an inner scope's mark stays
                setattr(param, _MARK, kind)

    hooks = [register_module_parameter_registration_hook(mark_param), register_module_module_registration_hook(mark_module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def exclude(module: torch.nn.Module, do_allreduce: bool = True) -> torch.nn.Module:
    """Marks all parameters of a module, as torch_scope does while they are made. Returns the module.

    Call it inside model_func, or in a subclass's __init__: before initialize_engine returns.
    """
    for param in parameters_of(module):
        setattr(param, _MARK, Outside.AVERAGED if do_allreduce else Outside.LOCAL)
    return module


def stay_far(param: torch.nn.Parameter) -> None:
    """Marks a parameter as one that never leaves host memory."""
    setattr(param, _MARK, Outside.FAR)


def mode_of(param: torch.nn.Parameter) -> Outside | None:
    """How a parameter outside the chunks is treated; None for a parameter in chunks."""
    return getattr(param, _MARK, None)
