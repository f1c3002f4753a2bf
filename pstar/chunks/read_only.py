"""A parameter in a chunk is read-only for the model: a change in place would be lost when its bytes leave near.

nn.Embedding with max_norm changes its weight in forward, and so do models that normalise or clamp their weights there. In
plain PyTorch the change stays. Here the copy in near is dropped, and the next use copies the old bytes again. So before the
bytes are dropped or overwritten, two things are compared:

- in every step torch's count of changes, which every operation in place raises, also through detach() and views;
- in the first step a sum of all bits, because changes through `.data` are not counted.

`param.data = other` leaves the chunk behind: the engine would update the one, the model compute with the other. That is
looked for in every step, also where all parameters stay near.

A change that is not lost is no error: with one process, all parameters near, in fp32 or bf16.
"""

import torch

from pstar.chunks.unit import UnitRecord
from pstar.errors import StateError
from pstar.schedule.schedule import Schedule

INSTEAD = ("compute with a changed copy of it, call model.load_state(weights) between two steps, or keep the parameter with "
           "PyTorch (pstar.exclude)")
BITS = {2: torch.int16, 4: torch.int32}


class ReadOnly:
    """Compares parameters before their bytes are dropped.

    Args:
        params: qualified name to parameter.
        schedule: its num_steps tells the first step.
    """

    def __init__(self, params: dict[str, torch.nn.Parameter], schedule: Schedule):
        self._params, self._schedule = params, schedule
        self._versions: dict[str, int] = {}    # name -> count of changes at the start
        self._sums: dict[str, int] = {}        # name -> sum of its bits when it was bound, in the first step

    def start(self) -> None:
        """All parameters are in chunks now."""
        self._versions = {name: param._version for name, param in self._params.items()}

    def begin(self, unit: UnitRecord) -> None:
        """A unit's parameters have become views of near."""
        if self._schedule.num_steps <= 1:
            names = [slot.name for slot in unit.spec.slots]
            self._sums |= zip(names, self._sum(names), strict=True)

    def forget(self, unit: UnitRecord) -> None:
        """The engine is about to change the bytes itself: an update in near, or a checkpoint that is loaded."""
        for slot in unit.spec.slots:
            self._sums.pop(slot.name, None)

    def check_place(self, unit: UnitRecord) -> None:
        """Raises StateError if a parameter of a bound unit is no view of the chunk any more."""
        for slot in unit.spec.slots:
            param = self._params[slot.name]
            if slot.numel and param.data_ptr() != unit.address + slot.offset * param.itemsize:
                raise StateError(f"the model replaced the data of parameter {slot.name}, which is in a chunk that does not "
                                 f"follow: {INSTEAD}")

    def check(self, unit: UnitRecord) -> None:
        """The unit's bytes in near are about to be dropped or overwritten. Raises StateError if the model changed them."""
        self.check_place(unit)
        for slot in unit.spec.slots:
            if self._params[slot.name]._version != self._versions[slot.name]:
                self._refuse(slot.name)
        if self._sums:
            names = [slot.name for slot in unit.spec.slots if slot.name in self._sums]
            for name, found in zip(names, self._sum(names), strict=True):
                if found != self._sums.pop(name):
                    self._refuse(name)

    def _sum(self, names: list[str]) -> list[int]:
        """The sum of each parameter's bits, in integers that wrap around."""
        bits = [self._params[name].detach().view(BITS[self._params[name].itemsize]) for name in names]
        return torch.stack([each.sum(dtype=each.dtype) for each in bits]).tolist() if bits else []

    def _refuse(self, name: str) -> None:
        raise StateError(
            f"the model changed parameter {name} in place while it was in a chunk, and the change would be lost "
            f"(nn.Embedding with max_norm does that, and weights that are normalised in forward): {INSTEAD}")
