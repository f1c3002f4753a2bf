"""The engine's optimizer: a torch.optim.Optimizer whose states are in chunks."""

import math
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import torch

from pstar.chunks import Chunks
from pstar.chunks.interrupts import check, wait_for_operations, whole
from pstar.chunks.stages import Stages
from pstar.errors import ConfigError, StateError
from pstar.kernels import AdamOptions
from pstar.layout.layout import Group
from pstar.memory.block import Block, Key
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import FAR, NEAR
from pstar.numerics.loss_scaler import LossScaler
from pstar.numerics.precision import Precision
from pstar.optim.group_updates import GroupUpdates
from pstar.optim.speculative import Speculation
from pstar.optim.unmanaged import OutsideParams


class InChunks(dict):
    """`optimizer.state`, always empty. Refuses to read or reset a parameter's moments here: they are in chunks."""

    ERROR = ("Adam's moments are in chunks, not in optimizer.state: model.gather_state() copies them, and "
             "model.load_state(weights, moments) sets them")

    def refuse(self, *_: Any) -> NoReturn:
        raise StateError(self.ERROR)

    __missing__ = __setitem__ = clear = update = refuse


class ChunkedAdam(torch.optim.Optimizer):
    """Adam and AdamW over chunks. Parameter groups and learning-rate schedulers work as on any torch optimizer.

    Each group of chunks is updated in the tier of its states: only gradients and parameters are copied. With streamed
    updates, states in far are copied to near for their update, and back. Updates in near are begun first, so that a GPU
    computes them while the CPU computes the updates in far. The global norm is taken per parameter and then over parameters
    in the model's order, as clip_grad_norm_ does; no layout changes the order of its sums (grad_norm.py).

    A step with a gradient that is not finite is skipped, in every precision and on all ranks: parameters, moments and counts
    of updates stay as they are. The norm decides, which is computed after the reduction and is the same on all ranks.

    Args:
        param_groups: as for any torch optimizer; frozen parameters may be left out.
        params: qualified name to parameter, all of them, in the model's order.
        chunks: the parameters and gradients.
        outside: the parameters that are in no chunk.
        stages: refuse an update of incomplete gradients, and are told when the step is over.
        precision: the states of a parameter.
        scaler: the scale of the loss and so of the gradients; the update divides the gradients by it.
        adamw: decoupled weight decay, or Adam with L2 regularisation.
        clip_norm: largest global norm; 0 for no clipping.
        defaults: lr, betas, eps, weight_decay.
        movable: states in far may leave it, to near or to disk.
        overlap: updates in far run in the background, in forward order; step() returns before they are done.
    """

    def __init__(self, param_groups: list[dict], params: dict[str, torch.nn.Parameter], chunks: Chunks,
                 outside: OutsideParams, stages: Stages, precision: Precision, scaler: LossScaler, adamw: bool,
                 clip_norm: float, defaults: dict, movable: bool = False, overlap: bool = False):
        super().__init__(param_groups, defaults)
        self.chunks = chunks
        self.outside, self.precision, self.scaler, self._stages = outside, precision, scaler, stages
        self.adamw, self.clip_norm = adamw, clip_norm
        self.grad_norm: float | None = None
        """Global norm of the last step's gradients, unscaled, before clipping; not finite when the step was skipped."""
        self.names = {id(param): name for name, param in params.items()}
        self._check_groups()
        self.steps = dict.fromkeys(params, 0)
        self._updates = GroupUpdates(chunks, precision)
        self.speculation = None if chunks.log is None else Speculation(chunks, chunks.log, self._updates)
        """Updates that begin during backward; None without speculative_update."""
        self._overlap = overlap
        self._far_stays = not (chunks.tiers.streamed or movable)
        self._pins: dict[Key, Block] = {}
        """The pins of states that never leave the tier of their update."""
        for group in chunks.layout.trained:
            for kind, dtype in precision.states.items():
                key = (kind, group.index)
                numel = precision.numel_of(kind, group.piece_elems, group.piece_blocks)
                self.store.create(key, numel, dtype, chunks.tiers.states_tier[group.index]).zero_()
                if self._stays(group.index):
                    self._pins[key] = self.store.pin(key)

    @property
    def store(self) -> BlockStore:
        return self.chunks.store

    @property
    def state(self) -> InChunks:
        """Empty; see InChunks."""
        return InChunks()

    @state.setter
    def state(self, states: dict) -> None:
        if hasattr(self, "names"):    # torch.optim.Optimizer sets it at the start
            raise StateError(InChunks.ERROR)

    def add_param_group(self, param_group: dict) -> None:
        """As any torch optimizer, but only at the start. Raises StateError later: chunks cannot take new parameters."""
        if hasattr(self, "names"):
            raise StateError("parameters cannot be added to chunks: give param_groups to initialize_engine")
        super().add_param_group(param_group)

    def _check_groups(self) -> None:
        """Raises ConfigError unless the groups list every parameter of the model, frozen ones or not, and no others."""
        listed = {id(param) for group in self.param_groups for param in group["params"]}
        missing = [name for number, name in self.names.items() if number not in listed and not self.is_frozen(name)]
        if missing:
            raise ConfigError(f"param_groups lacks {len(missing)} parameters ({', '.join(missing[:3])}): list all that the "
                              "model trains, and freeze the others in model_func")
        if unknown := len(listed - self.names.keys()):
            raise ConfigError(f"param_groups lists {unknown} parameters that the model does not have")

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter was frozen when the engine started: it has no gradient and no states."""
        return name in self.chunks.units.frozen or name in self.outside.frozen

    def precision_of(self, group: Group) -> Precision:
        """The kinds of buffers of a group."""
        return Precision(self.precision.name, frozen=True) if group.frozen else self.precision

    def _stays(self, group: int) -> bool:
        """Whether the group's states never leave their tier."""
        return self.chunks.tiers.states_tier[group] == NEAR or self._far_stays

    def move_states(self, near: Collection[int]) -> bool:
        """Moves the states of these groups to near and all others to far; returns whether any moved. Between two steps."""
        changed, tiers = False, self.chunks.tiers
        for group in self.chunks.layout.trained:
            tier = NEAR if group.index in near else FAR
            if tiers.states_tier[group.index] == tier:
                continue
            changed = True
            tiers.move_states(group.index, tier)
            for kind in self.precision.states:
                key = (kind, group.index)
                if key in self._pins:
                    self._pins.pop(key).unpin()
                self.store.ensure(key, tier)
                self.store.mark_written(key, tier)    # the other copy would be out of date after the next update
                if self._stays(group.index):
                    self._pins[key] = self.store.pin(key)
        return changed

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.grad_norm is not None and not math.isfinite(self.grad_norm)

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1 without loss scaling."""
        return self.scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Steps skipped in the whole run."""
        return self.scaler.skipped_steps

    @whole
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        if self.speculation is not None:
            self.speculation.undo()
        self.chunks.drop_grads()
        self.chunks.gradients.norms.forget()
        self.outside.drop_grads()
        self._stages.forget_grads()

    @torch.no_grad()
    @whole
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that got a gradient on some rank; skips the step if a gradient is not finite.

        closure: called first; computes the loss, calls model.backward(loss), and returns the loss, which step returns.
        Raises StateError after many skipped steps in a row with a loss scale that cannot become smaller, and before the
        last micro-step of a step.
        """
        wait_for_operations(self.chunks.collectives.num_ranks)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            check()
        self._stages.check_update(self.loss_scale)
        self.chunks.parameters.check_places()
        total, used = self._total_norm()
        self.grad_norm = float(total)
        if self.skipped:
            if self.speculation is not None:
                self.speculation.undo(wrong=True)
            for group in self._order():
                self.chunks.skip_update(group.index)
        else:
            clip = float(torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)) if self.clip_norm > 0 else 1.0
            self._apply(clip / self.loss_scale, used)
        self.zero_grad()
        self.chunks.prefetch.next_step()
        self.chunks.end_step()
        recorded = self.store.schedule.end_step()
        self.store.ledger.end_step()
        for tier in (NEAR, FAR):
            self.store.tiers[tier].end_step(first=self.store.schedule.num_steps == 1)
        self.scaler.update(self.skipped)
        self._stages.begin("idle")
        if recorded:
            self._use_margin()
        self._stages.save_profile()
        return loss

    def _use_margin(self) -> None:
        """After a recorded step: fills the bytes of near that are free at every moment of all traces with states."""
        schedule, room = self.store.schedule, self.chunks.room
        margin = room.margin(schedule.known_peaks())
        if margin is not None:
            self.store.limit(margin)
            if self.move_states(room.groups_that_fit(margin)):
                schedule.forget_all()    # the update's order changes with them

    def _apply(self, grad_scale: float, used: set[str]) -> None:
        """Adam on all parameters that got a gradient; every gradient is multiplied by grad_scale."""
        for name in used:
            self.steps[name] += 1
        options = self._options()
        if self.speculation is not None:
            self.speculation.settle(used, options, self.steps, grad_scale)
        for group in self._order():
            if self._is_early(group.index):
                self.speculation.keep(group.index)
            else:
                self._update(group, used, options, grad_scale)
        self.outside.update(used, lambda name: {"step": self.steps[name], "options": options[name],
                                                "grad_scale": grad_scale})

    def _order(self) -> Iterator[Group]:
        """The groups that have gradients: those updated near, then those updated far, each in forward order, in which the
        link copies them back to near.

        With a slow link gradients may still be on their way to far. Then groups whose gradients have arrived are updated
        first, and if there are none, the group whose gradients will arrive first. So the link copies parameters to near
        while it copies gradients to far. Background updates do not wait here, and several ranks must agree about the tiers
        of blocks: both keep forward order.
        """
        chunks, store = self.chunks, self.store
        groups = [group for group in chunks.layout.groups if chunks.gradients.of(group.index)]
        groups.sort(key=lambda group: chunks.first_use(group.index))
        yield from (group for group in groups if chunks.tiers.update_tier(group.index) == NEAR)
        left = [group for group in groups if chunks.tiers.update_tier(group.index) != NEAR]
        any_order = self._far_stays and not self._overlap and chunks.collectives.num_ranks == 1
        if any_order and not store.schedule.recording:
            sent = {index: number for number, index in enumerate(chunks.gradients.completed)}
            while left:
                there = (group for group in left
                         if self._is_early(group.index) or store.is_settled(("grad", group.index)))
                group = next(there, None) or min(left, key=lambda group: sent.get(group.index, len(sent)))
                left.remove(group)
                yield group
        yield from left

    def _total_norm(self) -> tuple[torch.Tensor, set[str]]:
        """(fp32 global norm of the unscaled gradients, the same on all ranks; names of parameters to be updated)."""
        self.chunks.gradients.log.check()
        norms, used = self._norms()
        by_name = dict(zip((name for name in self.chunks.params if name in used), norms, strict=True))
        if self.outside.params:
            self.outside.reduce()
            others, used_outside = self.outside.norms()
            by_name, used = by_name | others, used | used_outside
            norms = torch.stack([by_name[name] for name in self.steps if name in by_name]) if by_name else norms
        return torch.linalg.vector_norm(norms) / self.loss_scale, used

    def _norms(self) -> tuple[torch.Tensor, set[str]]:
        """(fp32 norm of each parameter's gradient in the model's order, names of those that have one)."""
        gradients = self.chunks.gradients
        for group in self.chunks.layout.groups:
            if gradients.of(group.index) and not gradients.norms.taken(group.index):
                gradients.take_norms(group.index)
        return gradients.norms(gradients.arrived)

    def _update(self, group: Group, used: set[str], options: dict[str, AdamOptions], grad_scale: float) -> None:
        """Adam on this rank's piece of one group, in the tier of its update."""
        tier = self.chunks.tiers.update_tier(group.index)
        self.chunks.touch_update(group.index)
        self.chunks.unsharding.drop_gathered(group.index)
        gradients, runs = self.chunks.gradients, self._updates.runs(group, used, options, self.steps)

        def prepare(buffers: dict[Key, torch.Tensor]) -> Callable[[], None]:
            self.chunks.prefetch()    # the group's blocks are pinned here
            return self._updates.job(group, buffers, runs, grad_scale)

        keys = [*gradients.blocks(group.index), *((kind, group.index) for kind in self.precision.kinds)]
        self.store.work(f"adam {group.index}", keys, tier, prepare, self._overlap and tier == FAR)
        self.chunks.end_update(group.index)

    # ---------------------------------------------------------------- updates that begin during backward

    def watch_gradients(self) -> None:
        """With speculative_update: begins updates during backward. Called when the hooks that store gradients are set."""
        if self.speculation is not None:
            self.speculation.watch(self.chunks.params.values(), weakref.WeakMethod(self._begin_early))

    @torch.no_grad()
    @whole
    def _begin_early(self) -> None:
        self.speculation.begin(self._options, self.steps, 1.0 / self.loss_scale)

    def _is_early(self, group: int) -> bool:
        return self.speculation is not None and self.speculation.is_early(group)

    def undo_early(self, group: int) -> None:
        """Undoes the group's early update, if there is one: its state is about to be read or written."""
        if self._is_early(group):
            self.chunks.log.restore(group)

    def _options(self) -> dict[str, AdamOptions]:
        """Each parameter's current hyper-parameters, from param_groups."""
        options = {}
        for group in self.param_groups:
            shared = AdamOptions(float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"], self.adamw)
            options |= {self.names[id(param)]: shared for param in group["params"]}
        return options

    def state_dict(self) -> dict:
        """param_groups only: weights and moments are gathered by the engine's gather_state."""
        state = super().state_dict()
        return {"param_groups": state["param_groups"], "state": {}}

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes param_groups. Raises StateError if there are moments, as in the state dict of another optimizer."""
        if state_dict["state"]:
            raise StateError(f"this state dict has moments. {InChunks.ERROR}")
        super().load_state_dict(state_dict)
