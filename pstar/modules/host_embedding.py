"""Embeddings computed in host memory, where their tables stay: what crosses the link is the rows of a batch.

A table of V rows is needed near for the B * T rows that a batch looks up, and its gradient is as large as itself
(PatrickStar, section 8.2). Here lookup, gradient and update take place far; (B, T, H) goes near in forward and comes back
in backward.
A table that another module uses too, as a head tied to it does, is needed near anyway and stays in its chunk.
"""

from __future__ import annotations

from collections import Counter

import torch

from pstar.modules.scope import mode_of, stay_far


def compute_embeddings_far(module: torch.nn.Module, device: torch.device) -> list[str]:
    """Lets the nn.Embedding modules of a model compute in host memory; to be called before anything is planned.

    Args:
        module: the model, its parameters real or on the meta device.
        device: of near, where their results go.

    Returns:
        the names of the modules that do; those with a shared table do not.
    """
    owners = Counter(id(param) for child in module.modules() for param in child.parameters(recurse=False))
    found = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding) and owners[id(child.weight)] == 1 and mode_of(child.weight) is None:
            stay_far(child.weight)
            child.register_forward_pre_hook(lambda _, args: tuple(ids.cpu() for ids in args))
            child.register_forward_hook(lambda _, args, rows: rows.to(device))
            found.append(name)
    return found
