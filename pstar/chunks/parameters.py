"""Parameters as views of chunks: what is COMPUTE, HOLD or RELEASED, bound to a near buffer or a placeholder.

A parameter is a view into its unit's near buffer while that is there (COMPUTE: in use, pinned; HOLD: may be evicted), and
an expanded NaN without memory otherwise (RELEASED): its shape stays. While it is not COMPUTE its class is Idle, so that
whoever uses it out of turn gets its bytes first (borrowed.py). How the bytes come near is not known here: see unshard.py.
"""

from enum import Enum

import torch

from pstar.chunks.borrowed import idle_class
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
    """The model's parameters on this rank. The residency tells `leave` of each block that goes from near.

    Args:
        units: every parameter's place.
        params: qualified name to parameter, in the model's order; a tied parameter once.
        dtype: of the chunks.
        device: of near.
        schedule: tells which step it is.
    """

    def __init__(self, units: Units, params: dict[str, torch.nn.Parameter], dtype: torch.dtype, device: torch.device,
                 schedule: Schedule):
        self.units, self.params, self.dtype, self.device, self.schedule = units, params, dtype, device, schedule
        self.shapes = {name: param.shape for name, param in params.items()}
        self.strides = {name: torch.empty(shape, device="meta").stride() for name, shape in self.shapes.items()}
        self.uses: dict[str, int] = dict.fromkeys(params, 0)
        """How often each parameter is in use (COMPUTE); modules nest."""
        self.num_bound = 0
        """Units whose parameters are views of near."""
        self._placeholder = torch.full((), float("nan"), dtype=dtype, device=device)
        self._classes = {name: (type(param), idle_class(type(param))) for name, param in params.items()}
        self._unit_at: dict[int, UnitRecord] = {}    # address of a near buffer -> unit
        self._has_views = False                      # whether anybody ever kept a view of a near buffer

    def state(self, name: str) -> TensorState:
        if self.uses[name]:
            return TensorState.COMPUTE
        return TensorState.HOLD if self.units.place[name][0].bytes is Bytes.BOUND else TensorState.RELEASED

    def use(self, name: str) -> None:
        """-> COMPUTE, once more. Its bytes are near, and the caller has pinned them."""
        self.uses[name] += 1
        self.params[name].__class__ = self._classes[name][0]

    def end_use(self, name: str) -> None:
        """COMPUTE -> HOLD, when it was the last use. Raises StateError for a parameter that is not COMPUTE."""
        if not self.uses[name]:
            raise StateError(f"{name} is released but not in use: it is {self.state(name).name}")
        self.uses[name] -= 1
        if not self.uses[name]:
            self.params[name].__class__ = self._classes[name][1]

    # ------------------------------------------------------------------- views

    def bind(self, unit: UnitRecord, data: torch.Tensor) -> None:
        """RELEASED -> HOLD: a unit's parameters become views of its near buffer."""
        with torch._C.DisableTorchFunctionSubclass():    # idle parameters would take it for an operation of the model's
            for slot in unit.spec.slots:
                self.params[slot.name].data = self.view(slot.name, data)
        unit.move(Bytes.BOUND)
        unit.address = data.data_ptr()
        self._unit_at[unit.address] = unit
        self.num_bound += 1

    def view(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """A parameter's place in its unit's buffer, as a tensor of its shape. (One call: slice and view are two.)"""
        return data.as_strided(self.shapes[name], self.strides[name], self.units.place[name][1])

    def leave(self, key: Key, buffer: torch.Tensor) -> bool:
        """HOLD -> RELEASED: the residency is about to take a block from near; whether somebody keeps a view of its buffer.

        Raises StateError where one of its parameters is in use.
        """
        unit = self.units.at.get(key)
        if unit is None or unit.bytes is Bytes.AWAY:
            return False
        bound = unit.bytes is Bytes.BOUND
        unit.move(Bytes.AWAY)
        if not bound:
            return False
        self.num_bound -= 1
        del self._unit_at[unit.address]
        self._release_data(unit)
        if not Tier.shared(buffer):
            return False
        self._has_views = True    # who saves one of these views for backward need not keep its memory till then
        buffer.untyped_storage()._pstar_unit = unit.spec, self.schedule.num_steps
        return True

    def _release_data(self, unit: UnitRecord) -> None:
        """Parameters of a unit become placeholders."""
        with torch._C.DisableTorchFunctionSubclass():    # as in bind
            for slot in unit.spec.slots:
                if self.uses[slot.name]:
                    raise StateError(f"{slot.name} is in use (COMPUTE) and cannot be released")
                self.params[slot.name].data = self._placeholder.expand(self.shapes[slot.name])

    def release_all(self) -> None:
        """All parameters become placeholders, and idle: from now on their memory is in chunks."""
        for unit in self.units.records:
            self._release_data(unit)
        for name, param in self.params.items():
            param.__class__ = self._classes[name][1]

    def lend_all(self) -> None:
        """No parameter is idle: all are near, and nothing will make them leave."""
        for name, param in self.params.items():
            param.__class__ = self._classes[name][0]

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit into whose near buffer a tensor points, or, in this step, pointed; None for a tensor of other memory."""
        storage = tensor.untyped_storage()
        unit = self._unit_at.get(storage.data_ptr())
        if unit is None and self._has_views:
            spec, step = getattr(storage, "_pstar_unit", (None, None))
            return spec if step == self.schedule.num_steps else None
        return None if unit is None else unit.spec

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._placeholder.data_ptr()
