"""Updates that begin during backward, before the global norm is known, and are undone if the step is clipped or skipped.

The norm of all gradients decides whether a step is clipped or skipped, so no update could begin before the last gradient is
there. SuperOffload (Lian et al., ASPLOS 2026, section on speculation-then-validation) updates each bucket at once, and
repairs the few steps in which that was wrong. Here a group with states in far is updated as soon as all its gradients are
there, summed over the micro-steps and reduced over the ranks. What the update overwrites is in a log (memory/block_log.py).

    gradient arrives      begin     the group's update with the factor of a step that is neither clipped nor skipped
    the group is touched  restore   by a forward, another gradient, whoever reads or writes its state (Chunks, state.py)
    optimizer.step()      settle    restores each group whose update would be another one now: another factor, learning
                                    rate, decay, number, set of parameters; `step` then updates it as any other group
                          keep      the rest is final
    skipped, zero_grad()  undo      restores all

Gradients go to far, groups are updated, and parameters come back near in the order in which the next forward needs them
(Links.by_need): backward computes first what forward needs last.

Gradients stay in far until the step has ended, as they do without this. So each group is updated once, from the old states,
with the numbers that `step` computes: no bit depends on speculation.

A group waits for `step` if its parameters or gradients are used again in this backward (the trace knows), if a parameter is
in use, if no trace is known, if the log is full, and if its update is computed near: near has no idle processor to gain.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch

from pstar.chunks import Chunks
from pstar.chunks.unit import UnitRecord
from pstar.errors import BudgetError
from pstar.kernels import AdamOptions
from pstar.memory.block import Key, Pins
from pstar.memory.block_log import BlockLog
from pstar.memory.tier import FAR
from pstar.optim.group_updates import GroupUpdates, Run

MOST_PAUSE = 64
"""Steps without speculation after several wrong ones in a row, at most."""


class Speculation:
    """Begins updates during backward, and undoes the wrong ones.

    After a step of which an update was wrong the next one waits, after a second such step the next two, then four, up to
    MOST_PAUSE: while training clips nearly every step, nearly no update is computed twice.

    Args:
        chunks: the parameters and gradients.
        log: keeps what an update overwrites.
        updates: computes the updates.
    """

    def __init__(self, chunks: Chunks, log: BlockLog, updates: GroupUpdates):
        self.chunks, self.log, self._updates = chunks, log, updates
        self._begun: dict[int, tuple[list[Run], float]] = {}
        """Group -> its update and the factor of its gradients."""
        self.begun = self.undone = 0
        """Updates in the whole run that began early, and those of them that `step` had to undo."""
        self._pause, self._next_pause = 0, 1
        self._options: Mapping[str, AdamOptions] | None = None    # when the step's first update began

    def watch(self, params: Iterable[torch.nn.Parameter], begin: weakref.WeakMethod) -> None:
        """Calls begin() after each gradient, behind the hooks that store it. Not through a reference that keeps its object:
        the garbage collector does not see those of a parameter's hooks."""
        ready = self.chunks.gradients.ready

        def look(_: torch.nn.Parameter) -> None:
            if ready and (function := begin()) is not None:
                function()

        for param in params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(look)

    # ---------------------------------------------------------------- during backward

    def begin(self, options: Callable[[], Mapping[str, AdamOptions]], steps: Mapping[str, int], grad_scale: float) -> None:
        """Begins the updates of the groups that are ready; those that are used again in this backward stay in the list.

        options: returns each parameter's options; called once a step. steps: of each parameter. grad_scale: the factor of a
        step that is not clipped.
        """
        ready = self.chunks.gradients.ready
        if self._pause:
            ready.clear()
            return
        waiting = [group for group in dict.fromkeys(ready) if not self._is_decided(group, options, steps, grad_scale)]
        ready[:] = waiting

    def _is_decided(self, group: int, options: Callable[[], Mapping[str, AdamOptions]], steps: Mapping[str, int],
                    grad_scale: float) -> bool:
        """Begins the group's update if it may. Returns False if it may later in this backward."""
        chunks, log = self.chunks, self.log
        units, keys = chunks.units.of_group[group], self._keys(group)
        known = chunks.schedule.trace is not None and not chunks.schedule.recording
        if group in log or chunks.tiers.update_tier(group) != FAR or not known or not log.has_room(keys):
            return True
        if any(self._is_used_again(unit) for unit in units):
            return False
        self._options = self._options or options()
        its_group, used = chunks.layout.groups[group], set().union(*(unit.arrived for unit in units))
        runs = self._updates.runs(its_group, used, self._options, {name: steps[name] + 1 for name in used})
        background = chunks.store.links.asynchronous
        # A second team of OpenMP threads would slow the model's own team down (see Links.copy).
        num_threads = 1 if background and chunks.parameters.device.type == "cpu" else None
        try:
            log.record(group, keys, chunks.gradients.blocks(group),
                       lambda buffers: self._updates.job(its_group, buffers, runs, grad_scale, num_threads),
                       f"early adam {group}", background)
        except BudgetError:    # no room in far now: after backward there is
            return True
        self._begun[group] = runs, grad_scale
        self.begun += 1
        return True

    def _is_used_again(self, unit: UnitRecord) -> bool:
        """Whether the unit's parameters are in use, or it will be touched before the update of this step."""
        schedule, block = self.chunks.schedule, self.chunks.store.blocks.get(unit.key)
        keys = (unit.key, unit.grad_key, ("micro_grad", unit.spec.index))
        return (block is not None and block.pins > 0) or any(
            schedule.trace.next_use(key, schedule.moment) < len(schedule.trace) for key in keys)

    def _keys(self, group: int) -> list[Key]:
        """The blocks that the group's update overwrites."""
        return [(kind, group) for kind in self._updates.precision.kinds]

    # ---------------------------------------------------------------- when the norm is known

    def settle(self, used: set[str], options: Mapping[str, AdamOptions], steps: Mapping[str, int],
               grad_scale: float) -> None:
        """Undoes each early update that is not the one of this step."""
        layout = self.chunks.layout
        wrong = [group for group, early in self._begun.items() if group in self.log
                 and early != (self._updates.runs(layout.groups[group], used, options, steps), grad_scale)]
        for group in wrong:
            self.log.restore(group)
        self._end(len(wrong))

    def undo(self, wrong: bool = False) -> None:
        """Undoes all early updates: the step is skipped (wrong), or its gradients are dropped."""
        num = self.log.restore_all()
        if wrong:
            self._end(num)
        self._begun.clear()
        self._options = None

    def _end(self, num_wrong: int) -> None:
        """Counts the step's wrong updates, and decides how long to wait after it."""
        self.undone += num_wrong
        if num_wrong:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, MOST_PAUSE)
        elif self._pause:
            self._pause -= 1
        elif self._begun:
            self._next_pause = 1
        self._begun.clear()
        self._options = None

    def is_early(self, group: int) -> bool:
        """Whether the group was updated and not undone."""
        return group in self.log

    def keep(self, group: int) -> None:
        """The group's early update is final: its moment of the trace passes as with an update in it."""
        chunks, store = self.chunks, self.chunks.store
        chunks.touch_update(group)
        chunks.unsharding.drop_gathered(group)
        with Pins() as pins:
            for key in self._keys(group):
                pins.add(store.blocks[key], FAR)
            chunks.prefetch()
        self.log.forget(group)
        chunks.gradients.drop(group)
