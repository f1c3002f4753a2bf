"""Resident steps: with `near_memory`, steps in which all model data stay near, so that no module acquires its parameters.

A step follows its trace because blocks may have to leave. If all of them fit next to the largest peak of activations, none
leaves, and the hooks of each module do needless work: on a GPU with them, 1.5 billion parameters trained at 0.68 of plain
PyTorch's speed. Nor does a gradient have to be in a chunk then: autograd's own is kept (kept_gradients.py).
So a step is resident if a step of the same shapes has followed the same trace to its end, everything fits at that trace's
peak, and all parameters are near. All units are pinned until a resident step ends, because autograd's graph refers to the
parameters themselves. After an error the step stays resident: there may be a graph from before it.

The trace is not followed then, so a change of the program must be seen in another way: by the modules that run, in their
order (`path`). If they differ from those of the step that followed the trace, the trace is forgotten, and the next step is
recorded anew. The step that differs may take more memory than near_memory, if it runs larger modules than before. Inputs of
another shape end the residence, unless a graph waits for its backward.
"""

from __future__ import annotations

from collections.abc import Hashable

from pstar.chunks.gradients import Gradients
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.layout.budget import near_data_bytes
from pstar.memory.block import Pins
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import NEAR
from pstar.planner.plan import Plan


class ResidentSteps:
    """Decides at the beginning of each step whether it is resident.

    Args:
        plan: without near_memory no step is resident: where all data fit, parameters stay bound from the start on.
        unsharding: binds the parameters.
        store: its schedule has the traces.
        tiers: tell whether all optimizer states are near.
        kept: keeps autograd's own gradients.
    """

    def __init__(self, plan: Plan, unsharding: Unsharding, store: BlockStore, tiers: UpdateTiers, kept: Gradients):
        self._unsharding, self._store, self._tiers = unsharding, store, tiers
        self.kept = None if plan.accumulates or plan.grad_dtype != plan.param_dtype else kept
        """Has the gradients of resident steps. None: chunks have them, because they are summed or have another dtype."""
        self._near_memory, self._whole_bytes = plan.near_memory or 0, near_data_bytes(plan.layout, plan.costs)
        self._trained_elems = sum(group.piece_elems for group in plan.layout.trained)
        self._possible = (unsharding.units.one_rank and plan.near_memory is not None and plan.log_budget is None
                          and plan.config.profile is None and not plan.config.offload_activations)
        self.active = False
        """Whether this step is resident."""
        self.keeps_gradients = False
        """Whether the gradients of this step are `kept`. If it stops being resident, they still are until its end."""
        self.path = 0
        """A hash of the modules that this step has called with gradients, in their order."""
        self._step, self._shapes = -1, None
        self._graphs = 0
        """Forwards of this step that had no backward yet. Their graphs hold parameters, which must stay as they are."""
        self._pins = Pins()

    def begin_forward(self, shapes: Hashable) -> None:
        """To be called before each training forward, with the shapes of its inputs."""
        schedule = self._store.schedule
        if schedule.num_steps != self._step:
            self._step, self._shapes, self.path, self._graphs = schedule.num_steps, shapes, 0, 0
            if self._possible and self._fits(room := self._room()):
                self._begin(room)
        elif self.active and shapes != self._shapes and not self._graphs:
            self._end()    # the rest of the step has no trace
            schedule.forget()
            self.keeps_gradients = self.keeps_gradients and self.kept.waiting()
        if self.active:
            self._unsharding.parameters.lend_all()
        self._graphs += 1
        self.path = hash((self.path, shapes))

    def end_backward(self) -> None:
        """To be called after a backward that did not fail."""
        self._graphs -= 1

    def _room(self) -> int:
        """Bytes that activations leave for chunks at every moment of a followed trace; -1 without one."""
        trace = self._store.schedule.trace
        return -1 if trace is None or trace.path is None else self._near_memory - max(trace.peaks)

    def _fits(self, room: int) -> bool:
        """Whether all model data fit into the room, and all that the trace needs is near."""
        store = self._store
        if self._whole_bytes > min(room, store.tiers[NEAR].budget_bytes) or self._tiers.near_elems < self._trained_elems:
            return False
        return all(store.is_near(key) for key in self._unsharding.units.at if key in store.schedule.trace.positions)

    def _begin(self, room: int) -> None:
        store, unsharding = self._store, self._unsharding
        store.limit(room)
        for unit in unsharding.units.records:
            unsharding.unshard(unit)
            self._pins.add(store.blocks[unit.key])
        unsharding.parameters.lend_all()
        store.schedule.leave_trace()
        # After an evaluation a program may have called loss.backward(): its gradients are in chunks, so the others go there.
        self.keeps_gradients = self.kept is not None and not self.kept.waiting()
        self.active = True

    def _end(self) -> None:
        self.active = False
        self._pins.__exit__()
        self._pins = Pins()
        self._unsharding.parameters.idle_all()

    def end_step(self) -> None:
        """To be called when the updates are done, before the schedule ends the step."""
        schedule = self._store.schedule
        trace = schedule.trace
        self.keeps_gradients = False
        if self.active:
            self._end()
            if self.path != trace.path:
                schedule.forget()
        elif trace is not None and schedule.moment + 1 == len(trace):
            trace.path = self.path
