"""PatrickStar in one process (Fang et al. 2022): model data in chunks that move between near and far memory.

Training in fp32 needs 16 bytes a parameter: the parameter, its gradient and AdamW's two moments. Here chunks hold them: flat
tensors of equal size. Far (host memory) has room for all chunks; near (accelerator memory) has a budget in bytes.

    far    chunk 0  | param | grad | exp_avg | exp_avg_sq |     near   chunk 0  | param |
           chunk 1  | param | grad | exp_avg | exp_avg_sq |            chunk 2  | param | grad |   <= near_bytes
           chunk 2  | param | grad | exp_avg | exp_avg_sq |

The life of a chunk in one step:

    RELEASED --acquire--> COMPUTE --release--> HOLD --acquire--> COMPUTE --release--> HOLD --AdamW, far--> RELEASED
              copied near   forward             |                  backward,               the near copy is old
                                                |                  gradients go far
                                                +--> RELEASED, if another chunk needs the room: copied near again

This file moves chunks and checks that they may move. own_engine.py decides when (hooks on modules and on autograd) and has
the AdamW. chunk_plan.py has the layout (which parameter is in which chunk) and the schedule (which chunk is evicted).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from chunk_plan import Schedule, live_near, pack
from torch import Tensor, nn

KINDS = ("param", "grad", "exp_avg", "exp_avg_sq")


class ChunkError(Exception):
    """An illegal operation, or one that exceeds the budget. A program prints it as one line, without traceback."""

    one_line = True


class State(Enum):
    """The state of a parameter. A chunk must stay near while one of its parameters is COMPUTE."""

    COMPUTE = "in use: its bytes are near and must stay"
    HOLD = "its bytes are near and may leave"
    RELEASED = "its bytes are far only"


class NearMemory:
    """Counts the bytes near; they never exceed the budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.used_bytes, self.peak_bytes = budget_bytes, 0, 0

    def take(self, num_bytes: int) -> None:
        """Takes bytes; a negative number gives bytes back."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        assert 0 <= self.used_bytes <= self.budget_bytes, f"{self.used_bytes} of {self.budget_bytes} bytes near"


@dataclass(eq=False)
class Slot:
    """One parameter and its place in a chunk."""

    param: nn.Parameter
    chunk: Chunk
    offset: int
    uses: int = 0  # modules (forward) and autograd nodes (backward) that use it now
    arrived: bool = False  # a gradient of this micro-batch is in chunk.grad
    summed: bool = False  # gradients of this step are in chunk.home["grad"]
    step: int = 0  # updates so far

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of its chunk, in its own shape."""
        return flat[self.offset : self.offset + self.param.numel()].view(self.param.shape)

    @property
    def state(self) -> State:
        return State.COMPUTE if self.uses else State.HOLD if self.chunk.is_near else State.RELEASED


class Chunk:
    """Neighbouring parameters in flat tensors, (elems,) fp32, which move together.

    Attributes:
        home: a flat tensor for each of KINDS, kept and updated there: far, or near if near has room for all four.
        near: the flat tensor near of which its parameters are views, or None. RELEASED parameters keep their shapes, but
            are NaN without bytes: a read at the wrong time gives NaN, not old numbers.
        grad: flat tensor near in which the gradients of a micro-batch arrive, or None.
    """

    def __init__(self, index: int, elems: int, lives_near: bool, device: torch.device) -> None:
        self.index, self.num_bytes, self.lives_near = index, 4 * elems, lives_near
        self.slots: list[Slot] = []
        self.home = {kind: torch.zeros(elems, device=device if lives_near else "cpu") for kind in KINDS}
        self.near: Tensor | None = None
        self.grad: Tensor | None = None

    @property
    def is_near(self) -> bool:
        return self.near is not None

    def bind(self, near: Tensor | None) -> None:
        """Makes the parameters views of `near`; None makes them NaN without bytes."""
        self.near = near
        for slot in self.slots:
            nothing = torch.full((), math.nan, device=slot.param.device).expand(slot.param.shape)
            slot.param.data = nothing if near is None else slot.of(near)

    @property
    def may_leave(self) -> bool:
        return self.is_near and not self.lives_near and not any(slot.uses for slot in self.slots)


class Chunks:
    """All chunks of a module's model data.

    Args:
        module: fp32, initialized; from now on its parameters have bytes only while they are near.
        chunk_elems: elements in a chunk.
        near_bytes: the budget: most bytes of chunks near at once.
        device: the device of near. Without a GPU near is a part of host memory; budget and copies are the same.

    Attributes:
        slots: by parameter name, in the model's order; a tied parameter appears once.
        moved_bytes: copied since the step began, "far to near" and "near to far"; step_bytes: in the last whole step.
    """

    def __init__(self, module: nn.Module, chunk_elems: int, near_bytes: int, device: torch.device) -> None:
        self.near, self.device = NearMemory(near_bytes), device
        self.schedule, self.moved_bytes, self.step_bytes = Schedule(), Counter[str](), Counter[str]()
        params, placed = dict(module.named_parameters()), set()
        names = {param: name for name, param in params.items()}
        modules = []
        for child in module.modules():
            own = {names[param]: param.numel() for param in child.parameters(recurse=False)}
            modules.append([(name, numel) for name, numel in own.items() if name not in placed])
            placed |= own.keys()
        layout = pack(modules, chunk_elems)
        at_home_near = live_near([elems for elems, _ in layout], near_bytes)
        self.chunks: list[Chunk] = []
        slots = {}
        for index, (elems, places) in enumerate(layout):
            lives_near = index in at_home_near
            chunk = Chunk(index, elems, lives_near, device)
            self.chunks.append(chunk)
            self.near.take(len(KINDS) * chunk.num_bytes * lives_near)
            for name, offset in places.items():
                slot = slots[name] = Slot(params[name], chunk, offset)
                chunk.slots.append(slot)
                slot.of(chunk.home["param"]).copy_(slot.param.data)
            chunk.bind(chunk.home["param"] if lives_near else None)
        self.slots: dict[str, Slot] = {name: slots[name] for name in params}

    # ---- parameters: near while they are in use -------------------------------------------------------------------------

    def acquire(self, slots: list[Slot], in_step: bool) -> None:
        """HOLD or RELEASED -> COMPUTE. in_step: record the use as a moment of the step (an evaluation does not)."""
        for slot in slots:
            if not any(other.uses and other.chunk is slot.chunk for other in slots):  # one moment a chunk
                self.schedule.touch(slot.chunk.index, in_step)
                self._bring(slot.chunk)
            slot.uses += 1

    def release(self, slots: list[Slot]) -> None:
        """COMPUTE -> HOLD, unless another module or node still uses it."""
        for slot in slots:
            if not slot.uses:
                raise ChunkError(f"a parameter of chunk {slot.chunk.index} is released, but {slot.state.name}")
            slot.uses -= 1

    def _bring(self, chunk: Chunk) -> None:
        """RELEASED -> HOLD: copies the parameters near."""
        if not chunk.is_near:
            self._make_room(chunk.num_bytes)
            self.near.take(chunk.num_bytes)
            with torch.inference_mode(False):  # an evaluation may use it, but the next step needs gradients
                chunk.bind(chunk.home["param"].to(self.device, copy=True))
            self.moved_bytes["far to near"] += chunk.num_bytes

    def _drop(self, chunk: Chunk) -> None:
        """HOLD -> RELEASED. No copy is needed: forward and backward only read parameters."""
        if not chunk.may_leave:
            raise ChunkError(f"chunk {chunk.index} cannot leave near: it is in use (COMPUTE), lives near, or is not near")
        chunk.bind(None)
        self.near.take(-chunk.num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Evicts chunks from near until `num_bytes` fit: parameters first, then gradients that have arrived so far."""
        while self.near.used_bytes + num_bytes > self.near.budget_bytes:
            may_leave = [chunk.index for chunk in self.chunks if chunk.may_leave]
            with_grads = [chunk for chunk in self.chunks if chunk.grad is not None]
            if may_leave:
                self._drop(self.chunks[self.schedule.victim(may_leave)])
            elif with_grads:
                self._send_gradients(with_grads[0])
            else:
                raise ChunkError(f"near_bytes {self.near.budget_bytes} is too small: {self.near.used_bytes} are in use, and "
                                 f"{num_bytes} more are needed: give at least {self.near.used_bytes + num_bytes}")

    # ---- gradients: near while they arrive, then far ----------------------------------------------------------------------

    def add_gradient(self, slot: Slot, grad: Tensor) -> None:
        """Puts a parameter's gradient into its chunk; when the chunk has all gradients, they go far."""
        chunk = slot.chunk
        if chunk.lives_near:
            _put(slot.of(chunk.home["grad"]), grad, add=slot.summed)
            slot.summed = True
            return
        if chunk.grad is None:
            self._make_room(chunk.num_bytes)
            self.near.take(chunk.num_bytes)
            chunk.grad = torch.empty(chunk.num_bytes // 4, device=self.device)
        _put(slot.of(chunk.grad), grad, add=slot.arrived)
        slot.arrived = True
        if all(slot.arrived or not slot.param.requires_grad for slot in chunk.slots):
            self._send_gradients(chunk)

    def _send_gradients(self, chunk: Chunk) -> None:
        """Moves a micro-batch's gradients far, and adds them to those of earlier micro-batches."""
        for slot in chunk.slots:
            if slot.arrived:
                total = slot.of(chunk.home["grad"])
                _put(total, slot.of(chunk.grad).to(total.device), add=slot.summed)
                slot.arrived, slot.summed = False, True
        chunk.grad = None
        self.near.take(-chunk.num_bytes)
        self.moved_bytes["near to far"] += chunk.num_bytes

    def end_backward(self) -> None:
        """Sends gradients of chunks that are incomplete because some parameters were not used."""
        for chunk in self.chunks:
            if chunk.grad is not None:
                self._send_gradients(chunk)

    def forget_gradients(self) -> None:
        for slot in self.slots.values():
            slot.arrived = slot.summed = False

    # ---- between steps --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.moved_bytes.clear()

    def end_step(self) -> None:
        """Called after the optimizer has updated parameters far: drops their near copies, which are out of date."""
        for chunk in self.chunks:
            if chunk.may_leave and any(slot.summed for slot in chunk.slots):
                self._drop(chunk)
        self.schedule.end_step()
        self.step_bytes = self.moved_bytes.copy()

    def gather_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies (weights, moments): NAME, and exp_avg.NAME, exp_avg_sq.NAME, step.NAME; no moments before an update."""
        weights, moments = {}, {}
        for name, slot in self.slots.items():
            weights[name] = slot.of(slot.chunk.home["param"]).clone()
            if slot.step:
                moments |= {f"{kind}.{name}": slot.of(slot.chunk.home[kind]).clone() for kind in ("exp_avg", "exp_avg_sq")}
                moments[f"step.{name}"] = torch.tensor(float(slot.step))
        return weights, moments

    @torch.no_grad()
    def load_state(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Loads the result of gather_state, from any chunk size. Raises ChunkError if the names differ."""
        if wrong := sorted(set(weights) ^ set(self.slots)):
            raise ChunkError(f"the weights do not fit the model: {', '.join(wrong[:3])}")
        for name, slot in self.slots.items():
            slot.of(slot.chunk.home["param"]).copy_(weights[name])
            slot.step = int(moments.get(f"step.{name}", 0))
            for kind in ("exp_avg", "exp_avg_sq") if slot.step else ():
                slot.of(slot.chunk.home[kind]).copy_(moments[f"{kind}.{name}"])
        for chunk in self.chunks:
            if chunk.may_leave:
                self._drop(chunk)


def _put(place: Tensor, value: Tensor, add: bool) -> None:
    place.add_(value) if add else place.copy_(value)
