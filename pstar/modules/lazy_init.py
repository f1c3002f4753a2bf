"""Lazy start: a model is built without memory, and its initial weights are made one parameter at a time.

`record` runs model_func on the meta device and records every operation on a tensor. `Recipe.replay` runs the operations
again, on real tensors and in the same order. So the random generator gives each parameter the same numbers as a plain start
with the same seed. A parameter is handed over, and its memory freed, when its last operation is done. Many values are
overwritten later: torch initialises a layer when it is made, most models once more at the end. Such values are computed only
if that draws random numbers, into temporary memory.

Tensors that model_func reads from a file (from_pretrained) are real from the beginning; what the file lacks is recorded.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pstar.errors import ConfigError, StateError
from pstar.modules.generator_calls import GeneratorCalls
from pstar.modules.scope import parameters_of
from pstar.modules.trainable import attributes, check_aliases, check_made, check_trainable

# In-place operations that write every element of their first argument and read none of them.
OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "random_", "exponential_", "log_normal_", "cauchy_", "copy_",
              "geometric_", "bernoulli_"}

# Operations that make a tensor of another tensor's shape.
LIKE = {getattr(torch.ops.aten, name).default for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                                                           "randn_like")}

# Initialisations of torch.nn.init that read values, or do nothing on the meta device.
NOT_ON_META = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")

CPU, META = torch.device("cpu"), torch.device("meta")

# Questions about a tensor's device, and the answers in a plain start.
ANSWERS = {torch.Tensor.device.__get__: CPU, torch.Tensor.is_cpu.__get__: True, torch.Tensor.is_meta.__get__: False}


@dataclass(frozen=True)
class Ref:
    """A meta tensor: its storage, and its view of the storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int


@dataclass
class Op:
    func: Any
    leaves: list[Any]
    """Flattened (args, kwargs), with a Ref for each meta tensor."""
    spec: Any
    outputs: list[Ref]
    reads: set[int]
    writes: set[int]
    overwrites: bool
    random: bool


class _Recorder(TorchDispatchMode):
    """Makes every new tensor on the meta device, and records the operations on it.

    Not `with torch.device("meta")`: some libraries detect that and skip their initialisation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.kept: dict[int, Any] = {}    # keeps storages alive, so that no address is reused
        self.made: list[weakref.ref] = []    # the tensors on the meta device
        self.generator = GeneratorCalls(self._set_generator)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():    # _InHostMemory does not answer us
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(self.recorded(leaf) for leaf in inputs):
            return self._follow(func, leaves, spec)
        device = (kwargs or {}).get("device")
        if inputs and device is not None and func in LIKE:    # memory for what a checkpoint lacks, shaped as a meta tensor
            makes = device.type != "meta" and all(leaf.device.type == "meta" for leaf in inputs)
        else:    # on the meta device the model makes a tensor on purpose
            takes_device = any(argument.name == "device" for argument in func._schema.arguments)
            makes = not inputs and takes_device and (device is None or device.type != "meta")
        if makes:
            leaves, spec = tree_flatten((args, {**(kwargs or {}), "device": META}))
            return self._follow(func, leaves, spec, templates=True)
        if torch.Tag.nondeterministic_seeded in func.tags and any(leaf.device.type != "meta" for leaf in inputs):
            raise StateError("it draws random numbers into a tensor with memory, whose turn among the others is lost")
        return func(*args, **(kwargs or {}))

    def _set_generator(self, call: Callable[[], object]) -> None:
        leaves, spec = tree_flatten(((), {}))
        self.ops.append(Op(call, leaves, spec, [], set(), set(), overwrites=False, random=True))

    def _draws_from(self, leaves: list[Any]) -> None:
        self.generator.draws(next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None))

    def whole(self, function: Callable) -> Callable:
        """Wraps an initialisation that must be recorded as one operation, because it reads values."""
        def record_whole(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.recorded(tensor):
                return function(tensor, *args, **kwargs)
            ref = self._ref(tensor)
            leaves, spec = tree_flatten(((ref, *args), kwargs))
            self._draws_from(leaves)
            covers = ref.storage_bytes == math.prod(ref.size) * ref.dtype.itemsize
            reads = set() if covers else {ref.storage}
            self.ops.append(Op(function, leaves, spec, [ref], reads, {ref.storage}, covers, random=True))
            return tensor

        return record_whole

    def recorded(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.device.type == "meta" and storage_key(tensor) in self.kept

    def _follow(self, func: Any, leaves: list[Any], spec: Any, templates: bool = False) -> Any:
        """Runs an operation on shapes alone and records it; the record refers to real input tensors themselves.

        Args:
            templates: inputs on the meta device give their shape alone.

        Raises StateError if an input is on the meta device and its making was not recorded, or if the operation writes
        into a real tensor, which would keep its old values.
        """
        leaves = [_instead_of_cpu(leaf) for leaf in leaves]
        for leaf in leaves if not templates else ():
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" and not self.recorded(leaf):
                raise StateError("it computes with a tensor that it made on the meta device, which has no values")
        if any(isinstance(leaf, torch.Tensor) and not self.recorded(leaf) for leaf in _written(func, leaves, spec)):
            raise StateError("it writes a value that it makes into a tensor that it does not make (one of a checkpoint)")
        shapes = [torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
                  and leaf.dim() else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(shapes, spec)
        result = func(*args, **kwargs)
        self.made += [weakref.ref(value) for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        refs = [self._ref(leaf) if isinstance(leaf, torch.Tensor) and self.recorded(leaf) else leaf for leaf in leaves]
        inputs = {leaf.storage for leaf in refs if isinstance(leaf, Ref)}
        outputs = [self._ref(value) for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        mutates = func._schema.is_mutable
        if not mutates and outputs and all(output.storage in inputs for output in outputs):
            return result    # a view: each use of it records its size and stride
        target = refs[0] if isinstance(refs[0], Ref) else None
        whole = mutates and target is not None and func._schema.name.split("::")[1] in OVERWRITES and (
            target.storage_bytes == math.prod(target.size) * target.dtype.itemsize)
        reads = inputs - ({target.storage} if whole else set())
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random:
            self._draws_from(leaves)
        self.ops.append(Op(func, refs, spec, outputs, reads, {ref.storage for ref in outputs}, whole or not mutates, random))
        return result

    def _ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        self.kept[storage._cdata] = storage
        return Ref(storage._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(),
                   storage.nbytes())


def _instead_of_cpu(argument: Any) -> Any:
    """The meta device for the CPU, anything else as it is."""
    return META if isinstance(argument, torch.device | str) and str(argument) in ("cpu", "cpu:0") else argument


class _InHostMemory(TorchFunctionMode):
    """Says of recorded tensors that they are in host memory, as in a plain start. A model may ask, and initialise nothing
    on the meta device; then it would begin with other values."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and self._recorder.recorded(args[0]):
            if func in ANSWERS:
                return ANSWERS[func]
            if func is torch.Tensor.data_ptr:    # on the meta device all addresses are 0, and all tensors seem tied
                return storage_key(args[0]) + args[0].storage_offset() * args[0].element_size()
            if func is torch.Tensor.cpu:
                return args[0]
            if func is torch.Tensor.to:    # to where it is already, it returns the tensor itself
                to, kwargs = tree_map(_instead_of_cpu, (args[1:], kwargs))
                args = (args[0], *to)
        if func is torch._has_compatible_shallow_copy_type and len(set(map(self._recorder.recorded, args))) > 1:
            return False    # Module.to_empty asks: a parameter on the meta device is replaced, not given memory
        return func(*args, **kwargs)


def _written(func: Any, leaves: list[Any], spec: Any) -> Iterator[Any]:
    """The arguments that an operation writes."""
    args, kwargs = tree_unflatten(leaves, spec)
    for index, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tree_flatten(value)[0]


class _Scratch:
    """Memory of values that nobody needs any more, one piece of each size, for the next value of that size. New memory costs
    a page fault for every 4,096 bytes, measured as a third of the time in which the values are drawn."""

    def __init__(self) -> None:
        self._free: dict[int, torch.UntypedStorage] = {}

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        return self._free.pop(num_bytes, None) or torch.UntypedStorage(num_bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        self._free[storage.nbytes()] = storage


@dataclass
class Recipe:
    """The operations that make a model's initial weights."""

    ops: list[Op]
    kept: dict[int, Any]
    made: list[weakref.ref]
    peak_bytes: int = 0
    """Peak of memory during replay, without parameters that were handed over."""

    def replay(self, wanted: dict[int, Any], take: Callable[[Any, torch.Tensor], object]) -> None:
        """Makes every wanted storage and hands it over, in the order in which they are finished.

        Args:
            wanted: storage (storage_key of a meta tensor) -> its label.
            take: called with that label and the storage's bytes as a flat uint8 tensor in host memory; returns true if no
                tensor keeps them, so that later values may use the memory.

        Raises StateError if the operations do not make all of them.
        """
        live, last_use = self._liveness(set(wanted))
        made: dict[int, torch.UntypedStorage] = {}
        scratch = _Scratch()
        for index, op in enumerate(self.ops):
            if live[index]:
                self._run(op, made, scratch.allocate)
            elif op.random:
                drawn = {key: made[key] for key in op.reads if key in made}    # only to draw its random numbers
                self._run(op, drawn, scratch.allocate if op.overwrites else torch.UntypedStorage)
                for key in drawn.keys() - op.reads if op.overwrites else ():
                    scratch.release(drawn.pop(key))
            self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in made.values()))
            for key in [key for key in made if last_use.get(key, -1) <= index]:
                storage = made.pop(key)
                if key in wanted:
                    if take(wanted[key], torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)):
                        scratch.release(storage)
                    wanted = {other: name for other, name in wanted.items() if other != key}
        if wanted:
            raise StateError(f"the model's start does not say how these are made: {list(wanted.values())}")

    def _liveness(self, needed: set[int]) -> tuple[list[bool], dict[int, int]]:
        """(for each operation whether a needed storage depends on it, for each storage its last such operation)."""
        live, last_use = [False] * len(self.ops), {}
        for index in reversed(range(len(self.ops))):
            op = self.ops[index]
            if not op.writes & needed:
                continue
            live[index] = True
            for key in op.reads | op.writes:
                last_use.setdefault(key, index)
            if op.overwrites:
                needed = needed - op.writes
            needed = needed | op.reads
        return live, last_use

    def _run(self, op: Op, made: dict[int, torch.UntypedStorage], allocate: Callable[[int], torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return CPU if leaf == META else leaf
            if not isinstance(leaf, Ref):
                return leaf
            if leaf.storage not in made:
                made[leaf.storage] = allocate(leaf.storage_bytes)
            view = torch.empty(0, dtype=leaf.dtype, device=made[leaf.storage].device)
            return view.set_(made[leaf.storage], leaf.offset, leaf.size, leaf.stride)

        args, kwargs = tree_unflatten([real(leaf) for leaf in op.leaves], op.spec)
        results = [value for value in tree_flatten(op.func(*args, **kwargs))[0] if isinstance(value, torch.Tensor)]
        for ref, value in zip(op.outputs, results, strict=True):
            made.setdefault(ref.storage, value.untyped_storage())


def storage_key(tensor: torch.Tensor) -> int:
    """A number that identifies a meta tensor's storage."""
    return tensor.untyped_storage()._cdata


def swap(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Gives a tensor of the model the content of `made`. The model keeps its object, and the gradient hooks on it."""
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch.utils.swap_tensors(tensor, made)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


def record(model_func: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, Recipe]:
    """(the model on the meta device, the recipe of its weights). Draws no random number."""
    recorder = _Recorder()
    with recorder.generator, ExitStack() as stack:
        for name in NOT_ON_META:
            stack.enter_context(mock.patch.object(init, name, recorder.whole(getattr(init, name))))
        with recorder, _InHostMemory(recorder):
            module = model_func()
            recorder.generator.look()
    return module, Recipe(recorder.ops, recorder.kept, recorder.made)


def _registered(module: torch.nn.Module) -> set[int]:
    """The ids of its parameters and buffers."""
    return set(map(id, (*parameters_of(module), *module.buffers())))


def _unregistered(module: torch.nn.Module, recipe: Recipe) -> str | None:
    """The name of an attribute with a recorded tensor that replay would not make; None if there is none."""
    known = _registered(module)
    return next((name for name, tensor in attributes(module) if tensor.device.type == "meta" and id(tensor) not in known
                 and storage_key(tensor) in recipe.kept), None)


def _kept_elsewhere(module: torch.nn.Module, recipe: Recipe) -> list[tuple[str, torch.Tensor]]:
    """The recorded tensors, no parameters and no buffers, that something still refers to: a function of a hook, for example.
    With the words for each."""
    known = _registered(module)

    def found() -> list[torch.Tensor]:
        tensors = (reference() for reference in recipe.made)
        return [tensor for tensor in tensors if tensor is not None and id(tensor) not in known]

    if found():
        gc.collect()    # they may be in a cycle that nobody needs
    return [(f"a tensor of shape {tuple(tensor.shape)}, in a function for example,", tensor) for tensor in found()]


def _base_among(module: torch.nn.Module) -> str | None:
    """The name of a buffer that is a view of another buffer or of a parameter: torch does not swap that one."""
    known = _registered(module)
    return next((name for name, buffer in module.named_buffers() if id(buffer._base) in known), None)


def _not_recorded(module: torch.nn.Module, recipe: Recipe) -> str | None:
    """The name of a parameter or buffer that model_func itself puts on the meta device, and leaves there."""
    return next((name for name, tensor in chain(module.named_parameters(), module.named_buffers())
                 if tensor.device.type == "meta" and storage_key(tensor) not in recipe.kept), None)


def _check_profiler() -> None:
    """Raises StateError if a profiler runs that keeps references to the tensors it sees: torch does not swap those."""
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    other = one.clone()
    one.add_(other)
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        raise StateError("a profiler with record_shapes keeps references to its parameters (start it after "
                         "initialize_engine)") from None


def build(model_func: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, Recipe | None]:
    """The model without memory and the recipe of its weights; if that is not possible, the model and None, with a warning.

    Raises ConfigError for a model that the engine cannot train.
    """
    of_python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        module, recipe = record(model_func)
        if (name := _unregistered(module, recipe)) is not None:
            raise StateError(f"its {name} is a tensor, neither a parameter nor a buffer (register_buffer makes it one)")
        kept = _kept_elsewhere(module, recipe)
        check_aliases(module, [*module.named_buffers(), *kept])
        if kept:
            raise StateError(f"it keeps {kept[0][0]} that is neither a parameter nor a buffer (register_buffer makes it "
                             "one)")
        if (name := _base_among(module)) is not None:
            raise StateError(f"its buffer {name} is a view of another")
        if (name := _not_recorded(module, recipe)) is not None:
            raise StateError(f"it leaves {name} on the meta device")
        _check_profiler()
        recipe.made.clear()    # no weak reference of ours counts in the next line
        if any(weakref.getweakrefs(tensor) for tensor in (*parameters_of(module), *module.buffers())):
            raise StateError("some of its parameters are referenced weakly (torch's RNNs do that)")
    except ConfigError:
        raise
    except Exception as error:    # the model's code may raise any error when it computes with shapes alone
        random.setstate(of_python)    # model_func has drawn from them
        if numpy:
            numpy.random.set_state(of_numpy)
        module, recipe = model_func(), None    # raises again if the error is in the model
        reason = str(error).split("\n")[0]
        warnings.warn(f"lazy start is not possible for this model, so every rank builds all of it: {reason}", stacklevel=3)
    check_trainable(module)
    if recipe is None:
        check_made(module)
    return module, recipe
