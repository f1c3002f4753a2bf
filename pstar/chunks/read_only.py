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

from collections.abc import Iterable
from typing import NamedTuple

import torch

from pstar.chunks.unit import UnitRecord
from pstar.errors import StateError
from pstar.schedule.schedule import Schedule

INSTEAD = ("compute with a changed copy of it, call model.load_state(weights) between two steps, or keep the parameter with "
           "PyTorch (pstar.exclude)")
BITS = {2: torch.int16, 4: torch.int32}


class Place(NamedTuple):
    """A parameter in its unit's buffer. (A tuple of what `check` needs: it runs for each parameter that leaves near.)"""

    param: torch.nn.Parameter
    offset: int
    """In bytes."""
    version: int
    """torch's count of changes at the start."""
    name: str


class ReadOnly:
    """Compares parameters before their bytes are dropped.

    Args:
        params: qualified name to parameter.
        schedule: its num_steps tells the first step.
    """

    def __init__(self, params: dict[str, torch.nn.Parameter], schedule: Schedule):
        self._params, self._schedule = params, schedule
        self._places: dict[UnitRecord, list[Place]] = {}
        self._sums: dict[str, int] = {}    # name -> sum of its bits when it was bound, in the first step

    def start(self, units: Iterable[UnitRecord]) -> None:
        """All parameters are in chunks now."""
        for unit in units:
            held = [(self._params[slot.name], slot) for slot in unit.spec.slots if slot.numel]
            self._places[unit] = [Place(param, slot.offset * param.itemsize, param._version, slot.name)
                                  for param, slot in held]

    def begin(self, unit: UnitRecord) -> None:
        """A unit's parameters have become views of near."""
        if self._schedule.num_steps <= 1:
            self._sums |= self._sum(self._places[unit])

    def forget(self, unit: UnitRecord) -> None:
        """The engine is about to change the bytes itself: an update in near, or a checkpoint that is loaded."""
        if self._sums:
            for slot in unit.spec.slots:
                self._sums.pop(slot.name, None)

    def check_place(self, unit: UnitRecord) -> None:
        """Raises StateError if a parameter of a bound unit is no view of the chunk any more."""
        address = unit.address
        for param, offset, _, name in self._places[unit]:
            if param.data_ptr() != address + offset:
                raise StateError(f"the model replaced the data of parameter {name}, which is in a chunk that does not "
                                 f"follow: {INSTEAD}")

    def check(self, unit: UnitRecord) -> None:
        """The unit's bytes in near are about to be dropped or overwritten. Raises StateError if the model changed them."""
        self.check_place(unit)
        changed = [name for param, _, version, name in self._places[unit] if param._version != version]
        if self._sums:
            places = [place for place in self._places[unit] if place.name in self._sums]
            changed += [name for name, found in self._sum(places).items() if found != self._sums.pop(name)]
        if changed:
            raise StateError(
                f"the model changed parameter {changed[0]} in place while it was in a chunk, and the change would be lost "
                f"(nn.Embedding with max_norm does that, and weights that are normalised in forward): {INSTEAD}")

    @staticmethod
    def _sum(places: list[Place]) -> dict[str, int]:
        """The sum of each parameter's bits, in integers that wrap around."""
        bits = [place.param.detach().view(BITS[place.param.itemsize]) for place in places]
        sums = torch.stack([each.sum(dtype=each.dtype) for each in bits]).tolist() if bits else []
        return dict(zip((place.name for place in places), sums, strict=True))
