"""Finds the module that first makes a number that is not finite, after several steps in a row were skipped."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

PATIENCE = 3
"""Skipped steps in a row after which the next forward is watched. (A single skipped step is normal.)"""


class FirstNotFinite:
    """Watches one forward of a model and warns, once a run, which module returned the first output that is not finite.

    Each check of an output waits for the device, so no output is checked before steps were skipped.
    """

    def __init__(self, module: torch.nn.Module):
        self.module, self.warned = module, False

    @contextmanager
    def watching(self, skipped_in_a_row: int) -> Iterator[None]:
        """The forward of a training step runs inside. Warns after it if PATIENCE steps before it were skipped."""
        if self.warned or skipped_in_a_row < PATIENCE:
            yield
            return
        found: list[str] = []
        handles = []
        for name, child in self.module.named_modules():

            def look(child: torch.nn.Module, args: tuple, kwargs: dict, output: Any, name: str = name) -> None:
                if not found and not _finite(output) and _finite((args, kwargs)):
                    found.append(f"{name or 'the model itself'} ({type(child).__name__})")

            handles.append(child.register_forward_hook(look, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.warned = True
        where = (f"the first module whose output is not finite, though its inputs are, is {found[0]}" if found else
                 "the outputs of all modules are finite: look at the loss outside of the model, backward and the loss scale")
        warnings.warn(f"{skipped_in_a_row} steps in a row were skipped because gradients were not finite: {where}",
                      stacklevel=2)


def _finite(values: Any) -> bool:
    floating = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return all(bool(leaf.isfinite().all()) for leaf in floating)
