"""A recorder that finds races on a GPU without a GPU: near is host memory, streams and events only keep vector clocks.

On a GPU an operation runs later than the program issues it, in the order of its stream. A missing wait shows as a wrong
number only if the timing is unlucky. The recorder needs no luck: it knows which accesses are ordered by a stream, an event,
a handle or a lock of the program, and reports every access of a tier's buffer that nothing orders after the last writer (for
a write: after the readers as well). Vector clocks: Mattern 1989, "Virtual time and global states of distributed systems";
races as unordered accesses: Flanagan and Freund 2009, "FastTrack", section 2.

Who acts, and what orders the actions:

    thread      its operations on host memory, one after the other
    stream      kernels and copies, after all that the thread had done when it issued them; `synchronize` and a copy that
                blocks order the thread after the stream; `Event` orders streams and threads
    CopyQueue   a job runs after its submission; a wait for it, and `Handle.done`, order the thread after the job, and events
                after a copy that the job issued

An operation that reads or writes a buffer of near belongs to the current stream, every other one to the thread. A buffer
that a tier drops returns to the allocator, which may give it to any later kernel of the compute stream: that is a write.

With `host` nothing is a GPU: near belongs to the threads as well, and each job of a background worker is an actor of its
own, because a queue by need may run its jobs in any order that the handles allow.

The recorder is more careful than a GPU in one way: reading a number (`tensor.item()`) orders nothing here. Of the memory
outside of tiers it sees only offloaded activations. It does not see code that asks for a tensor's device type.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pstar.kernels.cpu
from pstar.chunks.activation_offload import Offload
from pstar.chunks.activation_streams import ActivationStreams
from pstar.memory import accelerator, links
from pstar.memory import tier as tier_module
from pstar.memory.copy_queue import Handle
from pstar.memory.disk import DiskTier
from pstar.memory.tier import NEAR, Tier

NO_ACCESS = ("aten.detach", "aten.empty", "aten.set_")
"""Operations that get a tensor, but neither read nor write its bytes; views are left out by themselves."""

LAST_USES = 2
"""References to a storage whose tensor is being freed: by this tensor and by the recorder."""

Clock = dict[int, int]


class Actor:
    """A thread or a stream. Its clock: for each actor, how many of that one's actions are ordered before its next action."""

    def __init__(self, name: str, number: int):
        self.name, self.number = name, number
        self.clock: Clock = {number: 1}

    def follow(self, clock: Clock) -> None:
        """From now on this actor's actions come after those of the clock."""
        for number, count in clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def act(self) -> Clock:
        """The clock of what this actor has done so far; what it does next is another action."""
        done = dict(self.clock)
        self.clock[self.number] += 1
        return done


@dataclass(frozen=True)
class Access:
    actor: int
    count: int
    what: str

    def before(self, actor: Actor) -> bool:
        return actor.clock.get(self.actor, 0) >= self.count


@dataclass
class Buffer:
    """A buffer of a tier with its last write and the reads since then, one for each actor."""

    tier: str
    written: Access | None = None
    read: dict[int, Access] = field(default_factory=dict)


class Recorder:
    """Records while it is used in a with statement, in all threads of the process. `races` holds one line for each race.

    Args:
        host: near is host memory, as on a machine without a GPU; False: it is a GPU's.
    """

    def __init__(self, host: bool = False) -> None:
        self.host = host
        self.races: list[str] = []
        self.accesses = 0
        self._lock = threading.RLock()
        self._local = threading.local()
        self._actors = 0
        self._buffers: dict[int, Buffer] = {}    # by address
        self._ended: Clock = {}    # of all jobs that ended: a running job would keep its buffers, so a freed one has none
        self.compute = Stream(self)

    def __enter__(self) -> Recorder:
        self._patches = pytest.MonkeyPatch()
        _replace(self._patches, self)
        self._mode = Watch(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        self._patches.undo()

    # ------------------------------------------------------------------ actors

    def new_actor(self, name: str) -> Actor:
        with self._lock:
            self._actors += 1
            return Actor(name, self._actors)

    @property
    def thread(self) -> Actor:
        if not hasattr(self._local, "actor"):
            self._local.actor = self.new_actor(f"thread {threading.current_thread().name}")
        return self._local.actor

    def begin_job(self) -> None:
        """From now on this thread acts as another actor."""
        self._local.actor = self.new_actor(f"a job of {threading.current_thread().name}")

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._local, "stream", self.compute)

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        yield
        self._local.stream = before

    def thread_follows(self, clock: Clock) -> None:
        with self._lock:
            self.thread.follow(clock)

    def job_ended(self) -> None:
        """This thread has dropped the tensors of a job."""
        with self._lock:
            for number, count in self.thread.act().items():
                self._ended[number] = max(self._ended.get(number, 0), count)

    def thread_acts(self) -> Clock:
        with self._lock:
            return self.thread.act()

    # ------------------------------------------------------------------ buffers

    def new_buffer(self, tier: str, buffer: torch.Tensor) -> None:
        storage = buffer.untyped_storage()
        with self._lock:
            self._buffers[storage.data_ptr()] = record = Buffer(tier)
        weakref.finalize(buffer, self._dropped, storage, record).atexit = False

    def _dropped(self, storage: torch.UntypedStorage, buffer: Buffer) -> None:
        """The tier has dropped its tensor. Other tensors may keep the memory, for example those of a copy under way."""
        with self._lock:
            if torch._C._storage_Use_Count(storage._cdata) > LAST_USES:
                weakref.finalize(storage, self._forget, storage.data_ptr(), buffer).atexit = False
                return
            self._forget(storage.data_ptr(), buffer)
            reuser = Actor("the next user of the memory", 0)
            reuser.follow(self.thread.clock)
            reuser.follow(self._ended)
            if buffer.tier == NEAR:
                reuser.follow(self.compute.actor.clock)
            self._access(reuser, buffer, True, "the tier dropped the buffer")

    def _forget(self, address: int, buffer: Buffer) -> None:
        """The memory goes back to the allocator: what has this address next is another buffer, or none of a tier."""
        with self._lock:
            if self._buffers.get(address) is buffer:
                del self._buffers[address]

    def new_activation(self, tensor: torch.Tensor) -> None:
        """Near memory outside of the tiers. A kernel of the compute stream may have used it last, for whoever had it before.
        It is freed with its storage, and then belongs to later kernels of that stream."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage.data_ptr() in self._buffers:
                return
            self._buffers[storage.data_ptr()] = record = Buffer(NEAR)
            self.compute.actor.follow(self.thread.act())
            self._access(self.compute.actor, record, True, "the last kernel")
            self.compute.actor.act()
        weakref.finalize(storage, self._freed, storage.data_ptr(), record).atexit = False

    def _freed(self, address: int, buffer: Buffer) -> None:
        with self._lock:
            self._forget(address, buffer)
            self.compute.actor.follow(self.thread.act())
            self._access(self.compute.actor, buffer, True, "an activation's memory was freed")

    def find(self, value: Any) -> set[int]:
        """Addresses of the tiers' buffers in which tensors of `value` have their bytes."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(value)
                    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided}
        return storages & self._buffers.keys()

    def operation(self, what: str, touched: set[int], written: set[int], blocks: bool) -> None:
        """One operation on the buffers `touched`, of which it writes some. blocks: the thread waits for its end."""
        with self._lock:
            buffers = [(self._buffers[address], address in written) for address in sorted(touched)]
            tiers = {buffer.tier for buffer, _ in buffers}
            actor = self.thread
            if not self.host and (NEAR in tiers or self.stream is not self.compute):
                actor = self.stream.actor
                actor.follow(self.thread.act())
            for buffer, writes in buffers:
                self._access(actor, buffer, writes, what)
            done = actor.act()
            if actor is not self.thread and len(tiers) > 1 and blocks:
                self.thread.follow(done)

    def _access(self, actor: Actor, buffer: Buffer, writes: bool, what: str) -> None:
        self.accesses += 1
        earlier = [("write", buffer.written)] if buffer.written else []
        earlier += [("read", access) for access in buffer.read.values()] if writes else []
        for kind, access in earlier:
            if not access.before(actor):
                self.races.append(f"{buffer.tier}: {what} ({'write' if writes else 'read'}) of {actor.name} is not after "
                                  f"the {kind} by {access.what}")
        mine = Access(actor.number, actor.clock[actor.number], f"{what} of {actor.name}")
        if writes:
            buffer.written, buffer.read = mine, {}
        else:
            buffer.read[actor.number] = mine


class Stream:
    """torch.cuda.Stream, as far as pstar uses it."""

    def __init__(self, recorder: Recorder, device: object = None):
        self.recorder = recorder
        self.actor = recorder.new_actor("the compute stream" if device is None else "a copy stream")

    def wait_event(self, event: Event) -> None:
        with self.recorder._lock:
            self.actor.follow(event.clock)

    def synchronize(self) -> None:
        self.recorder.thread_follows(self.actor.act())


class Event:
    """torch.cuda.Event, as far as pstar uses it."""

    def __init__(self, recorder: Recorder, **_: object):
        self.recorder = recorder
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        actor = (stream or self.recorder.stream).actor
        with self.recorder._lock:
            actor.follow(self.recorder.thread.act())
            self.clock = actor.act()

    def synchronize(self) -> None:
        self.recorder.thread_follows(self.clock)

    def query(self) -> bool:
        """The device is as late as it may be: the event has passed only if the thread has waited for it."""
        clock = self.recorder.thread.clock
        return all(clock.get(number, 0) >= count for number, count in self.clock.items())

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Watch(TorchDispatchMode):
    """Tells the recorder of every operation of torch in this thread. Backward is in this thread, too, because near is host
    memory here: autograd runs operations on the CPU in the thread that calls backward(). On a GPU a thread of autograd runs
    them; the caller waits for it, so the order is the same."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        touched = self.recorder.find((args, kwargs))
        if touched and not operator.is_view and not str(operator).startswith(NO_ACCESS):
            given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
            changed = [given[argument.name] for argument in operator._schema.arguments
                       if argument.name in given and argument.alias_info and argument.alias_info.is_write]
            blocks = not given.get("non_blocking", False)
            self.recorder.operation(str(operator), touched, self.recorder.find(changed), blocks)
        return operator(*args, **kwargs)


class _Cuda:
    """torch.cuda, as far as pstar/memory uses it for copies."""

    def __init__(self, recorder: Recorder):
        self.Stream = lambda device: Stream(recorder, device)
        self.Event = lambda **options: Event(recorder, **options)
        self.current_stream = lambda device=None: recorder.stream
        self.stream = recorder.on_stream
        self.device = lambda device: contextlib.nullcontext()


class _Device:
    """What an engine under a recorder takes for its GPU. Finalizers of its copies may run after the recorder has ended."""

    type = "cuda"

    def __init__(self, recorder: Recorder):
        self.module = _Cuda(recorder)


_module_of = accelerator.module_of
accelerator.module_of = lambda device: device.module if isinstance(device, _Device) else _module_of(device)


def _replace(patches: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Puts the recorder between pstar and torch. Nothing of pstar's order of operations changes."""
    def wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        patches.setattr(owner, name, lambda *args, **keys: wrapper(original, *args, **keys))

    patches.setattr(tier_module, "OWN_USES", tier_module.OWN_USES + 1)    # the recorder keeps a reference, too
    patches.setattr(pstar.kernels.cpu, "library", lambda: None)    # Adam in operations of torch, which Watch sees

    def make_links(original: Callable, self: links.Links, asynchronous: bool = True, bytes_per_s: float | None = None,
                   device: object = None, by_need: bool = False) -> None:
        original(self, asynchronous, bytes_per_s, None if recorder.host else _Device(recorder), by_need)

    def new_buffer(original: Callable, tier: Tier, num_bytes: int, kind: str) -> torch.Tensor:
        buffer = original(tier, num_bytes, kind)
        recorder.new_buffer(tier.name, buffer)
        return buffer

    def transfer(original: Callable, tier: DiskTier, call: Callable, doing: str, extent: Any, tensor: torch.Tensor) -> None:
        touched = recorder.find(tensor)
        if touched:
            recorder.operation(f"{doing} the disk", touched, touched if call is os.preadv else set(), True)
        original(tier, call, doing, extent, tensor)

    def make_offload(original: Callable, self: Offload, *args: Any) -> None:
        original(self, *args)
        self._streams = ActivationStreams(_Device(recorder))

    def leave(original: Callable, self: ActivationStreams, target: torch.Tensor, source: torch.Tensor, *more: Any) -> Any:
        recorder.new_activation(source)
        return original(self, target, source, *more)

    def bring_back(original: Callable, self: ActivationStreams, target: torch.Tensor, *more: Any) -> Any:
        recorder.new_activation(target)
        return original(self, target, *more)

    def copy(original: Callable, self: links.Links, target: torch.Tensor, source: torch.Tensor, *then: Any) -> None:
        """In host memory a worker copies with numpy, which Watch does not see."""
        if recorder.host:
            recorder.operation("a copy", recorder.find((target, source)), recorder.find(target), True)
        original(self, target, source, *then)

    wrap(Offload, "__init__", make_offload)
    wrap(ActivationStreams, "leave", leave)
    wrap(ActivationStreams, "bring_back", bring_back)
    wrap(links.Links, "__init__", make_links)
    wrap(links.Links, "copy", copy)
    wrap(Tier, "_new_buffer", new_buffer)
    wrap(DiskTier, "_transfer", transfer)
    _order_threads(patches, wrap, recorder)


def _order_threads(patches: pytest.MonkeyPatch, wrap: Callable, recorder: Recorder) -> None:
    """A copy's handle orders the threads: the submission before the job, and the job before a wait's return."""
    def submitted(original: Callable, handle: Handle, *args: Any) -> None:
        original(handle, *args)
        handle.begin_clock = recorder.thread_acts()

    def run(original: Callable, handle: Handle) -> BaseException | None:
        in_worker = threading.current_thread() is handle._copy_queue._worker.thread    # other threads have their own Watch
        if in_worker and recorder.host:
            recorder.begin_job()
        recorder.thread_follows(handle.begin_clock)
        with Watch(recorder) if in_worker else contextlib.nullcontext():
            error = original(handle)
        recorder.job_ended()
        return error

    def end(original: Callable, handle: Handle, error: BaseException | None) -> None:
        handle.end_clock = recorder.thread_acts()
        original(handle, error)

    def waited(original: Callable, handle: Handle) -> None:
        original(handle)
        recorder.thread_follows(getattr(handle, "end_clock", {}))    # without: of an earlier test's engine, collected now

    wrap(Handle, "__init__", submitted)
    wrap(Handle, "_run", run)
    wrap(Handle, "_end", end)
    wrap(Handle, "_wait_for_job", waited)
    is_done = Handle.done.fget

    def done(handle: Handle) -> bool:
        if not is_done(handle):
            return False
        recorder.thread_follows(getattr(handle, "end_clock", {}))
        return True

    patches.setattr(Handle, "done", property(done))
