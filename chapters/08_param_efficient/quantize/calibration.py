"""Statistics of the layers' inputs on calibration text: second moments for GPTQ, outliers for LLM.int8()."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class InputStatistics:
    """Sums over the rows x (in,) that a layer was given.

    Attributes:
        squares: (in, in) float64, the sum of x x^T.
        largest: (in,) float32, the largest magnitude of each feature.
        rows: their number.
    """

    squares: Tensor
    largest: Tensor
    rows: int = 0

    @classmethod
    def empty(cls, num_in: int, device: torch.device) -> InputStatistics:
        """Statistics of no rows."""
        return cls(torch.zeros(num_in, num_in, dtype=torch.float64, device=device), torch.zeros(num_in, device=device))

    def add(self, x: Tensor) -> None:
        """Counts the rows of an input (..., in)."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.squares += (rows.t() @ rows).double()
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.rows += len(rows)

    def hessian(self) -> Tensor:
        """(in, in) float64: of the mean squared error of an output, 2 E[x x^T] (Frantar et al. 2022, section 2)."""
        return 2 * self.squares / max(1, self.rows)


@contextmanager
def watching(layers: dict[str, nn.Module], widths: dict[str, int]) -> Iterator[dict[str, InputStatistics]]:
    """Gathers the statistics of the inputs that the layers get inside the block; `widths` are their numbers of inputs."""
    found = {name: InputStatistics.empty(widths[name], next(layer.parameters()).device) for name, layer in layers.items()}
    hooks = [layer.register_forward_pre_hook(lambda _, args, name=name: found[name].add(args[0]))
             for name, layer in layers.items()]  # fmt: skip
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def input_statistics(model: nn.Module, layers: dict[str, nn.Module], widths: dict[str, int],
                     batches: Iterable[Tensor]) -> dict[str, InputStatistics]:
    """The statistics of each layer while the model reads batches of ids (B, T)."""
    training = model.training
    model.eval()
    try:
        with watching(layers, widths) as found:
            for ids in batches:
                model(ids)
    finally:
        model.train(training)
    return found
