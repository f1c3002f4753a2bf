"""No access of a tier's buffer is unordered on a GPU, wherever model data are; and each removed wait is a race.

`happens_before.py` records the engine's own training. The mutations remove one wait of the engine each; the list is complete
(test_each_wait_is_in_the_list).
"""

from __future__ import annotations

import gc
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pstar
from pstar.chunks import activation_offload, activation_streams, gradients, unshard
from pstar.chunks.read_only import ReadOnly
from pstar.memory import block_log, block_store, copy_queue, device_stream, links, tier
from pstar.memory.disk import DiskTier
from pstar.schedule.schedule import Schedule
from tests import toy
from tests.pstar.chunks import test_activations
from tests.pstar.chunks.test_frozen import WIDTH, Six
from tests.pstar.memory.happens_before import Recorder
from tests.pstar.memory.test_tiers import Views
from tests.pstar.test_placement import build, combinations

STEPS = 4
CPU = torch.device("cpu")
FILES = (block_log, block_store, copy_queue, device_stream, links, tier, unshard, gradients, activation_offload,
         activation_streams)
"""The files that wait for copies, for a stream or for a collective."""


@pytest.fixture(scope="module")
def losses():
    return toy.oracle(STEPS)[0]


def record(folder: Path, host: bool = False, **keys) -> tuple[Recorder, list[float]]:
    """(the recorder, the losses) of some steps."""
    if "disk" in keys:
        keys |= {"disk_path": str(folder), "far_budget": keys.pop("disk")}
    num_micros = keys.get("gradient_accumulation_steps", 1)
    with Recorder(host) as recorder:
        model, optimizer = toy.build(**{"default_chunk_size": 5_000} | keys)
        found = toy.train(model, optimizer, STEPS, num_micros=num_micros)
    return recorder, found


@pytest.mark.each
@pytest.mark.parametrize("near, chunk, policy, prefetch, states, overlap, far", combinations(72))
def test_placement_makes_no_race(near, chunk, policy, prefetch, states, overlap, far, losses, tmp_path):
    with Recorder() as recorder:
        try:
            model, optimizer = build(tmp_path, near, chunk, policy, prefetch, states, overlap, far)
        except pstar.BudgetError as error:
            pytest.skip(f"refused: {error}")
        assert toy.train(model, optimizer, STEPS) == losses
    assert recorder.races == [] and recorder.accesses > 400


@pytest.mark.parametrize("keys", [{"near_memory": "1100KiB"}, {"near_budget": "min", "offload_activations": True},
                                  {"near_budget": "min", "gradient_accumulation_steps": 2},
                                  {"near_budget": "min", "bf16": {"enabled": True}}], ids=str)
def test_other_settings_make_no_race(keys, tmp_path):
    recorder, _ = record(tmp_path, **keys)
    assert recorder.races == [] and recorder.accesses > 400


@pytest.mark.each
@pytest.mark.parametrize("keys", [{}, {"near_budget": "40%"}, {"bf16": {"enabled": True}},
                                  {"gradient_accumulation_steps": 2}, {"near_budget": "30%", "disk": "30%"}], ids=str)
@pytest.mark.parametrize("clip", [1e-3, 100.0])
@pytest.mark.parametrize("log", ["75%", "15%"])
@pytest.mark.parametrize("host", [False, True], ids=["gpu", "host"])
def test_updates_that_begin_during_backward_make_no_race(keys, clip, log, host, tmp_path):
    keys = {"near_budget": "min", "gradient_clipping": clip, "speculative_update": True, "speculative_log": log} | keys
    recorder, _ = record(tmp_path, host, **keys)
    assert recorder.races == [] and recorder.accesses > 400


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_frozen_matrices_make_no_race(bits):
    """The copy's worker decodes them behind the copy, on its stream."""
    with Recorder() as recorder:
        model, optimizer = toy.build(Six, near_budget="min", frozen_bits=bits, default_chunk_size=WIDTH**2)
        toy.train(model, optimizer, STEPS)
    assert recorder.races == [] and recorder.accesses > 400


def empty_store(disk: DiskTier | None = None, by_need: bool = False) -> block_store.BlockStore:
    """Inside a Recorder."""
    near, far = (tier.Tier(name, CPU) for name in (tier.NEAR, tier.FAR))
    return block_store.BlockStore(near, far, tier.Ledger(), Schedule("lru"), Views(), disk, links.Links(by_need=by_need))


def test_memory_that_a_tensor_kept_is_no_buffer_once_it_is_free() -> None:
    """Otherwise two threads that get its address from malloc, one after the other, would seem to race."""
    with Recorder() as recorder:
        buffer = tier.Tier(tier.FAR, CPU)._new_buffer(1024, "parameters")
        kept, before = buffer[:1], len(recorder._buffers)
        del buffer
        assert len(recorder._buffers) == before == 1
        del kept
        assert not recorder._buffers


def record_activations() -> tuple[Recorder, list[float], int]:
    """(the recorder, the losses, bytes that went to far) of a model whose blocks' inputs wait in far."""
    with Recorder() as recorder:
        model, optimizer = test_activations.build(False)
        losses, moved = test_activations.train(model, optimizer)
        del model, optimizer
        gc.collect()    # graphs in reference cycles: their end is recorded too
    return recorder, losses, moved["near to far"]


def test_offloaded_activations_make_no_race():
    recorder, losses, num_bytes = record_activations()
    assert recorder.races == [] and recorder.accesses > 400
    assert losses == test_activations.plain(False, 1)[0] and num_bytes > 0


# ---------------------------------------------------------------------------------------------- each wait is needed

@dataclass(frozen=True)
class Wait:
    """A line of pstar that orders accesses, what the mutation puts in its place, and settings that show the race."""

    where: Any
    method: str
    line: str
    without: str
    keys: tuple[tuple[str, object], ...] = (("near_budget", "min"),)
    """Of `record`."""

    def __str__(self) -> str:
        return f"{self.where.__name__}.{self.method}: {self.line}"


STREAM = (("near_budget", "50%"), ("far_states", "stream"))
DISK = (("near_budget", "30%"), ("disk", "30%"))
SHRINKS = (("near_memory", "1100KiB"),)    # near gives room to activations in the middle of a step
TWICE = (("near_budget", "min"), ("gradient_accumulation_steps", 2))
Store, Links, Tier = block_store.BlockStore, links.Links, tier.Tier
CopyStream, DeviceCopy, Handle = device_stream.CopyStream, device_stream.DeviceCopy, copy_queue.Handle
WAITS = (
    Wait(CopyStream, "given", "event.record(accelerator.current_stream(self.device))", "pass"),
    Wait(CopyStream, "issue", "self._stream.wait_event(given)", "pass"),
    Wait(CopyStream, "issue", "each.order()", "pass", DISK),
    Wait(CopyStream, "issue", "ended.record()", "pass"),
    Wait(DeviceCopy, "order", "accelerator.current_stream(self._device).wait_event(self._ended)", "pass"),
    Wait(DeviceCopy, "wait", "self._ended.synchronize()", "pass"),
    Wait(Handle, "wait", "self._wait_for_end()", "pass", TWICE),
    Wait(Handle, "order", "self._wait_for_job()", "pass", DISK),
    Wait(Handle, "order", "self._on_device.order()", "pass"),
    Wait(Handle, "_wait_for_end", "self._on_device.wait()", "pass"),
    Wait(Links, "submit", "handle.wait()", "pass", DISK),
    Wait(Links, "order", "    handle.order()\n    ended.record", "    pass\n    ended.record"),
    Wait(Store, "create", "self.wait(fences, tier)", "pass", STREAM),
    Wait(Store, "ensure", "self._settle_block(block, tier)", "pass"),
    Wait(Store, "_settle_block", "self.wait(pending, tier)", "pass"),
    Wait(Store, "wait", "self.links.order(handles, self._add_waited)", "pass"),
    Wait(Store, "work", "each.wait()", "pass", TWICE),
    Wait(Store, "work", "self.wait(before, tier)", "pass", STREAM),
    Wait(Store, "work", "self._block(key).pending.append(handle)", "pass", TWICE),
    Wait(Store, "_begin", "(*block.pending, *fences)", "tuple(block.pending)", STREAM),
    Wait(Store, "_begin", "block.pending.append(self.links", "(self.links"),
    Wait(Tier, "allocate", "fences.extend(pending)", "pass"),
    Wait(Tier, "_shrink_idle", "self._wait_for(fences)", "pass", SHRINKS),
    Wait(Tier, "_wait_for", "_wait_for(fences, self.name == NEAR)", "pass", SHRINKS),
)

Leaving, Streams = activation_streams.Leaving, activation_streams.ActivationStreams
StreamCopy = activation_offload.StreamCopy
ACTIVATIONS = (
    Wait(Leaving, "let_go", "self.copy.order()", "pass"),
    Wait(Streams, "leave", "self._out.given()",
         "self._out.given.__globals__['accelerator'].event(self._out.device)"),
    Wait(Streams, "bring_back", "self.let_go()", "pass"),
    Wait(Streams, "bring_back", "self._in.given()",
         "self._in.given.__globals__['accelerator'].event(self._in.device)"),
    Wait(StreamCopy, "bring_back", "self._uses[-1].order()", "pass"),
)
"""Of activations in far, with the settings of record_activations."""

SHARED_FAR = (
    Wait(Streams, "leave", "before, lambda", "(), lambda"),
    Wait(StreamCopy, "_allocate", "data, self._uses)", "data, ())"),
)
"""Of far buffers that chunks and activations use in turn."""

UNUSED_COPY = Wait(Store, "_settle_block", "[handle for handle in pending if not handle.done]", "[]")
"""Training does not show it: a gradient's copy to far orders the host after all that the stream did with its parameter."""

DROPPED_COPY = Wait(Store, "_drop_copy", "self.tiers[tier].release(buffer, block.pending,",
                    "self.tiers[tier].release(buffer, (),")
"""In training one run of a hundred shows no race: each time another wait happens to order the buffer's next use."""

THROUGH_FAR = Wait(Store, "_begin", "(*block.pending, *fences)", "fences")
"""In training one run of seven shows no race: each time the read from disk has ended before the copy to near begins."""

OTHERS = {
    "store.finish((kind, index))": "orders the sums of squares for the norm, which are in no tier",
    "self.store.finish((\"grad\", group))": "for sums of squares, too: without them the gradients are read, after a wait",
    "self._settle_block(self._block(key))": "that is BlockStore.finish",
    "self.wait([self.links.submit(source_tier, target_tier, job, source.nbytes)])": "only a simulated link needs it",
    "self._settle_block(block)": "the second one is before an extent is released, for which the disk tier waits as well",
    "self._wait_for(pending)": "for users who give no list of fences: test_tiers.py",
    "self._wait_for(fences)    # the tier forgets the buffer now": "test_tiers.py",
    "fence.order() if near else fence.wait()": "that is Tier._wait_for",
    "_wait_for(fences, near)": "the end of a tier",
    "_wait_for_all": "the end of a tier",
    "self._origin.synchronize()": "times only",
    "copy.order()": "the end of a graph that never used what was brought back ahead",
    "copy.wait()": "the end of a process",
    "self._wait_for_job()": "the second one is in Handle._wait_for_end",
    "handle.order()": "the first one in Links.order: these copies have ended",
    "self._job_ended.wait()": "that is Handle._wait_for_job",
    "handle._wait_for_end()": "drain and close",
    "self.stopping.wait(left)": "only a simulated link needs it",
    "self.gather.wait()": "a collective",
    "self.handle.wait()": "a collective: tests/pstar/test_mutations_ranks.py",
    "self._gather(unit).wait()": "a collective",
    "reduction.handle.wait()": "a collective",
}
"""The other lines that wait, each with the reason why the recorder does not need it."""


def mutate(patches: pytest.MonkeyPatch, wait: Wait) -> None:
    """Compiles the method anew, with the line changed. Raises AssertionError if the line is not there exactly once."""
    original = inspect.getattr_static(wait.where, wait.method)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(wait.line) == 1, f"{wait} is there {source.count(wait.line)} times"
    space: dict = {}
    exec(source.replace(wait.line, wait.without), inspect.getmodule(wait.where).__dict__, space)
    patches.setattr(wait.where, wait.method, space[wait.method])


@pytest.mark.filterwarnings("ignore:.*gradients were not finite")    # a race may show in the numbers as well
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_removed_wait_is_a_race(wait, tmp_path, monkeypatch):
    mutate(monkeypatch, wait)
    monkeypatch.setattr(ReadOnly, "check", lambda self, unit: None)    # a race may change a parameter, too
    recorder, _ = record(tmp_path, **dict(wait.keys))
    assert recorder.races


@pytest.mark.filterwarnings("ignore:.*gradients were not finite")
@pytest.mark.parametrize("wait", ACTIVATIONS, ids=str)
def test_a_removed_wait_of_activations_is_a_race(wait, monkeypatch):
    mutate(monkeypatch, wait)
    assert record_activations()[0].races


@pytest.mark.parametrize("wait", [None, *SHARED_FAR], ids=str)
def test_chunks_and_activations_use_a_far_buffer_in_turn(wait, monkeypatch):
    if wait is not None:
        mutate(monkeypatch, wait)
    key, numel = ("param", 0), activation_offload.LEAST_BYTES // 4
    with Recorder() as recorder:
        store = empty_store()
        offload = activation_offload.Offload(store.tiers[tier.FAR], store.ledger, CPU)
        store.create(key, numel, torch.float32, tier.FAR).zero_()
        store.load_ahead(key, tier.NEAR, 1.0)
        store.drop(key)
        away = offload.pack(torch.ones(numel).mul(2))    # into the far buffer that the copy to near reads
        assert away.unpack().sum() == 2 * numel
        del away
        store.create(key, numel, torch.float32, tier.FAR).zero_()    # by the host, where the activation was
    assert bool(recorder.races) == (wait is not None)


@pytest.mark.parametrize("wait", [None, DROPPED_COPY], ids=["kept", "removed"])
def test_the_next_user_of_an_evicted_blocks_buffer_waits_for_its_copy(wait, monkeypatch):
    if wait is not None:
        mutate(monkeypatch, wait)
    with Recorder() as recorder:
        store = empty_store()
        near = [store.create(("param", 0), 10, torch.float32, tier.NEAR).fill_(1.0)]
        address = near.pop().data_ptr()
        store.send_far(("param", 0))
        next_user = store.create(("param", 1), 10, torch.float32, tier.NEAR).fill_(2.0)
        assert next_user.data_ptr() == address
    assert bool(recorder.races) == (wait is not None)


@pytest.mark.parametrize("wait", [None, UNUSED_COPY], ids=["kept", "removed"])
def test_the_host_writes_after_a_copy_to_near_that_only_the_stream_has_waited_for(wait, monkeypatch):
    if wait is not None:
        mutate(monkeypatch, wait)
    key = ("param", 0)
    with Recorder() as recorder:
        store = empty_store()
        store.create(key, 10, torch.float32, tier.FAR).zero_()
        store.ensure(key, tier.NEAR).sum()
        store.ensure(key, tier.FAR).fill_(1.0)
    assert bool(recorder.races) == (wait is not None)


@pytest.mark.parametrize("wait", [None, THROUGH_FAR], ids=["kept", "removed"])
def test_a_copy_to_near_waits_for_the_read_from_disk(wait, tmp_path, monkeypatch):
    if wait is not None:
        mutate(monkeypatch, wait)
    key = ("param", 0)
    with Recorder() as recorder:
        store = empty_store(DiskTier(tmp_path))
        store.create(key, 10, torch.float32, tier.FAR).fill_(1.0)
        store._evict(tier.FAR)
        store.ensure(key, tier.NEAR).sum()
    assert bool(recorder.races) == (wait is not None)


LOG_IN_USE = Wait(Store, "work", "[*fences]", "[]")
"""In training the next forward waits for the update that used the log's buffer last."""


@pytest.mark.parametrize("wait", [None, LOG_IN_USE], ids=["kept", "removed"])
def test_an_early_update_begins_when_the_last_one_has_left_its_buffer_of_the_log(wait, monkeypatch):
    if wait is not None:
        mutate(monkeypatch, wait)
    with Recorder(host=True) as recorder:
        store = empty_store(by_need=True)
        log = block_log.BlockLog(store, 40)
        for group in range(2):
            key = ("exp_avg", group)
            store.create(key, 10, torch.float32, tier.FAR).zero_()
            log.record(group, [key], [], lambda buffers, key=key: lambda: buffers[key].add_(1.0), "update", True)
            log.forget(group)
        assert store.ensure(("exp_avg", 1), tier.FAR).sum() == 10
    assert bool(recorder.races) == (wait is not None)


PIECE = (
    Wait(unshard, "copy_near", "store.wait([handle], NEAR)", "pass"),
    Wait(unshard, "copy_near", "store.blocks[key].pending.append(handle)", "pass"),
)
"""Of a rank's own piece, which is copied into the buffer of a gather."""


@pytest.mark.parametrize("wait", [None, *PIECE], ids=str)
def test_a_piece_is_near_before_its_gather_and_leaves_before_the_host_writes_it(wait, monkeypatch):
    if wait is not None:
        mutate(monkeypatch, wait)
    own, gathered = ("param", 0), ("gathered", 0)
    with Recorder() as recorder:
        store = empty_store()
        store.create(own, 10, torch.float32, tier.FAR).fill_(1.0)
        data = store.create(gathered, 20, torch.float32, tier.NEAR, derived=True)
        unshard.copy_near(store, data[:10], own)
        data.sum()    # as the collective reads it
        store.ensure(own, tier.FAR).fill_(2.0)
    assert bool(recorder.races) == (wait is not None)
    assert store.ledger.moved_bytes["far to near"] == 40


def test_each_wait_is_in_the_list():
    """A new wait needs a mutation, or a reason."""
    waits = re.compile(r"\.wait\(|wait_event|synchronize\(|order\(\)|links.order|_wait_for_end\(|_settle_block\(|_wait_for\("
                       r"|pending\.append|fences\.extend|store\.finish\(")
    mutations = (*WAITS, *ACTIVATIONS, *SHARED_FAR, *PIECE, DROPPED_COPY, UNUSED_COPY, THROUGH_FAR, LOG_IN_USE)
    known = [wait.line for wait in mutations] + list(OTHERS)
    for module in FILES:
        for line in inspect.getsource(module).splitlines():
            if waits.search(line) and not line.strip().startswith("def "):
                assert any(each in line for each in known), f"{module.__name__}: {line.strip()}"


# ---------------------------------------------------------------------------------------------- several ranks

def case(rank: int, num_ranks: int, keys: dict) -> tuple[list[str], int, list[float]]:
    torch.set_num_threads(1)
    with Recorder() as recorder:
        model, optimizer = toy.build(default_chunk_size=5_000, **keys)
        found = toy.train(model, optimizer, STEPS, rank, num_ranks)
    return recorder.races, recorder.accesses, found


@pytest.mark.parametrize("keys", [{"near_budget": "min"}, {"near_budget": "60%", "ownership": "sharded"},
                                  {"near_budget": "60%", "far_states": "stream", "overlap_update": True},
                                  {"near_budget": "60%", "communication": "chunk"}], ids=str)
def test_two_ranks_make_no_race(ranks, keys):
    for races, accesses, _ in ranks(2).run(case, keys):
        assert races == [] and accesses > 400
