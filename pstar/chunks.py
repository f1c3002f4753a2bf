"""Parameters and gradients in chunks: what is COMPUTE, HOLD or RELEASED, and how a group comes near.

A parameter is a view into its group's near buffer while that is there (COMPUTE: in use, pinned; HOLD: may be evicted), and
an expanded NaN without memory otherwise (RELEASED): its shape stays. While it is not COMPUTE its class is Idle, so that
whoever uses it out of turn gets its bytes first (pstar.borrowed). A group is pinned while one of its parameters is COMPUTE.

With one process a group's near buffer is its ("param", g) block. With p ranks each rank keeps its own piece in
("param", g), and the near buffer is ("gathered", u), dropped when it must leave. A *unit* u is what one collective brings
together: a group, p pieces filled by an all-gather; or, to save memory, a chunk, broadcast by its owner.

Collectives go on while the rank computes. The next unit of the trace is gathered ahead, and what lies in a slower tier is
brought ahead too: see pstar.ahead. A unit whose gradients are complete is reduced until the next one is, until room is
needed, or until backward ends. All of these moments follow from the program and the budget, never from how fast a rank is:
the ranks must agree about evictions. For the same reason every rank has the same blocks near: pieces are created on all
ranks at the same moments.
"""

from collections.abc import Callable
from enum import Enum

import torch

from pstar.ahead import LookAhead
from pstar.borrowed import idle_class
from pstar.collective_log import CollectiveLog
from pstar.collectives import Collectives, Handle
from pstar.errors import BudgetError, StateError
from pstar.kernels import store_squared
from pstar.layout import Layout, Unit
from pstar.residency import Key, Residency
from pstar.tiers import FAR, NEAR, Tier


class TensorState(Enum):
    COMPUTE = "in use: its bytes are near and must stay"
    HOLD = "its bytes are near and may leave"
    RELEASED = "its bytes are not near"


class Chunks:
    """The model's parameters and their gradients on this rank.

    Args:
        layout: every parameter's place.
        params: qualified name to parameter, in the model's order; a tied parameter once.
        residency, collectives: the layers below.
        param_dtype, grad_dtype: of the chunks.
        device: of near.
        communication: gather and reduce a whole "group" at once, or one "chunk".
        prefetch: how many keys of the trace to look ahead (pstar.ahead); 0: nothing comes before it is needed.
        grow: asked for so many bytes beyond what is in use near, where parameters find no room; whether they are allowed.
    """

    def __init__(self, layout: Layout, params: dict[str, torch.nn.Parameter], residency: Residency,
                 collectives: Collectives, param_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device,
                 communication: str = "group", prefetch: int = 2, grow: Callable[[int], bool] = lambda num_bytes: False):
        self._grow = grow
        self.layout, self.params = layout, params
        self.residency, self.collectives = residency, collectives
        self.param_dtype, self.grad_dtype, self.device = param_dtype, grad_dtype, device
        self.slots = layout.slots
        self.units = layout.units(communication)
        self._place = {slot.name: (unit.index, slot.offset) for unit in self.units for slot in unit.slots}
        one = collectives.num_ranks == 1
        self._keys = [("param" if one else "gathered", unit.index) for unit in self.units]
        self._grad_keys = [("grad" if one else "grad_full", unit.index) for unit in self.units]
        self.shapes = {name: param.shape for name, param in params.items()}
        self.strides = {name: torch.empty(shape, device="meta").stride() for name, shape in self.shapes.items()}
        self._placeholder = torch.full((), float("nan"), dtype=param_dtype, device=device)
        self._classes = {name: (type(param), idle_class(type(param))) for name, param in params.items()}
        self._uses: dict[str, int] = dict.fromkeys(params, 0)          # COMPUTE is counted: modules nest
        self._bound: set[int] = set()                                  # units whose parameters are views of near
        self._unit_at: dict[int, int] = {}                             # address of a near buffer -> unit
        self._address: dict[int, int] = {}                             # and the other way round
        self._has_views = False                                        # whether anybody ever kept a view of a near buffer
        self._arrived: list[set[str]] = [set() for _ in self.units]    # gradients in this step
        self._summed: list[set[str]] = [set() for _ in self.units]     # gradients in this micro-step
        self._leaving: list[set[str]] = [set() for _ in self.units]    # of these, those in the ("micro_grad", u) block
        self._trainable: dict[int, int] = {}                           # number of parameters that will get one
        self._reduced: set[int] = set()                                # units whose gradients are, or are being, reduced
        self.home = [FAR] * len(layout.groups)
        """The tier in which each group's optimizer states lie and its update is computed."""
        self.accumulates = False
        """Whether a step has several micro-steps."""
        self.reduce_late = False
        """Reduce all units after backward, in the order of their numbers, instead of each as soon as it is complete."""
        self.completed: list[int] = []
        """The groups whose gradients were complete in this step, one after the other."""
        self.log = CollectiveLog(collectives, device)
        self._units_of: dict[int, list[int]] = {}
        for unit in self.units:
            self._units_of.setdefault(unit.group, []).append(unit.index)
        self.update_tier = lambda group: self.home[group]
        """The tier in which a group's update is computed."""
        self.room: Callable[[int | None], int | None] | None = None
        """From the bytes of other things near (None: not known) to what chunks may take of near; None: the budget."""
        self.at_moment: Callable[[int | None], None] = lambda peak: None
        """Told the same at each moment, when the chunks that had to leave for it have left."""
        self.store_grad: Callable[[str, torch.Tensor, torch.Tensor, bool, int | None], object] = (
            lambda name, place, grad, add, num_threads: store_squared(place, grad, add, num_threads))
        """Given (name, place, gradient, add, number of threads or None): puts a gradient into its place, or adds it to what
        is there."""
        self.on_grads: Callable[[int, torch.Tensor], None] = lambda group, piece: None
        """Told a group, and this rank's piece of its reduced gradients, when they are complete."""
        residency.schedule.uses = self._uses_of
        self._ahead: dict[int, Handle] = {}     # units that are being gathered before they are needed
        self._reducing: dict[int, Handle] = {}  # units whose gradients are being reduced
        residency.settle = self.settle
        self._look_ahead = LookAhead(self, prefetch)

    # ------------------------------------------------------------- parameters

    def key(self, unit: int) -> Key:
        """The block that parameters are views of."""
        return self._keys[unit]

    def state(self, name: str) -> TensorState:
        if self._uses[name]:
            return TensorState.COMPUTE
        return TensorState.HOLD if self._place[name][0] in self._bound else TensorState.RELEASED

    def fetch(self, unit: int) -> torch.Tensor:
        """The unit's near buffer with everybody's pieces; brings them near when they are not."""
        if torch.is_inference_mode_enabled():    # a parameter that became a view in it would never get a gradient again
            with torch.inference_mode(False), torch.no_grad():
                return self.fetch(unit)
        key = self._keys[unit]
        self._touch(key)
        if self.collectives.num_ranks == 1:
            data = self.residency.ensure(key, NEAR)
        else:
            self.collectives.progress()
            if not self.residency.is_near(key):
                self._gather(unit).wait()
            elif unit in self._ahead:
                self._end_gather(unit)
            data = self.residency.peek(key)[1]
        if unit not in self._bound:
            self._bind(unit, data)
        return data

    def _gather(self, unit: int) -> Handle:
        self.log.gather(unit)
        spec, rank = self.units[unit], self.collectives.rank
        data = self.residency.create(("gathered", unit), spec.elems, self.param_dtype, NEAR, derived=True)
        self.residency.pin(("gathered", unit))
        tier, own = self.residency.peek(("param", spec.group))
        self.residency.unpin(("gathered", unit))
        if spec.owner is None:
            self.residency.copy(data.view(self.layout.num_ranks, -1)[rank], own, tier, NEAR)
            return self.collectives.all_gather(data)
        if spec.owner == rank:
            self.residency.copy(data, own, tier, NEAR)
        return self.collectives.broadcast(data, spec.owner)

    def first_use(self, group: int) -> float:
        """The moment of this step at which a parameter of the group was needed first."""
        return min(self.residency.schedule.first_use(self._keys[unit]) for unit in self._units_of[group])

    def _touch(self, key: Key) -> None:
        """The next moment, if it is another: near gives room to what else will be there until the one after it."""
        schedule = self.residency.schedule
        if key == schedule.last:
            return
        schedule.touch(key)
        if self.room is None:
            return
        room = self.room(schedule.peak)
        if room is not None and room != self.residency.tiers[NEAR].limit_bytes:
            held = self.residency.is_near(key)
            if held:
                self.residency.pin(key)    # not the one that is about to be used
            self.residency.limit(room)
            if held:
                self.residency.unpin(key)
        self.at_moment(schedule.peak)

    def _uses_of(self, key: Key) -> list[Key]:
        """Under which keys of the trace a block is used."""
        kind, index = key
        if kind in ("gathered", "grad_full", "micro_grad"):
            return [key]
        uses = [("adam", index)]
        if kind == "param":
            uses += [self.key(unit) for unit in self._units_of[index]]
        elif kind == "grad" and self.collectives.num_ranks == 1:
            uses.append(key)
        return uses

    def touch_update(self, group: int) -> None:
        """The update of a group is the next moment. Updates may come in any order: the trace learns the last one."""
        self.residency.schedule.in_its_turn(("adam", group))
        self._touch(("adam", group))
        self._look_ahead()

    def gather_ahead(self, unit: int) -> None:
        """Begins to gather a unit that is not near; it stays until it is used."""
        self._ahead[unit] = self._gather(unit)
        self.residency.pin(("gathered", unit))

    def _end_gather(self, unit: int) -> None:
        self._ahead.pop(unit).wait()
        self.residency.unpin(("gathered", unit))

    def settle(self) -> bool:
        """Ends all collectives that are under way; whether there were any."""
        under_way = bool(self._ahead or self._reducing)
        for unit in list(self._ahead):
            self._end_gather(unit)
        for unit in list(self._reducing):
            self._end_reduce(unit)
        return under_way

    def _bind(self, unit: int, data: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():    # idle parameters would take it for an operation of the model's
            for slot in self.units[unit].slots:
                self.params[slot.name].data = self._view(slot.name, data)
        self._bound.add(unit)
        self._unit_at[data.data_ptr()] = unit
        self._address[unit] = data.data_ptr()

    def _view(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """A parameter's place in its unit's buffer, as a tensor of its shape. (One call: slice and view are two.)"""
        return data.as_strided(self.shapes[name], self.strides[name], self._place[name][1])

    def on_leave(self, key: Key) -> bool:
        """The residency is about to take a block from near; whether parameters were views of it."""
        kind, unit = key
        bound = kind == self.key(unit)[0] and unit in self._bound
        if bound:
            self._bound.discard(unit)
            del self._unit_at[self._address.pop(unit)]
            self._release_data(unit)
            buffer = self.residency.blocks[key].copies[NEAR]
            if Tier.shared(buffer):    # who saves one of these views for backward need not keep its memory till then
                self._has_views = True
                buffer.untyped_storage()._pstar_unit = unit, self.residency.schedule.num_steps
        return bound

    def _release_data(self, unit: int) -> None:
        """Parameters of a unit become placeholders."""
        with torch._C.DisableTorchFunctionSubclass():    # as in _bind
            for slot in self.units[unit].slots:
                if self._uses[slot.name]:
                    raise StateError(f"{slot.name} is in use (COMPUTE) and cannot be released")
                self.params[slot.name].data = self._placeholder.expand(self.shapes[slot.name])

    def bind_all(self) -> None:
        """RELEASED -> HOLD: all parameters come near, where nothing will make them leave. Between two steps, or in one."""
        if len(self._bound) < len(self.units):
            with self.residency.schedule.paused():    # which modules use them when is of no interest
                for unit in self.units:
                    self.fetch(unit.index)
            for name, param in self.params.items():
                param.__class__ = self._classes[name][0]

    def release_all(self) -> None:
        """All parameters become placeholders, and idle: from now on their memory is in chunks."""
        for unit in self.units:
            self._release_data(unit.index)
        for name, param in self.params.items():
            param.__class__ = self._classes[name][1]

    def acquire(self, names: tuple[str, ...]) -> None:
        """HOLD or RELEASED -> COMPUTE: the parameters' bytes come near and stay."""
        there = None
        for name in names:
            unit = self._place[name][0]
            if unit != there:    # which is pinned, and stays
                try:
                    self.fetch(unit)
                except BudgetError:
                    if not self._grow(self.units[unit].elems * self.param_dtype.itemsize):
                        raise
                    self.fetch(unit)
                there = unit
            self.residency.pin(self._keys[unit])
            self._uses[name] += 1
            self.params[name].__class__ = self._classes[name][0]
        if names:
            self._look_ahead()

    def release(self, names: tuple[str, ...]) -> None:
        """COMPUTE -> HOLD. Raises StateError for a parameter that is not COMPUTE."""
        self.collectives.progress()
        for name in names:
            if not self._uses[name]:
                raise StateError(f"{name} is released but not in use: it is {self.state(name).name}")
            self._uses[name] -= 1
            if not self._uses[name]:
                self.params[name].__class__ = self._classes[name][1]
            self.residency.unpin(self._keys[self._place[name][0]])

    def release_uses(self) -> None:
        """COMPUTE -> HOLD for all that is in use, whoever acquired it."""
        for name, count in self._uses.items():
            self.release((name,) * count)

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit into whose near buffer a tensor points, or, in this step, pointed; None for a tensor of other memory."""
        storage = tensor.untyped_storage()
        unit = self._unit_at.get(storage.data_ptr())
        if unit is None and self._has_views:
            unit, step = getattr(storage, "_pstar_unit", (None, None))
            unit = unit if step == self.residency.schedule.num_steps else None
        return None if unit is None else self.units[unit]

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._placeholder.data_ptr()

    def drop_gathered(self, group: int) -> None:
        """The group's gathered copies are out of date: somebody's piece was updated."""
        for unit in self.units:
            if unit.group == group and ("gathered", unit.index) in self.residency:
                if unit.index in self._ahead:
                    self._end_gather(unit.index)
                self.residency.drop(("gathered", unit.index))

    # -------------------------------------------------------------- gradients

    def add_grad(self, name: str, grad: torch.Tensor, last_micro_step: bool) -> None:
        """A parameter's gradient is there: it goes into its slot, and a group that is complete is reduced."""
        unit = self._place[name][0]
        sums_far = self._sums_far(unit)
        key = ("micro_grad", unit) if sums_far else self._grad_keys[unit]
        self._touch(key)
        self.collectives.progress()
        if unit in self._reduced:
            raise StateError(f"{name} got a second gradient in one backward, after its group was reduced: on several ranks "
                             "a layer that is used twice needs checkpoint(..., use_reentrant=False), or the "
                             "configuration \"find_unused_parameters\": true")
        if key in self.residency:
            data = self.residency.ensure(key, NEAR)
        else:
            dtype = self.param_dtype if sums_far else self.grad_dtype
            data = self.residency.create(key, self.units[unit].elems, dtype, NEAR)
        place, there = self._view(name, data), self._arrived[unit]
        if sums_far:
            there = self._leaving[unit]
            store_squared(place, grad, name in there, implementation="torch")    # the sum is what is squared
        else:
            self.store_grad(name, place, grad, name in there, None)
        self.residency.mark_written(key, NEAR)
        there.add(name)
        self._summed[unit].add(name)
        complete = len(self._summed[unit]) == self._num_trainable(unit)
        if complete and sums_far:
            self._add_far(unit)
        elif complete and last_micro_step and not self.reduce_late:
            self._complete(unit)

    def _sums_far(self, unit: int) -> bool:
        """Whether gradients of several micro-steps are added up far: where one rank updates them there. What crosses the
        link is then each micro-step's gradient, in the dtype of the parameters, never the fp32 sum, and near keeps none."""
        return self.accumulates and self.collectives.num_ranks == 1 and self.home[self.units[unit].group] == FAR

    def _add_far(self, unit: int) -> None:
        """A micro-step's gradients of a unit leave near and are added to their fp32 sums, in the background."""
        residency, micro, total = self.residency, ("micro_grad", unit), ("grad", unit)
        if total not in residency:
            self._create_grad(self.units[unit].group, FAR)
        residency.send_far(micro)
        names, self._leaving[unit] = self._leaving[unit], set()
        parts = [(slot.name, slice(slot.offset, slot.offset + slot.numel), slot.name in self._arrived[unit])
                 for slot in self.units[unit].slots if slot.name in names]
        # A second team of OpenMP threads beside the model's would slow the model down (see Movers.copy).
        num_threads = 1 if self.device.type == "cpu" and residency.movers.asynchronous else None

        def prepare(buffers: dict[Key, torch.Tensor]) -> Callable[[], None]:
            def add() -> None:
                for name, part, adds in parts:
                    self.store_grad(name, buffers[total][part], buffers[micro][part], adds, num_threads)

            return add

        residency.work(f"sum of gradients {unit}", [micro, total], FAR, prepare, residency.movers.asynchronous)
        residency.drop(micro)
        self._arrived[unit] |= names

    def end_backward(self, last_micro_step: bool) -> None:
        """Backward is over. After the last micro-step, units that wait for gradients that never come are reduced."""
        for unit, names in enumerate(self._leaving):
            if names:
                self._add_far(unit)
        if self.reduce_late and last_micro_step:
            self._complete_late()
            self.settle()
            return
        for unit, summed in enumerate(self._summed):
            waits = self._arrived[unit] and self._grad_keys[unit] in self.residency and not self._sums_far(unit)
            if last_micro_step and waits and len(summed) < self._num_trainable(unit):
                self._complete(unit)
            summed.clear()
        self.settle()

    def _complete_late(self) -> None:
        """Reduces every unit in which some rank has a gradient: those of a rank that has none are zero."""
        with_grads = torch.tensor([float(bool(names)) for names in self._arrived], dtype=torch.float64, device=self.device)
        for unit, num_ranks in enumerate(self.collectives.sum(with_grads).tolist()):
            self._summed[unit].clear()
            if not num_ranks:
                continue
            if self._grad_keys[unit] not in self.residency:    # with one rank this does not happen
                self.residency.create(self._grad_keys[unit], self.units[unit].elems, self.grad_dtype, NEAR)
            self._complete(unit)

    def _num_trainable(self, unit: int) -> int:
        """Counted once a step: what is frozen between two steps is frozen for the whole one."""
        if unit not in self._trainable:
            self._trainable[unit] = sum(self.params[slot.name].requires_grad for slot in self.units[unit].slots)
        return self._trainable[unit]

    def _complete(self, unit: int) -> None:
        """All gradients of a unit are there: they begin to be reduced, and the piece goes to where the update will be."""
        spec = self.units[unit]
        self.completed.append(spec.group)
        if self.collectives.num_ranks == 1:
            self.tell_grads(spec.group)
            if self.home[spec.group] == FAR:
                self.residency.send_far(("grad", spec.group))
                self._let_go(spec.group)
            return
        for other in list(self._reducing):
            self._end_reduce(other)
        self.log.reduce(unit)
        self._reduced.add(unit)
        full = self.residency.ensure(("grad_full", unit), NEAR)
        for slot in spec.slots:
            if slot.name not in self._arrived[unit]:
                full[slot.offset : slot.offset + slot.numel].zero_()    # another rank may have one
        self.residency.pin(("grad_full", unit))
        if spec.owner is None:
            piece = self._create_grad(spec.group, NEAR)
            self.residency.pin(("grad", spec.group))
            self._reducing[unit] = self.collectives.reduce_scatter_mean(piece, full)
        else:
            self._reducing[unit] = self.collectives.reduce_mean(full, spec.owner)

    def _let_go(self, group: int) -> None:
        """Parameters that will be updated far, and not be used before, have no use for their near copy: it goes now. So
        the next gradients get memory that nobody reads any more, where they would wait for the last ones to leave theirs."""
        key, residency = ("param", group), self.residency
        trace, moment, block = residency.schedule.trace, residency.schedule.moment, residency.blocks[key]
        if (trace is not None and self.update_tier(group) == FAR and FAR in block.copies and not block.pins
                and trace.next_use(("adam", group), moment) < trace.next_use(key, moment)):
            residency.send_far(key)

    def _create_grad(self, group: int, tier: str) -> torch.Tensor:
        return self.residency.create(("grad", group), self.layout.groups[group].piece_elems, self.grad_dtype, tier)

    def _end_reduce(self, unit: int) -> None:
        """The unit's gradients are reduced: this rank's piece goes to where the update will be."""
        spec, handle = self.units[unit], self._reducing.pop(unit)
        key, home = ("grad", spec.group), self.home[spec.group]
        handle.wait()
        if spec.owner is not None:
            if key not in self.residency:    # made by all ranks when the first chunk of the group is there
                self._create_grad(spec.group, home)
            if spec.owner == self.collectives.rank:
                tier, piece = self.residency.peek(key)
                self.residency.copy(piece, self.residency.peek(("grad_full", unit))[1], NEAR, tier)
                self.tell_grads(spec.group)
        else:
            self.tell_grads(spec.group)
            self.residency.unpin(key)
        self.residency.unpin(("grad_full", unit))
        self.residency.drop(("grad_full", unit))
        if spec.owner is None and home == FAR:
            self.residency.send_far(key)

    def tell_grads(self, group: int) -> None:
        """Tells on_grads of a group, wherever its gradients are."""
        with self.residency.reading([("grad", group)]) as places:
            self.on_grads(group, places["grad", group][1])

    def arrived(self, name: str) -> bool:
        """Whether the parameter got a gradient in this step, on this rank."""
        return name in self._arrived[self._place[name][0]]

    def drop_grads(self) -> None:
        """Forgets all gradients, as zero_grad does."""
        self.settle()
        self._look_ahead.forget()
        self._reduced.clear()
        self.completed.clear()
        self._trainable.clear()
        for kind, number in (("grad", len(self.layout.groups)), ("grad_full", len(self.units)),
                             ("micro_grad", len(self.units))):
            for index in range(number):
                if (kind, index) in self.residency:
                    self.residency.finish((kind, index))    # what is still added would tell of its squares afterwards
                    self.residency.drop((kind, index))
        for names in (*self._arrived, *self._summed, *self._leaving):
            names.clear()
