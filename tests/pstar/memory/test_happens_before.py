"""No access of a tier's buffer is unordered on a GPU, wherever model data are; and each removed wait is a race.

`happens_before.py` records the engine's own training. The mutations remove one wait of the engine each; the list is complete
(test_each_wait_is_in_the_list).
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import pstar
from pstar.chunks import gradients, unshard
from pstar.memory import block_store, links, tier
from tests import toy
from tests.pstar.chunks.test_frozen import WIDTH, Six
from tests.pstar.memory.happens_before import Recorder
from tests.pstar.test_placement import build, combinations

STEPS = 4
FILES = (block_store, links, tier, unshard, gradients)
"""The files that wait for copies, for a stream or for a collective."""


@pytest.fixture(scope="module")
def losses():
    return toy.oracle(STEPS)[0]


def record(folder: Path, **keys) -> tuple[Recorder, list[float]]:
    """(the recorder, the losses) of some steps."""
    if "disk" in keys:
        keys |= {"disk_path": str(folder), "far_budget": keys.pop("disk")}
    num_micros = keys.get("gradient_accumulation_steps", 1)
    with Recorder() as recorder:
        model, optimizer = toy.build(**{"default_chunk_size": 5_000} | keys)
        found = toy.train(model, optimizer, STEPS, num_micros=num_micros)
    return recorder, found


@pytest.mark.pairs
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


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_frozen_matrices_make_no_race(bits):
    """The copy's worker decodes them behind the copy, on its stream."""
    with Recorder() as recorder:
        model, optimizer = toy.build(Six, near_budget="min", frozen_bits=bits, default_chunk_size=WIDTH**2)
        toy.train(model, optimizer, STEPS)
    assert recorder.races == [] and recorder.accesses > 400


# ---------------------------------------------------------------------------------------------- each wait is needed

@dataclass(frozen=True)
class Wait:
    """A line of pstar that orders accesses, what the mutation puts in its place, and settings that show the race."""

    where: type
    method: str
    line: str
    without: str
    keys: tuple[tuple[str, object], ...] = (("near_budget", "min"),)
    """Of `record`."""

    def __str__(self) -> str:
        return f"{self.where.__name__}.{self.method}: {self.line}"


STREAM = (("near_budget", "50%"), ("far_states", "stream"))
DISK = (("near_budget", "30%"), ("disk", "30%"))
TWICE = (("near_budget", "min"), ("gradient_accumulation_steps", 2))
Store, Links, Tier = block_store.BlockStore, links.Links, tier.Tier
WAITS = (
    Wait(Links, "_on_stream", "given.synchronize()", "pass"),
    Wait(Links, "copy", "copied.synchronize()", "pass"),
    Wait(Store, "create", "self.wait(fences)", "pass", STREAM),
    Wait(Store, "ensure", "self._settle_block(block)", "pass"),
    Wait(Store, "work", "each.wait()", "pass", TWICE),
    Wait(Store, "work", "self.wait(before)", "pass", STREAM),
    Wait(Store, "work", "self._block(key).pending.append(handle)", "pass", TWICE),
    Wait(Store, "_begin", "(*block.pending, *fences)", "fences", DISK),
    Wait(Store, "_begin", "(*block.pending, *fences)", "tuple(block.pending)", STREAM),
    Wait(Store, "_begin", "handle.wait()", "pass", DISK),
    Wait(Store, "_begin", "block.pending.append(self.links", "(self.links"),
    Wait(Store, "_drop_copy", "self.tiers[tier].release(buffer, block.pending,", "self.tiers[tier].release(buffer, (),"),
    Wait(Tier, "allocate", "fences.extend(pending)", "pass"),
)

OTHERS = {
    "store.finish((kind, index))": "orders the sums of squares for the norm, which are in no tier",
    "self._settle_block(self._block(key))": "that is BlockStore.finish",
    "self.wait([self.links.submit(source_tier, target_tier, job, source.nbytes)])": "only a simulated link needs it",
    "self._settle_block(block)": "the second one is before an extent is released, for which the disk tier waits as well",
    "self.wait(pending)": "that is _settle_block",
    "handle.wait()": "the second one is in BlockStore.wait",
    "_wait_for(pending)": "for users who give no list of fences: test_tiers.py",
    "_wait_for(fences)    # the tier forgets the buffer now, and a copy on a stream does not keep memory alive":
        "a copy under way keeps its buffer, but the ledger counts it as free: test_tiers.py",
    "_wait_for(buffers.pop()[1])": "as the line above",
    "fence.wait()": "that is _wait_for",
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
    recorder, _ = record(tmp_path, **dict(wait.keys))
    assert recorder.races


def test_each_wait_is_in_the_list():
    """A new wait needs a mutation, or a reason."""
    waits = re.compile(r"\.wait\(|synchronize\(|_settle_block\(|_wait_for\(|pending\.append|fences\.extend|store\.finish\(")
    known = [wait.line for wait in WAITS] + list(OTHERS)
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
