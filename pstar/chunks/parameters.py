"""Parameters as views of chunks: COMPUTE, HOLD or RELEASED, bound to a near buffer or to a placeholder.

A parameter is a view of its unit's near buffer while that exists (COMPUTE: in use, pinned; HOLD: may be evicted). Otherwise
(RELEASED) it is an expanded NaN without memory, of the same shape. A parameter that is not COMPUTE has the class Idle: an
operation outside its module then gets its bytes first (borrowed.py). unshard.py copies the bytes to near.
"""

from enum import Enum

import torch

from pstar.chunks.borrowed import idle_class
from pstar.chunks.read_only import ReadOnly
from pstar.chunks.unit import Bytes, UnitRecord, Units
from pstar.errors import StateError
from pstar.layout.layout import Unit
from pstar.memory.block import Key
from pstar.memory.tier import Tier
from pstar.schedule.schedule import Schedule


class TensorState(Enum):
    COMPUTE = "in use: its bytes are near and must stay"
    HOLD = "its bytes are near and may leave"
    RELEASED = "its bytes are not near"


class Parameters:
    """The model's parameters on this rank. The store calls `leave` for each block that leaves near.

    Args:
        units: every parameter's place.
        params: qualified name to parameter, in the model's order; a tied parameter once.
        dtype: dtype of the parameter chunks.
        device: near's device.
        schedule: its num_steps numbers the current step.
    """

    def __init__(self, units: Units, params: dict[str, torch.nn.Parameter], dtype: torch.dtype, device: torch.device,
                 schedule: Schedule):
        self.units, self.params, self.dtype, self.device, self.schedule = units, params, dtype, device, schedule
        self.shapes = {name: param.shape for name, param in params.items()}
        self.strides = {name: torch.empty(shape, dtype=dtype, device="meta").stride() for name, shape in self.shapes.items()}
        self.uses: dict[str, int] = dict.fromkeys(params, 0)
        """Number of current uses of each parameter (COMPUTE if not 0); modules nest."""
        self.lent = False
        """Whether no parameter is Idle (lend_all)."""
        self.num_bound = 0
        """Number of units whose parameters are views of near."""
        self._placeholder = torch.full((), float("nan"), dtype=dtype, device=device)
        self._classes = {name: (type(param), idle_class(type(param))) for name, param in params.items()}
        self.read_only = ReadOnly(params, schedule)
        self._unit_at: dict[int, UnitRecord] = {}    # address of a near buffer -> unit
        self._has_views = False                      # whether a view of a near buffer ever outlived its block

    def state(self, name: str) -> TensorState:
        if self.uses[name]:
            return TensorState.COMPUTE
        return TensorState.HOLD if self.units.place[name][0].bytes is Bytes.BOUND else TensorState.RELEASED

    def use(self, name: str) -> None:
        """-> COMPUTE: counts one more use. Its bytes are near, and the caller has pinned them."""
        self.uses[name] += 1
        self.params[name].__class__ = self._classes[name][0]

    def end_use(self, name: str) -> None:
        """COMPUTE -> HOLD if this was the last use. Raises StateError for a parameter that is not COMPUTE."""
        if not self.uses[name]:
            raise StateError(f"{name} is released but not in use: it is {self.state(name).name}")
        self.uses[name] -= 1
        if not self.uses[name]:
            self.params[name].__class__ = self._classes[name][1]

    # ------------------------------------------------------------------- views

    def bind(self, unit: UnitRecord, data: torch.Tensor) -> None:
        """RELEASED -> HOLD: a unit's parameters become views of its near buffer."""
        with torch._C.DisableTorchFunctionSubclass():    # else an Idle parameter handles this as an operation of the model
            for slot in unit.spec.slots:
                self.params[slot.name].data = self.view(slot.name, data)
            self.read_only.begin(unit)
        unit.move(Bytes.BOUND)
        unit.address = data.data_ptr()
        self._unit_at[unit.address] = unit
        self.num_bound += 1

    def view(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """A parameter's slot in its unit's buffer, with the parameter's shape. (One call: slice and view are two.)"""
        return data.as_strided(self.shapes[name], self.strides[name], self.units.place[name][1])

    def leave(self, key: Key, buffer: torch.Tensor) -> bool:
        """HOLD -> RELEASED: a block is about to leave near. Returns whether other tensors are still views of its buffer.

        Raises StateError if one of its parameters is in use, or if the model changed it in place.
        """
        unit = self.units.at.get(key)
        if unit is None or unit.bytes is Bytes.AWAY:
            return False
        bound = unit.bytes is Bytes.BOUND
        if bound:
            self.check_read_only(unit)
        unit.move(Bytes.AWAY)
        if not bound:
            return False
        self.num_bound -= 1
        del self._unit_at[unit.address]
        self._release_data(unit)
        if not Tier.shared(buffer):
            return False
        self._has_views = True    # if one of these views is saved for backward, the graph keeps a SavedView, not the memory
        buffer.untyped_storage()._pstar_unit = unit.spec, self.schedule.num_steps
        return True

    def check_read_only(self, unit: UnitRecord) -> None:
        """Raises StateError if the model changed one of a bound unit's parameters in place."""
        with torch._C.DisableTorchFunctionSubclass():    # as in bind
            self.read_only.check(unit)

    def check_places(self) -> None:
        """Raises StateError if the model replaced the data of a parameter that is bound. To be called in each step."""
        with torch._C.DisableTorchFunctionSubclass():    # as in bind
            for unit in self._unit_at.values():
                self.read_only.check_place(unit)

    def _release_data(self, unit: UnitRecord) -> None:
        """Turns a unit's parameters into placeholders. Raises StateError if one is in use."""
        with torch._C.DisableTorchFunctionSubclass():    # as in bind
            for slot in unit.spec.slots:
                if self.uses[slot.name]:
                    raise StateError(f"{slot.name} is in use (COMPUTE) and cannot be released")
                self.params[slot.name].data = self._placeholder.expand(self.shapes[slot.name])

    def release_all(self) -> None:
        """Turns all parameters into idle placeholders: from now on their bytes are in chunks."""
        for unit in self.units.records:
            self._release_data(unit)
        self.read_only.start(self.units.records)
        self.idle_all()

    def lend_all(self) -> None:
        """Gives all parameters their usual class instead of Idle: all are near, and none will be evicted until idle_all."""
        if not self.lent:
            for name, param in self.params.items():
                param.__class__ = self._classes[name][0]
        self.lent = True

    def idle_all(self) -> None:
        """Ends lend_all."""
        for name, param in self.params.items():
            param.__class__ = self._classes[name][1]
        self.lent = False

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit whose near buffer is a tensor's memory, or was in this step; None for a tensor with other memory."""
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:    # a tangent of forward-mode AD that is all zero has no memory
            return None
        unit = self._unit_at.get(address)
        if unit is None and self._has_views:
            spec, step = getattr(storage, "_pstar_unit", (None, None))
            return spec if step == self.schedule.num_steps else None
        return None if unit is None else unit.spec

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._placeholder.data_ptr()
