"""The record of a unit: the parameters that one collective moves, and their state in this step.

A *unit* (layout/layout.py) is a group of chunks, p pieces that an all-gather fills; or, to save memory, one chunk that its
owner broadcasts. A UnitRecord holds all that the engine knows of a unit except its bytes; LEGAL lists the allowed changes
of state.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from pstar.errors import StateError
from pstar.layout.layout import Layout, Unit
from pstar.memory.block import Key
from pstar.memory.under_way import Pending


class Bytes(Enum):
    """Where a unit's parameters are."""

    AWAY = "no parameter is a view of a near buffer"
    GATHERING = "a gather that was begun ahead is under way"
    GATHERED = "that gather has ended, no parameter is a view of its result yet"
    BOUND = "parameters are views of a near buffer"


class Grads(Enum):
    """The state of a unit's gradients in this step, on this rank."""

    NONE = "no gradient has arrived"
    ARRIVING = "some gradients have arrived; with one process they stay in this state until they are dropped"
    REDUCING = "they are being reduced over the ranks"
    REDUCED = "they were reduced: nothing may be added"


LEGAL = (
    (Bytes.AWAY, Bytes.BOUND),
    (Bytes.AWAY, Bytes.GATHERING),
    (Bytes.GATHERING, Bytes.GATHERED),
    (Bytes.GATHERED, Bytes.BOUND),
    (Bytes.GATHERED, Bytes.AWAY),
    (Bytes.BOUND, Bytes.AWAY),
    (Grads.NONE, Grads.ARRIVING),
    (Grads.NONE, Grads.REDUCING),    # only other ranks have gradients
    (Grads.ARRIVING, Grads.REDUCING),
    (Grads.ARRIVING, Grads.NONE),
    (Grads.REDUCING, Grads.REDUCED),
    (Grads.REDUCED, Grads.NONE),
)
"""(before, after): every change of state that a unit may make. A tuple, not a set: an Enum's hash is computed in Python."""


OF_UNITS = ("gathered", "grad_full", "micro_grad")
"""Blocks that have a unit's number; all others have a group's."""


@dataclass(slots=True, eq=False)
class UnitRecord:
    """One unit on this rank, in this step."""

    spec: Unit
    """Its slots and its owner: numbers that never change."""
    key: Key
    """The near block of which parameters are views: ("param", u), with several ranks ("gathered", u)."""
    grad_key: Key
    """The near block in which its gradients are collected: ("grad", u), with several ranks ("grad_full", u)."""
    bytes: Bytes = Bytes.AWAY
    address: int = 0
    """Address of the near buffer, while bytes is BOUND."""
    grads: Grads = Grads.NONE
    arrived: set[str] = field(default_factory=set)
    """Parameters that got a gradient in this step."""
    summed: set[str] = field(default_factory=set)
    """Parameters that got a gradient in this micro-step."""
    leaving: set[str] = field(default_factory=set)
    """Parameters in `summed` whose gradient is still in the ("micro_grad", u) block."""
    num_trainable: int | None = None
    """Number of parameters that will get a gradient in this step; None until they are counted."""
    gather: Pending | None = None
    """The gather that was begun ahead, while bytes is GATHERING."""

    def move(self, state: Bytes | Grads) -> None:
        """Changes the state of the unit's bytes or gradients. Raises StateError if LEGAL does not allow the change."""
        of_bytes = type(state) is Bytes
        before = self.bytes if of_bytes else self.grads
        if (before, state) not in LEGAL:
            raise StateError(f"unit {self.spec.index} of group {self.spec.group} cannot go from {before.name} "
                             f"({before.value}) to {state.name} ({state.value})")
        if of_bytes:
            self.bytes = state
        else:
            self.grads = state

    def forget_grads(self) -> None:
        """Forgets all gradients; the trainable parameters will be counted anew."""
        if self.grads is not Grads.NONE:
            self.move(Grads.NONE)
            self.num_trainable = None
            self.arrived.clear()
            self.summed.clear()
            self.leaving.clear()


class Units:
    """All units of a layout, and the keys of the trace that use each block: numbers, no tensors.

    Args:
        layout: every parameter's place.
        communication: gather and reduce a whole "group" at once, or one "chunk".
        num_ranks: with one there is nothing to gather: a unit's near buffer is its own block.
    """

    def __init__(self, layout: Layout, communication: str, num_ranks: int):
        self.layout, self.one_rank = layout, num_ranks == 1
        kinds = ("param", "grad") if self.one_rank else ("gathered", "grad_full")
        self.records = [UnitRecord(spec, (kinds[0], spec.index), (kinds[1], spec.index))
                        for spec in layout.units(communication)]
        self.place = {slot.name: (unit, slot.offset) for unit in self.records for slot in unit.spec.slots}
        """Name of a parameter -> (its unit, offset inside it)."""
        self.at = {unit.key: unit for unit in self.records}
        self.frozen = frozenset(slot.name for group in layout.frozen for slot in group.slots)
        """The parameters in frozen groups: those that were frozen when the engine started."""
        self.of_group: dict[int, list[UnitRecord]] = {}
        for unit in self.records:
            self.of_group.setdefault(unit.spec.group, []).append(unit)

    def of_block(self, key: Hashable) -> list[Key]:
        """The keys of the trace that mean a use of this block."""
        kind, index = key
        if kind in OF_UNITS:
            return [key]
        uses = [("adam", index)]
        if kind == "param":
            uses += [unit.key for unit in self.of_group[index]]
        elif kind == "grad" and self.one_rank:
            uses += [key, *(("micro_grad", unit.spec.index) for unit in self.of_group[index])]    # summed there
        return uses

    def of_modules(self, key: Hashable) -> list[Key]:
        """The keys of the trace that mean that a module uses the parameters of this block's group."""
        kind, index = key
        group = self.records[index].spec.group if kind in OF_UNITS else index
        return [unit.key for unit in self.of_group[group]]
