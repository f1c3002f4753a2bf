"""What happens when a module acquires parameters, when it releases them, and when a gradient arrives: read downwards.

    acquire -> _need -> _touch              the next moment of the schedule; near's limit shrinks to what activations leave
                     -> Unsharding.unshard  copies the bytes to near, from far or all ranks; parameters become views of them
            -> Parameters.use               COMPUTE: pinned, and no longer idle
            -> Prefetch                     begins to copy what the trace names next

Collectives overlap with computation. The next unit of the trace is gathered ahead (prefetch.py). The reduction of a complete
unit ends when the next unit is complete (gradients.py). When they begin and end depends on the program and the budget only,
never on how fast a rank is: the ranks must agree about evictions.
"""

from collections.abc import Hashable

import torch

from pstar.chunks.gradients import Gradients
from pstar.chunks.modes import level_of_transforms, num_dispatch_modes, outside_modes, program_sees_operations
from pstar.chunks.parameters import Parameters
from pstar.chunks.prefetch import Prefetch
from pstar.chunks.resident import ResidentSteps
from pstar.chunks.room import NearRoom
from pstar.chunks.unit import UnitRecord
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.comm.collectives import Collectives
from pstar.errors import BudgetError
from pstar.memory.block import Key
from pstar.memory.block_log import BlockLog
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import DISK, NEAR


class Chunks:
    """The model's parameters and their gradients on this rank: the interface for hooks and the optimizer.

    Args:
        parameters: binds parameters to near buffers.
        gradients: collects and reduces gradients.
        unsharding: copies parameters to near.
        prefetch: begins to copy what the trace names next.
        room: the bytes that chunks may take of near.
        tiers: the tier in which each group is updated.
        store, collectives: the layers below: blocks in tiers, and communication.
        log: what updates have overwritten that began in backward; None: no update does.
        resident: tells whether all model data stay near in this step.
    """

    def __init__(self, parameters: Parameters, gradients: Gradients, unsharding: Unsharding, prefetch: Prefetch,
                 room: NearRoom, tiers: UpdateTiers, store: BlockStore, collectives: Collectives, log: BlockLog | None,
                 resident: ResidentSteps):
        self.parameters, self.gradients, self.unsharding, self.prefetch = parameters, gradients, unsharding, prefetch
        self._in_chunks = gradients
        self.room, self.tiers, self.store, self.collectives, self.log = room, tiers, store, collectives, log
        self.schedule, self.units, self.resident = store.schedule, parameters.units, resident
        self.layout, self.params = parameters.units.layout, parameters.params

    # ------------------------------------------------------------- a step

    def begin_forward(self, shapes: Hashable) -> None:
        """To be called before each training forward, with the shapes of its inputs."""
        self.resident.begin_forward(shapes)
        self.gradients = self.resident.kept if self.resident.keeps_gradients else self._in_chunks

    def end_step(self) -> None:
        """To be called when the updates are done, before the schedule ends the step."""
        self.gradients = self._in_chunks
        self.resident.end_step()

    # ------------------------------------------------------------- a module needs parameters

    def acquire(self, names: tuple[str, ...]) -> None:
        """HOLD or RELEASED -> COMPUTE: the parameters' bytes are copied to near and pinned there."""
        if level_of_transforms() is not None or num_dispatch_modes() and program_sees_operations():
            with outside_modes():
                return self.acquire(names)
        pinned = None
        for name in names:
            unit = self.units.place[name][0]
            if unit is not pinned:    # the last name's unit: it cannot leave
                try:
                    self._need(unit)
                except BudgetError:
                    if not self.room.grow(unit.spec.elems * self.parameters.dtype.itemsize):
                        raise
                    self._need(unit)
                pinned = unit
            self.store.pin(unit.key)
            self.parameters.use(name)
        if names:
            self.prefetch()

    def _need(self, unit: UnitRecord) -> None:
        """Touches the schedule, shrinks near's limit to what activations leave, and unshards the unit."""
        if torch.is_inference_mode_enabled():    # a parameter bound in inference mode would never get a gradient again
            with torch.inference_mode(False), torch.no_grad():
                return self._need(unit)
        if self.log is not None:
            self._undo_update(unit)
        if unit.key != self.schedule.last:
            self._touch(unit.key)
        self.unsharding.unshard(unit)

    def _undo_update(self, unit: UnitRecord) -> None:
        """Undoes an update that has begun before all uses of this step were over, which the trace did not know."""
        if unit.spec.group in self.log:
            self.log.restore(unit.spec.group)

    def _touch(self, key: Key) -> None:
        """Advances the schedule to its next moment, and sets near's limit to what this moment's activations leave."""
        self.schedule.touch(key)
        if self.room.watch is not None and not self.resident.active:
            self._shrink_room(key, self.schedule.peak)

    def end_measuring(self) -> None:
        """Ends the last moment of a recorded forward and backward: activations are measured no longer."""
        watch = self.room.watch
        if watch is not None and watch.runs:
            self.schedule.end_moment()
            watch.stop()

    def _shrink_room(self, key: Key, peak: int | None) -> None:
        """Evicts chunks from near until `peak` bytes of activations fit next to them. The block of key, which is about to be
        used, stays."""
        store, room = self.store, self.room.left_by(peak)
        if room is not None and room != store.tiers[NEAR].limit_bytes:
            if store.is_near(key):
                with store.pinned(key):
                    store.limit(room)
            else:
                store.limit(room)
        self.room.watch.report(peak)

    def release(self, names: tuple[str, ...]) -> None:
        """COMPUTE -> HOLD. Raises StateError for a parameter that is not COMPUTE."""
        if level_of_transforms() is None and not (num_dispatch_modes() and program_sees_operations()):
            self.collectives.progress()    # else the next call will: a collective copies tensors
        blocks, place = self.store.blocks, self.units.place
        for name in names:
            self.parameters.end_use(name)
            blocks[place[name][0].key].unpin()

    def release_uses(self) -> None:
        """COMPUTE -> HOLD for all parameters in use, whoever acquired them."""
        for name, count in self.parameters.uses.items():
            self.release((name,) * count)

    def bind_all(self) -> None:
        """RELEASED -> HOLD: copies all parameters to near, from where none is evicted. Between two steps, or in one."""
        if self.parameters.num_bound < len(self.units.records):
            if level_of_transforms() is not None or num_dispatch_modes() and program_sees_operations():
                with outside_modes():
                    return self.bind_all()
            with self.schedule.paused():    # nothing will be evicted, so the trace need not know their uses
                for unit in self.units.records:
                    self._need(unit)

    @torch.compiler.disable
    def lend_all(self) -> None:
        """As bind_all, and no parameter is Idle: a forward in which all of them stay near."""
        self.bind_all()
        self.parameters.lend_all()

    # ------------------------------------------------------------- a gradient arrives

    def add_grad(self, name: str, grad: torch.Tensor, last_micro_step: bool) -> None:
        """Stores a parameter's gradient in its slot; reduces the unit if all its gradients have arrived."""
        gradients, unit = self.gradients, self.units.place[name][0]
        key = gradients.key_of(unit)
        if self.log is not None:
            self._undo_update(unit)
        if key != self.schedule.last:
            self._touch(key)
        gradients.add_grad(unit, key, name, grad, last_micro_step)

    def drop_grads(self) -> None:
        """Forgets all gradients, as zero_grad does."""
        self.gradients.drop_grads()
        self.prefetch.forget()

    # ------------------------------------------------------------- a group is updated

    def first_use(self, group: int) -> float:
        """The moment of this step at which a parameter of the group was needed first."""
        return min(self.schedule.first_use(unit.key) for unit in self.units.of_group[group])

    def touch_update(self, group: int) -> None:
        """The update of a group is the next moment. Updates may come in any order: the trace keeps this step's order.

        Call `prefetch` when the group's blocks are pinned: before that they look unused until the next step, and would be
        evicted for the next group's.
        """
        self.schedule.expect_next(("adam", group))
        self._touch(("adam", group))

    def skip_update(self, group: int) -> None:
        """The group's moment passes without an update: a skipped step follows the trace too."""
        self.touch_update(group)
        self.prefetch()
        self.tiers.let_go.discard(group)

    def end_update(self, group: int) -> None:
        """The group was updated; drops its gradients: the next group's can use the room. With a disk the updated parameters
        then go to near for the next forward, as long as room there is free or used later: far's room goes to states that
        would be written to disk."""
        store = self.store
        self.gradients.drop(group)
        if DISK in store.tiers and self.units.one_rank and self.schedule.trace is not None:
            key = "param", group
            store.load_ahead(key, NEAR, self.schedule.next_use(key))
