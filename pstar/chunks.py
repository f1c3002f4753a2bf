"""Parameters and gradients in chunks: what is COMPUTE, HOLD or RELEASED, and how a group comes near.

A parameter is a view into its group's near buffer while that is there (COMPUTE: in use, pinned; HOLD: may be evicted), and
an expanded NaN without memory otherwise (RELEASED): its shape stays, and whoever uses it out of turn gets NaN, not
somebody else's bytes. A group's state follows from its parameters: it is pinned while one of them is COMPUTE.

With one process a group's near buffer is its ("param", g) block. With p ranks each rank keeps its own piece in
("param", g), and the near buffer is ("gathered", g), p pieces, filled by an all-gather and dropped when it must leave.
"""

from enum import Enum

import torch

from pstar.collectives import Collectives
from pstar.errors import StateError
from pstar.layout import Layout
from pstar.residency import Key, Residency
from pstar.tiers import FAR, NEAR


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
    """

    def __init__(self, layout: Layout, params: dict[str, torch.nn.Parameter], residency: Residency,
                 collectives: Collectives, param_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device):
        self.layout, self.params = layout, params
        self.residency, self.collectives = residency, collectives
        self.param_dtype, self.grad_dtype, self.device = param_dtype, grad_dtype, device
        self.slots = layout.slots
        self.shapes = {name: param.shape for name, param in params.items()}
        self._placeholder = torch.full((1,), float("nan"), dtype=param_dtype, device=device)
        self._uses: dict[str, int] = dict.fromkeys(params, 0)          # COMPUTE is counted: modules nest
        self._bound: set[int] = set()                                  # groups whose parameters are views of near
        self._group_at: dict[int, int] = {}                            # address of a near buffer -> group
        self._arrived: list[set[str]] = [set() for _ in layout.groups]  # gradients in this step
        self._summed: list[set[str]] = [set() for _ in layout.groups]   # gradients in this micro-step
        self.home = [FAR] * len(layout.groups)
        """The tier in which each group's optimizer states lie and its update is computed."""

    # ------------------------------------------------------------- parameters

    def key(self, group: int) -> Key:
        """The block that parameters are views of."""
        return ("param", group) if self.collectives.num_ranks == 1 else ("gathered", group)

    def state(self, name: str) -> TensorState:
        if self._uses[name]:
            return TensorState.COMPUTE
        return TensorState.HOLD if self.slots[name].group in self._bound else TensorState.RELEASED

    def fetch(self, group: int) -> torch.Tensor:
        """The group's near buffer with everybody's pieces; brings them near when they are not."""
        key = self.key(group)
        self.residency.schedule.touch(key)
        if self.collectives.num_ranks == 1:
            data = self.residency.ensure(key, NEAR)
        elif self.residency.is_near(key):
            data = self.residency.peek(key)[1]
        else:
            data = self._gather(group)
        if group not in self._bound:
            self._bind(group, data)
        return data

    def _gather(self, group: int) -> torch.Tensor:
        spec = self.layout.groups[group]
        data = self.residency.create(("gathered", group), spec.elems, self.param_dtype, NEAR, derived=True)
        tier, own = self.residency.peek(("param", group))
        self.residency.copy(data.view(spec.num_ranks, -1)[self.collectives.rank], own, tier, NEAR)
        self.collectives.all_gather(data)
        return data

    def _bind(self, group: int, data: torch.Tensor) -> None:
        for slot in self.layout.groups[group].slots:
            view = data[slot.offset : slot.offset + slot.numel].view(self.shapes[slot.name])
            self.params[slot.name].data = view
        self._bound.add(group)
        self._group_at[data.data_ptr()] = group

    def on_leave(self, key: Key) -> None:
        """The residency is about to take a block from near."""
        kind, group = key
        if kind == self.key(group)[0] and group in self._bound:
            self._bound.discard(group)
            del self._group_at[self.residency.peek(key)[1].data_ptr()]
            self.release_data(group)

    def release_data(self, group: int) -> None:
        """Parameters of a group become placeholders."""
        for slot in self.layout.groups[group].slots:
            if self._uses[slot.name]:
                raise StateError(f"{slot.name} is in use (COMPUTE) and cannot be released")
            self.params[slot.name].data = self._placeholder.expand(self.shapes[slot.name])

    def acquire(self, names: tuple[str, ...]) -> None:
        """HOLD or RELEASED -> COMPUTE: the parameters' bytes come near and stay."""
        for name in names:
            group = self.slots[name].group
            self.fetch(group)
            self.residency.pin(self.key(group))
            self._uses[name] += 1

    def release(self, names: tuple[str, ...]) -> None:
        """COMPUTE -> HOLD. Raises StateError for a parameter that is not COMPUTE."""
        for name in names:
            if not self._uses[name]:
                raise StateError(f"{name} is released but not in use: it is {self.state(name).name}")
            self._uses[name] -= 1
            self.residency.unpin(self.key(self.slots[name].group))

    def group_of(self, tensor: torch.Tensor) -> int | None:
        """The group into whose near buffer a tensor points; None for a tensor of other memory."""
        return self._group_at.get(tensor.untyped_storage().data_ptr())

    def drop_gathered(self, group: int) -> None:
        """The gathered copy is out of date: somebody's piece was updated."""
        if ("gathered", group) in self.residency:
            self.residency.drop(("gathered", group))

    # -------------------------------------------------------------- gradients

    def add_grad(self, name: str, grad: torch.Tensor, last_micro_step: bool) -> None:
        """A parameter's gradient is there: it goes into its slot, and a group that is complete is reduced."""
        slot = self.slots[name]
        spec = self.layout.groups[slot.group]
        key = self._grad_key(slot.group)
        self.residency.schedule.touch(key)
        if key in self.residency:
            data = self.residency.ensure(key, NEAR)
        elif self._arrived[slot.group] and self._reduced(slot.group):
            raise StateError(f"{name} got a second gradient in one backward, after its group was reduced: on several ranks "
                             "a layer that is used twice needs checkpoint(..., use_reentrant=False)")
        else:
            data = self.residency.create(key, spec.elems, self.grad_dtype, NEAR)
        place = data[slot.offset : slot.offset + slot.numel].view(grad.shape)
        if name in self._arrived[slot.group]:
            place.add_(grad)
        else:
            place.copy_(grad)
        self.residency.mark_written(key, NEAR)
        self._arrived[slot.group].add(name)
        self._summed[slot.group].add(name)
        if last_micro_step and len(self._summed[slot.group]) == self._num_trainable(slot.group):
            self._complete(slot.group)

    def end_backward(self, last_micro_step: bool) -> None:
        """Backward is over. After the last micro-step, groups that wait for gradients that never come are reduced."""
        for group, summed in enumerate(self._summed):
            if last_micro_step and self._arrived[group] and self._grad_key(group) in self.residency and (
                    len(summed) < self._num_trainable(group)):
                self._complete(group)
            summed.clear()

    def _reduced(self, group: int) -> bool:
        return self.collectives.num_ranks > 1 and ("grad", group) in self.residency

    def _grad_key(self, group: int) -> Key:
        return ("grad", group) if self.collectives.num_ranks == 1 else ("grad_full", group)

    def _num_trainable(self, group: int) -> int:
        return sum(self.params[slot.name].requires_grad for slot in self.layout.groups[group].slots)

    def _complete(self, group: int) -> None:
        """All gradients of a group are there: reduce them, and send the piece to where the update will be."""
        spec = self.layout.groups[group]
        if self.collectives.num_ranks > 1:
            full = self.residency.ensure(("grad_full", group), NEAR)
            for slot in spec.slots:
                if slot.name not in self._arrived[group]:
                    full[slot.offset : slot.offset + slot.numel].zero_()    # another rank may have one
            self.residency.pin(("grad_full", group))
            piece = self.residency.create(("grad", group), spec.piece_elems, self.grad_dtype, NEAR)
            self.collectives.reduce_scatter_mean(piece, full)
            self.residency.unpin(("grad_full", group))
            self.residency.drop(("grad_full", group))
        if self.home[group] == FAR:
            self.residency.send_far(("grad", group))

    def arrived(self, name: str) -> bool:
        """Whether the parameter got a gradient in this step, on this rank."""
        return name in self._arrived[self.slots[name].group]

    def drop_grads(self) -> None:
        """Forgets all gradients, as zero_grad does."""
        for group in range(len(self.layout.groups)):
            for kind in ("grad", "grad_full"):
                if (kind, group) in self.residency:
                    self.residency.drop((kind, group))
            self._arrived[group].clear()
            self._summed[group].clear()
