"""Gradients of one process whose model data all stay in near, always or in this step: autograd's own tensors, which no chunk
copies.

A gradient that will move must be in a chunk. Where nothing moves, the copy would cost a pass over memory, and the gradients'
chunks would be idle during forward, when activations need the memory. Here the process takes param.grad as it is, keeps it
until the update has read it, and frees it. So a step needs the memory of a plain loop that sets its gradients to None.
"""

import torch

from pstar.chunks.gradients import Gradients
from pstar.chunks.unit import Grads, UnitRecord
from pstar.memory.block import Key
from pstar.memory.tier import NEAR

KIND = "grad"
"""The kind of these bytes in near's ledger: that of chunks of gradients."""


class KeptGradients(Gradients):
    """As Gradients, with one rank, no eviction, and gradients of the parameters' dtype. Near counts the bytes."""

    apart = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._kept: dict[str, torch.Tensor] = {}    # name -> its gradient, flat
        self._names = {group.index: {slot.offset: slot.name for slot in group.slots}
                       for group in self.units.layout.trained}

    def add_grad(self, unit: UnitRecord, key: Key, name: str, grad: torch.Tensor, last_micro_step: bool) -> None:
        """Keeps a parameter's gradient, or adds it to the one that is there."""
        if unit.grads is not Grads.ARRIVING:
            unit.move(Grads.ARRIVING)
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = grad.detach().reshape(-1)    # a view, if it is contiguous
            self.store.tiers[NEAR].charge(kept.nbytes, KIND)
            unit.arrived.add(name)
        else:
            kept.add_(grad.reshape(-1))
        self.norms.square(name, kept)

    def end_backward(self, last_micro_step: bool) -> None:
        """Nothing is under way."""

    def take_norms(self, group: int) -> None:
        """Sums the squares of a group's gradients that are on a GPU; those on the CPU were summed when they arrived."""
        self.norms.take_parts(group, lambda span: self._kept[span.name], self.arrived)

    def of(self, group: int) -> bool:
        return any(name in self._kept for name in self._names.get(group, {}).values())

    def blocks(self, group: int) -> list[Key]:
        """None: the gradients are in no block."""
        return []

    def part(self, group: int, part: slice, buffers: dict[Key, torch.Tensor]) -> torch.Tensor:
        return self._kept[self._names[group][part.start]]

    def drop(self, group: int) -> None:
        for name in self._names[group].values():
            self._free(name)

    def drop_grads(self) -> None:
        """Forgets all gradients, as zero_grad does."""
        for name in list(self._kept):
            self._free(name)
        for unit in self.units.records:
            unit.forget_grads()

    def _free(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self.store.tiers[NEAR].discharge(kept.nbytes, KIND)
