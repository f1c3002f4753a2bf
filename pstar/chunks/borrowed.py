"""Borrowed parameters: an operation outside of the module that owns a parameter gets its bytes, too.

Hooks on modules acquire the parameters of the module that runs. Other code may read other parameters: a head tied by hand,
a penalty over parameters(), a ParameterList, a block with another block's weight, a reference kept since __init__. It must
find their bytes, never the placeholder. So a parameter that no running module uses has the class Idle, a subclass with a
`__torch_function__`. torch calls this function instead of every operation that gets such a parameter as an argument. The
function acquires the bytes, runs the operation, and releases the bytes. Backward needs nothing more: saved tensors are
unpacked as for any parameter, and autograd adds the gradients of all uses.

Whether a parameter is idle depends on the program alone, not on which blocks are in near. So every step touches the same
keys at the same moments, the trace knows and prefetches them, and all ranks call the same collectives. If nothing is
borrowed, the cost is one assignment of a class when a parameter is acquired and one when it is released.

A few callers never check the class of a tensor: torch.vmap, scripted functions, functions of an extension. They would
compute with the placeholder. torch.vmap asks for the number of dimensions first, and is refused there. For the others, two
things are refused: a placeholder saved for backward (Hooks._pack), and a gradient of a parameter that no forward has
acquired in this step (`used`). One case remains: such an operation saves nothing, and other modules use the parameter too.
Then the loss is NaN if the parameter is not in near, and not_finite.py names the module.

A result that is a view of a parameter (`weight[:t]`, `weight.T`) keeps its memory alive, see BlockStore._leave.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from pstar.errors import BudgetError, StateError

# Functions and methods that read shapes, types or hooks, never bytes.
NO_BYTES = frozenset([
    "__len__", "_is_view", "backward", "can_cast", "dim", "dim_order", "element_size", "empty_like", "full_like",
    "get_device", "grad", "has_names", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference",
    "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed", "is_tensor", "ndimension", "nelement", "new_empty",
    "new_full", "new_ones", "new_tensor", "new_zeros", "numel", "ones_like", "rand_like", "randint_like", "randn_like",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type", "retain_grad", "size",
    "storage_offset", "stride", "zeros_like"])

# Attributes that read the bytes; all others (shape, dtype, grad, ...) do not.
BYTES_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

MODULE = "torch.nn.modules.module"    # the module whose code calls forward
NO_TRANSFORMS = "don't yet support saved tensor hooks"    # torch says so of torch.func.grad, vjp, jacrev and hessian
VMAP = "torch._functorch.vmap"    # the module whose code unpacks the arguments of torch.vmap

ACCESS = frozenset({"__get__", "__set__", "__delete__"})

CHANGES = frozenset({"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


class Gradients(Protocol):
    """The part of pstar.chunks.gradients.Gradients that a Lender uses."""

    def arrived(self, name: str) -> bool: ...

    def waiting(self) -> bool: ...


class ResidentSteps(Protocol):
    """The part of pstar.chunks.resident.ResidentSteps that a Lender uses."""

    active: bool


class Chunks(Protocol):
    """The part of pstar.chunks.Chunks that a Lender uses."""

    params: dict[str, torch.nn.Parameter]
    gradients: Gradients
    resident: ResidentSteps

    def acquire(self, names: tuple[str, ...]) -> None: ...

    def release(self, names: tuple[str, ...]) -> None: ...

    def bind_all(self) -> None: ...

    def lend_all(self) -> None: ...


class Lender:
    """Lends the parameters of one engine to operations.

    Args:
        chunks: the parameters.
        running: one entry for each module that is in its forward.
        saving: returns a pair of saved-tensor hooks for operations outside of modules, None if one is in force.
        stay: all parameters stay near; the first operation that reads an idle parameter copies all (Chunks.lend_all).
    """

    def __init__(self, chunks: Chunks, running: Sequence[object], saving: Callable[[], AbstractContextManager | None],
                 stay: bool = False):
        self.chunks, self.stay = chunks, stay
        self.open = False
        """Whether the program is in the engine's forward, or between a training forward and the end of its backward."""
        self.used: set[str] = set()
        """The parameters that a forward has acquired since the step began."""
        self._asked: set[tuple[str, int, int]] = set()
        """Of operations that asked since the last forward began: a parameter, and each call around it with its place."""
        self._lent: set[tuple[str, tuple]] = set()
        """Of operations that asked in a forward of this step: a parameter, and the place in the program (_place)."""
        self._thread: int | None = None    # of the outermost module that runs
        self._refused: str | None = None
        self._running, self._saving = running, saving
        self.run = torch.compiler.disable(self._run)    # not a decorator: it imports the compiler, which takes seconds
        for name, param in chunks.params.items():
            param._pstar_lender = weakref.ref(self), name

    def _run(self, func: Callable, names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
        """func(*args, **kwargs) with the bytes of the parameters in names. Raises StateError outside of a step, BudgetError
        if near has no room for them."""
        self._note(names)
        if self.stay or self.chunks.resident.active:
            if not self.chunks.gradients.waiting():
                self.chunks.lend_all()
                return func(*args, **kwargs)
            self.chunks.bind_all()
            with torch._C.DisableTorchFunctionSubclass():    # they stay Idle: see check_grad
                return func(*args, **kwargs)
        if not self.is_open():
            raise StateError(
                f"{_operation(func)} in {_module()} reads parameter {names[0]} between two steps, while it is in a chunk: "
                "read it in the model's forward, between model(...) and model.backward(loss), or from model.gather_state()")
        pair = self._saving() if torch.is_grad_enabled() else None
        copied = pair is not None and self._is_recomputed(names)
        acquired: list[str] = []
        try:
            self.used.update(names)
            for name in names:
                self._acquire(name, func)
                acquired.append(name)
            if copied:
                copies = {id(self.chunks.params[name]): self.chunks.params[name].clone() for name in names}
                args, kwargs = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
                pair = None
            with pair or nullcontext():
                return func(*args, **kwargs)
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                self.chunks.release(tuple(acquired))

    def _is_recomputed(self, names: tuple[str, ...]) -> bool:
        """Whether torch.utils.checkpoint repeats an operation whose parameters were not lent in forward: the module that
        owns them was running, and called checkpoint with a function of its own. (In backward it does not run.)

        Then forward saved them through checkpoint's pair of hooks alone. Backward must save as many tensors through it; but
        that pair keeps the tensors, and a chunk may move. So the operation gets copies.
        """
        place = _place()
        if torch._C._current_autograd_node() is None:
            self._lent.update((name, place) for name in names)
            return False
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return bool(below) and not any((name, place) in self._lent for name in names)

    def _note(self, names: tuple[str, ...]) -> None:
        """Keeps for asked_within that an operation asks for these parameters, and which calls it is part of."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") != MODULE:
            self._asked.update((name, id(frame), frame.f_lasti) for name in names)
            frame = frame.f_back

    def asked_within(self, name: str, frame: FrameType) -> bool:
        """Whether an operation asked for this parameter within the call that `frame` makes now.

        So an autograd.Function that computes with a parameter may save it. A function in C++ that saves one has not asked.
        """
        return (name, id(frame), frame.f_lasti) in self._asked

    def is_open(self) -> bool:
        """Whether parameters are lent now: in a forward, and until the backward of a training forward is over."""
        return self.open or bool(self._running)

    @contextmanager
    def forward(self, training: bool) -> Iterator[None]:
        """The model's forward runs inside. After a training forward, parameters are lent until its backward is over."""
        before, self.open, self._refused = self.open, True, None
        self._asked.clear()
        try:
            yield
        except RuntimeError as error:    # TorchScript drops the message of errors raised inside
            if self._refused is not None and not isinstance(error, StateError):
                raise StateError(self._refused) from error
            if NO_TRANSFORMS in str(error) and not self.stay:
                raise StateError(f"{str(error).split('. ')[0]}, and the engine needs some where chunks move: take "
                                 "derivatives in the model by torch.autograd.grad(..., create_graph=True), or give "
                                 "near_budget 100% to one process") from error
            raise    # Hooks.abandon ends the step
        self.open = training or before

    def check_thread(self, module: torch.nn.Module) -> None:
        """Raises StateError if the module runs in another thread than the module around it. (Backward may do that.)"""
        thread = threading.get_ident()
        if not self._running:
            self._thread = thread
        elif thread != self._thread and torch._C._current_autograd_node() is None:
            raise StateError(f"{type(module).__name__} runs in another thread than the module around it, and only one "
                             "can acquire parameters: call all in one thread, or give near_budget 100% to one process")

    def refuse(self, what: str) -> None:
        """Raises StateError: `what` was read by an operation that did not acquire its bytes."""
        self._refused = (f"an operation in {_module()} read {what} without asking for its bytes, as scripted functions and "
                         "functions of extensions do: give them the parameter's clone(), or keep its module out of chunks "
                         "by pstar.exclude(module)")
        raise StateError(self._refused)

    def refuse_view(self, view: torch.Tensor) -> None:
        """Raises StateError: an operation read the placeholder of which `view` is a view."""
        names = [name for name, param in self.chunks.params.items() if sorted(param.shape) == sorted(view.shape)]
        self.refuse(f"a parameter of shape {tuple(view.shape)} ({' or '.join(names[:3]) or 'a part of one'})")

    def check_grad(self, name: str) -> None:
        """Raises StateError if the program reads or writes .grad while the gradient is in a chunk: it would find None, and
        torch.nn.utils.clip_grad_norm_ would clip nothing, without a word."""
        if self.chunks.gradients.arrived(name):
            raise StateError(f"{_module()} reads or writes {name}.grad, but the gradient is in a chunk: clip with the "
                             "configuration's gradient_clipping, drop gradients with optimizer.zero_grad(), read their norm "
                             "in optimizer.grad_norm after step(), and see one in a hook (param.register_hook)")

    def end_step(self) -> None:
        self.open = False
        self.used.clear()
        self._lent.clear()

    @staticmethod
    def name_of(param: Idle) -> str:
        return _lender(param)[1]

    def _acquire(self, name: str, func: Callable) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                self.chunks.acquire((name,))
            except BudgetError as error:
                raise BudgetError(f"{_operation(func)} in {_module()} borrows parameter {name} of another module, and near "
                                  f"has no room for it in addition to the module's parameters: {error}") from None


class Idle(torch.nn.Parameter):
    """A parameter that no running module uses."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not _reads_bytes(func):
            if _name(func) == "dim" and sys._getframe(1).f_globals.get("__name__") == VMAP:
                _refuse_vmap(args[0])
            if _name(func) in ACCESS and _name(func.__self__) == "grad":
                _check_grad(args[0])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: dict[str, None] = {}
        lender = None
        for param in _idle_among((args, kwargs)):
            its_lender, name = _lender(param)
            if lender is None or its_lender is lender:    # the nested call lends parameters of another engine
                lender = its_lender
                found[name] = None
        if lender is None:
            raise StateError(f"{_operation(func)} in {_module()} reads a parameter that is in a chunk, inside an argument "
                             "that is no list, tuple or dict: give it the parameter itself")
        if _changes(func, args, kwargs):
            name = next(iter(found))
            raise StateError(
                f"{_operation(func)} in {_module()} changes parameter {name} in place while it is in a chunk: call "
                "model.load_state(weights), or keep it with PyTorch (pstar.exclude)")
        return lender.run(func, tuple(found), args, kwargs)

    def __repr__(self) -> str:
        return f"Parameter in a chunk: {tuple(self.shape)}, {self.dtype}"

    def __deepcopy__(self, memo: dict) -> Any:
        raise StateError(f"parameter {_lender(self)[1]} is in a chunk and cannot be copied: model.gather_state() gives "
                         "plain tensors")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(f"parameter {_lender(self)[1]} is in a chunk and cannot be pickled: model.gather_state() gives "
                         "plain tensors, model.save_checkpoint() a file")


@cache
def idle_class(kind: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    """The class of an idle parameter of class `kind`: Idle, or a subclass of both."""
    return Idle if kind is torch.nn.Parameter else type(f"Idle{kind.__name__}", (Idle, kind), {})


def _find_lender(param: Idle) -> tuple[Lender | None, str]:
    found, name = param.__dict__.get("_pstar_lender", (lambda: None, "of an engine that is being built"))
    return found(), name


def _lender(param: Idle) -> tuple[Lender, str]:
    lender, name = _find_lender(param)
    if lender is None:
        raise StateError(f"parameter {name} has no bytes: its engine was deleted")
    return lender, name


def _check_grad(param: Idle) -> None:
    lender, name = _find_lender(param)
    with torch._C.DisableTorchFunctionSubclass():
        if lender is not None and param.grad is None:
            lender.check_grad(name)


def _refuse_vmap(param: Idle) -> None:
    name = _lender(param)[1]
    raise StateError(f"torch.vmap in {_module()} is given parameter {name}, which no running module owns, and would "
                     "read its placeholder: give it the parameter's clone()")


def _idle_among(values: Iterable[Any]) -> Iterator[Idle]:
    for value in values:
        if issubclass(type(value), Idle):    # isinstance asks the metaclass of Parameter, which takes five times as long
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _idle_among(value)
        elif isinstance(value, dict):
            yield from _idle_among(value.values())


def _reads_bytes(func: Callable) -> bool:
    name = _name(func)
    if name == "__get__":
        return _name(func.__self__) in BYTES_ATTRIBUTES
    if name in ("__set__", "__delete__"):
        return _name(func.__self__) == "data"
    return name not in NO_BYTES


def _changes(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operation writes into one of its idle arguments."""
    name = _name(func)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in CHANGES
    written = (args[:1] or kwargs.values()) if in_place else ()
    return any(True for _ in _idle_among((*written, kwargs.get("out"))))


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _operation(func: Callable) -> str:
    name = _name(func)
    return f"Tensor.{_name(func.__self__)}" if name in ("__get__", "__set__") else name


def _place() -> tuple[CodeType | None, int, int]:
    """Of the innermost call of code that is neither torch's nor pstar's: the code, where in it, and the id of its `self`."""
    frame = _users_frame()
    return (None, 0, 0) if frame is None else (frame.f_code, frame.f_lasti, id(frame.f_locals.get("self")))


def _users_frame() -> FrameType | None:
    """The innermost call of code that is neither torch's nor pstar's; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "pstar.")):
        frame = frame.f_back
    return frame


def _module() -> str:
    """The class of the innermost module whose code runs, and the user's line, from the stack; called for errors only."""
    users, frame, module = _users_frame(), sys._getframe(1), "no module"
    line = users and f"line {users.f_lineno} of {users.f_code.co_filename.rpartition('/')[2]}"
    while frame is not None:
        its_self = frame.f_locals.get("self")
        if isinstance(its_self, torch.nn.Module) and not frame.f_globals.get("__name__", "").startswith("pstar."):
            module = type(its_self).__name__
            break
        frame = frame.f_back
    return f"{module} ({line})"
