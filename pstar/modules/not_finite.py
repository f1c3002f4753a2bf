"""Where a number that is not finite was made first: looked for when several steps in a row had to be skipped."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

PATIENCE = 3
"""Skipped steps in a row after which the next forward is watched. (One skipped step is nothing unusual.)"""


class FirstNotFinite:
    """Watches one forward of a model and says, once a run, which module gave the first output that is not finite.

    Looking at every output costs a wait for the device each, so nothing is looked at before it is needed.
    """

    def __init__(self, module: torch.nn.Module):
        self.module, self.said = module, False

    @contextmanager
    def watching(self, skipped_in_a_row: int) -> Iterator[None]:
        """The forward of a training step runs inside. Warns after it where PATIENCE steps before it were skipped."""
        if self.said or skipped_in_a_row < PATIENCE:
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
        self.said = True
        where = (f"the first module whose output is not finite, though its inputs are, is {found[0]}" if found else
                 "the outputs of all modules are finite: look at the loss outside of the model, backward and the loss scale")
        warnings.warn(f"{skipped_in_a_row} steps in a row were skipped because gradients were not finite: {where}",
                      stacklevel=2)


def _finite(values: Any) -> bool:
    floating = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return all(bool(leaf.isfinite().all()) for leaf in floating)
