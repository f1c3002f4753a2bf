"""Hooks on modules and on autograd, which acquire and release parameters. They do not know where the bytes are.

Forward: a module's own parameters are acquired before its forward and released after it.

Backward needs no module hooks. Autograd saves tensors for backward. A `saved_tensors_hooks` pair replaces those that are
views of a chunk by a handle, so the graph never holds a chunk's memory. When backward needs the parameter, autograd unpacks
the handle, and the parameter is acquired. It is released when another node of the graph runs. When its gradient has been
accumulated, all of its uses are over, and the gradient moves into its chunk.

With `compile` in the configuration the hooks of a block acquire all parameters below it, outside of the compiled region
(modules/compiled_blocks.py). A model that calls torch.compile itself gets smaller graphs: torch.compile breaks the graph at
these hooks (`torch.compiler.disable`), and compiles the code between two hooks.

The pair is set around each module unless it is in force already, on top of any other pair. Activation checkpointing
(torch.utils.checkpoint) has its own pair, and its recomputation in backward runs these modules again. Tensors that its pair
keeps never reach ours. The inputs of a checkpoint do, in both its variants, through the pair of the enclosing module.
Tensors that are no views of a chunk stay as they are, or go to far (activation_offload.py).

These functions run a thousand times a step, between any two operators: needless work here costs a per cent of a small
model's step.
"""

import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.utils._pytree import tree_leaves

from pstar.chunks import interrupts
from pstar.chunks.activation_offload import Away, Offload
from pstar.chunks.borrowed import Idle, Lender
from pstar.chunks.interrupts import whole
from pstar.chunks.step import Chunks
from pstar.errors import StateError
from pstar.layout.layout import Unit
from pstar.modules.compiled_blocks import owners

NOTHING_ACQUIRED = nullcontext()
"""The pair of a module that could not acquire its parameters."""


@dataclass(slots=True)    # not frozen: a frozen one takes three times as long to make
class SavedView:
    """What the graph keeps instead of a view of a chunk."""

    name: str
    offset: int
    """In elements, inside the parameter."""
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True)
class SavedBits:
    """The same for a view that reads a chunk's bits in another way: view_as_complex, view(dtype), a conjugate."""

    name: str
    offset: int
    """In bytes, inside the parameter."""
    size: torch.Size
    stride: tuple[int, ...]
    """In elements of the dtype."""
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    def of(self, param: torch.Tensor) -> torch.Tensor:
        begin = (param.storage_offset() * param.itemsize + self.offset) // self.dtype.itemsize
        view = torch.empty(0, dtype=self.dtype, device=param.device)
        view.set_(param.untyped_storage(), begin, self.size, self.stride)
        view = view.conj() if self.conjugated else view
        return torch._neg_view(view) if self.negated else view


@dataclass(slots=True)
class Kept:
    """What the graph keeps for a tensor that is neither in a chunk nor offloaded."""

    tensor: torch.Tensor
    """Detached: an output that refers to its own node is a reference cycle, and a dropped graph would never be freed."""
    version: int | None
    """The tensor's version: autograd does not check it for tensors saved through hooks, so unpack does."""

    def unpack(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise StateError(f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was changed in place after "
                             f"forward used it: version {self.tensor._version}, not {self.version}; change a clone of it")
        return self.tensor


class Hooks:
    """The hooks of a model, in force from install() on. `last_micro_step`: the gradients are complete after this backward.
    `took_gradients`: a gradient has arrived since somebody set it to False.

    Args:
        module, chunks: the model and its parameters.
        offload: copies activations to far until backward; None: they stay in near.
        stay: all parameters stay bound in near (Chunks.lend_all). Only the hooks that take gradients are set then: the graph
            may hold views of chunks, as in a model without pstar.
        blocks: compiled modules by name; hooks are set on each as a whole, not on the modules inside.
    """

    def __init__(self, module: torch.nn.Module, chunks: Chunks, offload: Offload | None = None, stay: bool = False,
                 blocks: Mapping[str, torch.nn.Module] = MappingProxyType({})):
        self.module, self.chunks, self.offload, self.stay = module, chunks, offload, stay
        self._parameters, self.blocks = chunks.parameters, blocks
        self.last_micro_step, self.took_gradients = True, False
        self._node: object | None = None
        self._in_backward: tuple[str, ...] = ()
        self._backward = -1       # autograd's number of the last backward
        self._in_block = False    # whether a compiled block runs forward, and activations are measured
        self._pairs: list[AbstractContextManager | None] = []    # for each module in its forward: the pair that it set
        self.lender = Lender(chunks, self._pairs, self._saving, stay)    # lends parameters that no hook here acquires

    def install(self) -> None:
        """Sets the hooks on the modules and their parameters; to be called once, when the initial weights are in chunks."""
        params = self.chunks.params
        names = {id(param): name for name, param in params.items()}
        for number, (_, child, used) in enumerate(() if self.stay else owners(self.module, self.blocks)):
            own = tuple(dict.fromkeys(names[id(param)] for param in used if id(param) in names))
            if not own and not any(True for _ in child.children()):
                continue    # dropout, GELU, ...: no parameters to acquire, and the enclosing module's pair is in force
            child.register_forward_pre_hook(self._before_forward(own, number), prepend=True)
            child.register_forward_hook(self._after_forward(own), always_call=True)
        if self.chunks.room.watch is not None:
            for block in () if self.stay else self.blocks.values():
                block.register_forward_pre_hook(self._before_block)
                block.register_forward_hook(self._after_block, prepend=True, always_call=True)
        for name, param in params.items():
            trained = param.requires_grad
            param.requires_grad_(True)    # else torch sets no hook, and a frozen parameter may be thawed (check_frozen)
            param.register_post_accumulate_grad_hook(self._after_grad(name))
            param.requires_grad_(trained)

    def _before_forward(self, names: tuple[str, ...], number: int):
        resident = self.chunks.resident

        @torch.compiler.disable
        @whole
        def acquire(module: torch.nn.Module, args: tuple) -> None:
            if interrupts.waiting:
                interrupts.check()
            try:
                self.lender.check_thread(module)
                if torch.is_grad_enabled():    # else it may be an evaluation, which no step repeats
                    resident.path = hash((resident.path, number))
                self.lender.used.update(names)
                if resident.active:
                    self._pairs.append(None)
                    return
                if names:
                    self.chunks.acquire(names)
                if self.offload is not None and not self._pairs:
                    self.offload.stay(self._others())
                pair = self._saving() if torch.is_grad_enabled() else None
                if pair is not None:
                    pair.__enter__()
                self._pairs.append(pair)
            except Exception:
                self._pairs.append(NOTHING_ACQUIRED)    # for `release`, which torch calls for this module too
                raise

        return acquire

    def _after_forward(self, names: tuple[str, ...]):
        resident = self.chunks.resident

        @torch.compiler.disable
        @whole
        def release(module: torch.nn.Module, args: tuple, output: object) -> None:
            pair = self._pairs.pop()
            if pair is NOTHING_ACQUIRED:
                return
            if pair is not None:
                pair.__exit__(None, None, None)
            if names and not resident.active:
                self.chunks.release(names)

        return release

    @torch.compiler.disable
    @whole
    def _before_block(self, module: torch.nn.Module, args: tuple) -> None:
        self._in_block = True

    @torch.compiler.disable
    @whole
    def _after_block(self, module: torch.nn.Module, args: tuple, output: object) -> None:
        """Counts what a compiled block returns, and in backward its gradients, which its graph returns at once."""
        self._in_block, count = False, self.chunks.room.watch.count
        results = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        count(results)
        for node in {result.grad_fn for result in results} - {None}:
            node.register_hook(lambda grads, _: count(grads))

    def _after_grad(self, name: str):
        # The garbage collector does not see a parameter's reference to this function. A strong reference to self would be a
        # cycle that it never collects: a dropped engine would keep all its memory.
        weak_self = weakref.ref(self)

        @whole
        def take(param: torch.nn.Parameter) -> None:
            if interrupts.waiting:
                interrupts.check()
            hooks = weak_self()
            if hooks is None:
                return
            hooks._leave_node()
            hooks.took_gradients = True
            if name in hooks.chunks.units.frozen:    # thawed in the middle of a forward
                hooks.check_frozen()
            hooks.check_used(name)
            with torch._C.DisableTorchFunctionSubclass():    # these are no operations of the model
                hooks.chunks.add_grad(name, param.grad, hooks.last_micro_step)
                param.grad = None
            if hooks.chunks.parameters.lent:
                hooks._idle_after_backward()

        return take

    def _idle_after_backward(self) -> None:
        """Makes parameters that stay near Idle from the end of this backward until the next forward or update: then a read
        of .grad is seen (Lender.check_grad). Called for each gradient, also if the program calls loss.backward()."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_outermost)

    @whole
    def _end_outermost(self) -> None:
        """Called when a backward ends. If it ran inside of another (reentrant checkpointing), modules run after it, and
        parameters stay as they are."""
        if torch._C._current_autograd_node() is None:
            self.chunks.parameters.idle_all()

    def check_frozen(self) -> None:
        """Raises StateError if a parameter that was frozen when the engine started requires a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():    # these are no operations of the model
            thawed = [name for name in self.chunks.units.frozen if self.chunks.params[name].requires_grad]
        if thawed:
            raise StateError(
                f"parameter {min(thawed)} was frozen when the engine started and requires a gradient now: its chunk has no "
                "room for gradients and optimizer states. Freeze what will be trained later after initialize_engine, not in "
                "model_func; or save a checkpoint, and start again without freezing it")

    def check_used(self, name: str) -> None:
        """Raises StateError for a gradient of a parameter that no forward has acquired in this step. Where all parameters
        stay near, they are plain tensors: modules that borrow them need not ask."""
        if not (self.stay or self.chunks.resident.active or name in self.lender.used):
            raise StateError(f"parameter {name} got a gradient, but its module did not run and no operation that asks for a "
                             "parameter's bytes read it: scripted functions and functions of extensions do not ask, give "
                             "them the parameter's clone(), or keep its module out of chunks by pstar.exclude(module)")

    def _saving(self) -> AbstractContextManager | None:
        """A pair of saved-tensor hooks that replaces views of chunks and passes all else to the pair in force below it; None
        if the pair below is already ours."""
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if below and getattr(below[0], "of", None) is self:
            return None
        pack_below, unpack_below = below or (self._keep, _unpack_kept)

        @whole
        def pack(tensor: torch.Tensor) -> object:
            view = self._pack(tensor)
            return pack_below(tensor) if view is None else view

        @whole
        def unpack(saved: object) -> torch.Tensor:
            return self._unpack(saved) if isinstance(saved, SavedView | SavedBits) else unpack_below(saved)

        pack.of = self
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _others(self) -> list[torch.Tensor]:
        """The model's buffers, and its parameters that are not in chunks."""
        in_chunks = self.chunks.params
        return [*self.module.buffers(), *(param for name, param in self.module.named_parameters() if name not in in_chunks)]

    def _keep(self, tensor: torch.Tensor) -> Away | Kept:
        """What the graph keeps for a tensor that is no view of a chunk, if no other pair of hooks is in force."""
        away = self.offload.pack(tensor) if self.offload is not None else None
        if self._in_block and away is None:
            self.chunks.room.watch.count((tensor,))
        return away or Kept(tensor.detach(), None if tensor.is_inference() else tensor._version)

    def _pack(self, tensor: torch.Tensor) -> SavedView | SavedBits | None:
        if issubclass(type(tensor), Idle):    # ctx.save_for_backward of a borrowed parameter
            name = self.lender.name_of(tensor)
            if not self.lender.asked_within(name, sys._getframe(2)):
                self.lender.refuse(f"parameter {name}")
            return SavedView(name, 0, self._parameters.shapes[name], self._parameters.strides[name])
        unit = self._parameters.unit_of(tensor)
        if unit is None:
            if tensor.dim() and not tensor.stride(-1) and self._parameters.is_placeholder(tensor):
                self.lender.refuse_view(tensor)
            return None
        if tensor.dtype is not self._parameters.dtype or tensor.is_neg():
            return self._pack_bits(tensor, unit)
        start = tensor.storage_offset()
        for slot in unit.slots:
            if slot.offset <= start < slot.offset + slot.numel:
                return SavedView(slot.name, start - slot.offset, tensor.size(), tensor.stride())
        raise StateError(f"a tensor saved for backward begins at element {start} of group {unit.group}, in no parameter")

    def _pack_bits(self, tensor: torch.Tensor, unit: Unit) -> SavedBits:
        start, itemsize = tensor.storage_offset() * tensor.itemsize, self._parameters.dtype.itemsize
        slot = next(slot for slot in unit.slots if slot.offset <= start // itemsize < slot.offset + slot.numel)
        return SavedBits(slot.name, start - slot.offset * itemsize, tensor.size(), tensor.stride(), tensor.dtype,
                         tensor.is_conj(), tensor.is_neg())

    def _unpack(self, saved: SavedView | SavedBits) -> torch.Tensor:
        node = torch._C._current_autograd_node()
        if node is not self._node or node is None:
            self._leave_node()
            self._node = node
        self.chunks.acquire((saved.name,))
        self._in_backward += (saved.name,)
        param = self.chunks.params[saved.name]
        if isinstance(saved, SavedBits):
            return saved.of(param.data)
        return param.data.as_strided(saved.size, saved.stride, param.data.storage_offset() + saved.offset)

    def _leave_node(self) -> None:
        """Releases the parameters that the last node of the graph acquired."""
        if self._in_backward:
            self.chunks.release(self._in_backward)
        self._in_backward, self._node = (), None

    def abandon(self) -> None:
        """Ends the step after an exception in forward or backward: unsets all pairs and releases all parameters.

        torch calls a module's forward hooks after an Exception, but not after Ctrl-C (KeyboardInterrupt). Without this,
        pairs would stay in force and parameters in use for ever. A gradient that no hook has taken would be added to the
        next one.
        """
        while self._pairs:
            pair = self._pairs.pop()
            if pair is not None:
                pair.__exit__(None, None, None)
        self._in_backward, self._node, self._in_block = (), None, False
        self.lender.open = False
        self.chunks.release_uses()
        with torch._C.DisableTorchFunctionSubclass():    # these are no operations of the model
            for param in self.chunks.params.values():
                param.grad = None

    def end_backward(self) -> None:
        self._leave_node()
        self.lender.open = False
        self.chunks.resident.end_backward()
        self.chunks.gradients.end_backward(self.last_micro_step)

    def complete_early(self) -> None:
        """Called before an update after fewer micro-steps than usual: the last of them did not complete the gradients."""
        self.chunks.gradients.end_backward(last_micro_step=True)


def _unpack_kept(saved: Away | Kept) -> torch.Tensor:
    return saved.unpack()
