"""Embeddings computed in host memory, where their tables stay: only the rows of a batch cross the link.

A batch looks up B * T rows, but near must hold the whole table of V rows, and a gradient as large as the table (PatrickStar,
section 8.2). Here lookup, gradient and update are computed in far. (B, T, H) is copied to near in forward, and its gradient
back in backward.
A table that another module uses too, for example a tied head, is needed in near anyway and stays in its chunk.
"""

from __future__ import annotations

from collections import Counter

import torch

from pstar.modules.scope import mode_of, parameters_of, stay_far


def compute_embeddings_far(module: torch.nn.Module, device: torch.device) -> list[str]:
    """Lets the nn.Embedding modules of a model compute in host memory; to be called before the Plan is made.

    Args:
        module: the model, its parameters real or on the meta device.
        device: near's device, to which their results are copied.

    Returns:
        the names of these modules; a module with a shared table is not changed.
    """
    owners = Counter(id(param) for child in module.modules() for param in parameters_of(child, recurse=False))
    found = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding) and owners[id(child.weight)] == 1 and mode_of(child.weight) is None:
            stay_far(child.weight)
            child.register_forward_pre_hook(lambda _, args: tuple(ids.cpu() for ids in args))
            child.register_forward_hook(lambda _, args, rows: rows.to(device))
            found.append(name)
    return found
