"""The optimizer front: a torch.optim.Optimizer whose states lie in chunks."""

import math
from collections.abc import Callable, Collection, Iterator

import torch

from pstar.chunks import Chunks
from pstar.chunks.stages import Stages
from pstar.errors import ConfigError, StateError
from pstar.kernels import adam_steps
from pstar.layout.layout import Group
from pstar.memory.block import Block, Key
from pstar.memory.tier import FAR, NEAR
from pstar.numerics.loss_scaler import LossScaler
from pstar.numerics.precision import Precision
from pstar.optim.unmanaged import OutsideParams


class ChunkedAdam(torch.optim.Optimizer):
    """Adam and AdamW over chunks. Parameter groups and learning-rate schedulers work as on any torch optimizer.

    Each group of chunks is updated in the tier where its states lie: only gradients and parameters travel. Where updates are
    streamed, a group whose states lie far is updated near all the same: they come and go. Updates near are begun first, so
    that a GPU works on them while the CPU works on those far. The global norm is taken per parameter and then over
    parameters in the model's order, as clip_grad_norm_ does, its sums in an order that no layout changes (grad_norm.py).

    A step whose gradients are not all finite is skipped, in every precision and on all ranks alike: parameters, moments
    and counts of updates stay as they are. What tells is the norm, which is taken after the reduction and travels anyway.

    Args:
        param_groups: as for any torch optimizer.
        params: qualified name to parameter, all of them, in the model's order.
        chunks: the parameters and gradients.
        outside: the parameters that are in no chunk.
        stages: are told when an update begins and ends, and refuse that of a part of the gradients.
        precision: which states a parameter has.
        scaler: of the loss, and so of the gradients in the chunks; they are divided by it inside the update.
        adamw: decoupled weight decay, or Adam with L2 regularisation.
        clip_norm: largest global norm; 0 for no clipping.
        defaults: lr, betas, eps, weight_decay.
        movable: states that lie far may leave far, for near or for disk.
        overlap: what is updated far is updated in the background, in forward order; step() returns before it is done.
    """

    def __init__(self, param_groups: list[dict], params: dict[str, torch.nn.Parameter], chunks: Chunks,
                 outside: OutsideParams, stages: Stages, precision: Precision, scaler: LossScaler, adamw: bool,
                 clip_norm: float, defaults: dict, movable: bool = False, overlap: bool = False):
        super().__init__(param_groups, defaults)
        self.chunks, self.residency = chunks, chunks.residency
        self.outside, self.precision, self.scaler, self._stages = outside, precision, scaler, stages
        self.adamw, self.clip_norm = adamw, clip_norm
        self.grad_norm: float | None = None
        """Global norm of the last step's gradients, unscaled, before clipping; not finite when the step was skipped."""
        self.names = {id(param): name for name, param in params.items()}
        self._check_groups()
        self.steps = dict.fromkeys(params, 0)
        self._spans = {group.index: group.spans(chunks.collectives.rank) for group in chunks.layout.groups}
        self._overlap = overlap
        self._far_stays = not (chunks.tiers.streamed or movable)
        self._pins: dict[Key, Block] = {}
        """Of states that stay where their update is computed."""
        for group in chunks.layout.groups:
            for kind, dtype in precision.states.items():
                key = (kind, group.index)
                self.residency.create(key, group.piece_elems, dtype, chunks.tiers.states_tier[group.index]).zero_()
                if self._stays(group.index):
                    self._pins[key] = self.residency.pin(key)

    def add_param_group(self, param_group: dict) -> None:
        """As any torch optimizer, but only at the start. Raises StateError later: what is trained lies in chunks."""
        if hasattr(self, "names"):
            raise StateError("parameters cannot be added to chunks: give param_groups to initialize_engine")
        super().add_param_group(param_group)

    def _check_groups(self) -> None:
        """Raises ConfigError unless the groups list every parameter of the model and no other one."""
        listed = {id(param) for group in self.param_groups for param in group["params"]}
        missing = [name for number, name in self.names.items() if number not in listed]
        if missing:
            raise ConfigError(f"param_groups lacks {len(missing)} parameters ({', '.join(missing[:3])}): list all of the "
                              "model, frozen ones too")
        if len(listed) > len(self.names):
            raise ConfigError(f"param_groups lists {len(listed) - len(self.names)} parameters that the model does not have")

    def _stays(self, group: int) -> bool:
        """Whether the group's states never leave the tier in which they lie."""
        return self.chunks.tiers.states_tier[group] == NEAR or self._far_stays

    def move_states(self, near: Collection[int]) -> bool:
        """The states of these groups lie near from now on, all others far; whether any moved. Between two steps."""
        changed, tiers = False, self.chunks.tiers
        for group in self.chunks.layout.groups:
            tier = NEAR if group.index in near else FAR
            if tiers.states_tier[group.index] == tier:
                continue
            changed = True
            tiers.move_states(group.index, tier)
            for kind in self.precision.states:
                key = (kind, group.index)
                if key in self._pins:
                    self._pins.pop(key).unpin()
                self.residency.ensure(key, tier)
                self.residency.mark_written(key, tier)    # the other copy would be out of date after the next update
                if self._stays(group.index):
                    self._pins[key] = self.residency.pin(key)
        return changed

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.grad_norm is not None and not math.isfinite(self.grad_norm)

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1 where nothing is scaled."""
        return self.scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Steps skipped in the whole run."""
        return self.scaler.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        self.chunks.drop_grads()
        self.chunks.gradients.norms.forget()
        self.outside.drop_grads()
        self._stages.forget_grads()

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """One update of every parameter that got a gradient on some rank; none where a gradient is not finite.

        Raises StateError after many skipped steps in a row that no smaller loss scale can end, and in the middle of the
        micro-steps of one.
        """
        if closure is not None:
            raise StateError("ChunkedAdam.step takes no closure: call model.backward(loss) before it")
        self._stages.check_update(self.loss_scale)
        total, used = self._total_norm()
        self.grad_norm = float(total)
        if self.skipped:
            self._touch_all()    # a step that is skipped is the step that was traced
        else:
            clip = float(torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)) if self.clip_norm > 0 else 1.0
            self._apply(clip / self.loss_scale, used)
        self.zero_grad()
        recorded = self.residency.schedule.end_step()
        self.residency.ledger.end_step()
        self.scaler.update(self.skipped)
        self._stages.begin("idle")
        if recorded:
            self._use_margin()
        self._stages.save_profile()

    def _use_margin(self) -> None:
        """After a step that was recorded: what is left of near at all moments of all traces is for states."""
        schedule, room = self.residency.schedule, self.chunks.room
        margin = room.margin(schedule.known_peaks())
        if margin is not None:
            self.residency.limit(margin)
            if self.move_states(room.groups_that_fit(margin)):
                schedule.forget_all()    # the update's order changes with them

    def _apply(self, grad_scale: float, used: set[str]) -> None:
        """Adam on all that got a gradient, every gradient times grad_scale."""
        for name in used:
            self.steps[name] += 1
        options = self._options()
        for option in options.values():
            option |= {"grad_scale": grad_scale, "adamw": self.adamw}
        for group in self._order():
            self._update(group, used, options)
        self.outside.update(used, lambda name: options[name] | {"step": self.steps[name]})

    def _order(self) -> Iterator[Group]:
        """The groups that have gradients: those that are updated near, then those that are updated far, each in the order of
        forward, in which the link brings them back.

        But where a link is slow, gradients are still on their way: what has arrived is updated before, and where nothing
        has, what will arrive first. So the link brings parameters back while it takes gradients away. In the background
        nobody waits here, and ranks must agree about what is where: there the order is that of forward whatever arrives.
        """
        chunks, residency = self.chunks, self.residency
        groups = [group for group in chunks.layout.groups if ("grad", group.index) in residency]
        groups.sort(key=lambda group: chunks.first_use(group.index))
        yield from (group for group in groups if chunks.tiers.update_tier(group.index) == NEAR)
        left = [group for group in groups if chunks.tiers.update_tier(group.index) != NEAR]
        any_order = self._far_stays and not self._overlap and chunks.collectives.num_ranks == 1
        if any_order and not residency.schedule.recording:
            sent = {index: number for number, index in enumerate(chunks.gradients.completed)}
            while left:
                there = (group for group in left if residency.is_settled(("grad", group.index)))
                group = next(there, None) or min(left, key=lambda group: sent.get(group.index, len(sent)))
                left.remove(group)
                yield group
        yield from left

    def _touch_all(self) -> None:
        for group in self._order():
            self.chunks.touch_update(group.index)

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
            if ("grad", group.index) in self.residency and not gradients.norms.taken(group.index):
                gradients.take_norms(group.index)
        return gradients.norms(gradients.arrived)

    def _update(self, group: Group, used: set[str], options: dict[str, dict]) -> None:
        """Adam on this rank's piece of one group, in the tier where it is to be updated."""
        tier = self.chunks.tiers.update_tier(group.index)
        self.chunks.touch_update(group.index)
        self.chunks.unsharding.drop_gathered(group.index)
        kinds = self.precision.kinds

        def prepare(buffers: dict[Key, torch.Tensor]) -> Callable[[], None]:
            updates = [self.precision.update(buffers["grad", group.index][part],
                                             {kind: buffers[kind, group.index][part] for kind in kinds}, step=step, **option)
                       for part, step, option in self._runs(group, used, options)]
            return lambda: adam_steps(updates)

        keys = [(kind, group.index) for kind in ("grad", *kinds)]
        self.residency.work(f"adam {group.index}", keys, tier, prepare, self._overlap and tier == FAR)
        self.residency.drop(("grad", group.index))    # its room is for the next group's

    def _runs(self, group: Group, used: set[str], options: dict[str, dict]) -> Iterator[tuple[slice, int, dict]]:
        """(place in this rank's piece, number of the update, options) of what is updated: neighbours alike are one run."""
        begin = end = step = 0
        option: dict = {}
        for span in self._spans[group.index]:
            if span.name not in used:
                continue
            if span.piece_offset != end or self.steps[span.name] != step or options[span.name] != option:
                if begin < end:
                    yield slice(begin, end), step, option
                begin, step, option = span.piece_offset, self.steps[span.name], options[span.name]
            end = span.piece_offset + span.numel
        if begin < end:
            yield slice(begin, end), step, option

    def _options(self) -> dict[str, dict]:
        """Each parameter's hyper-parameters as AdamUpdate takes them, as they are now in param_groups."""
        return {
            self.names[id(param)]: {"lr": float(group["lr"])} | {key: group[key] for key in ("betas", "eps", "weight_decay")}
            for group in self.param_groups for param in group["params"]
        }

    def state_dict(self) -> dict:
        """param_groups only: weights and moments are gathered by the engine's gather_state."""
        state = super().state_dict()
        return {"param_groups": state["param_groups"], "state": {}}
