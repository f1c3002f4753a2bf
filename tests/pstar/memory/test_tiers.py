"""The ledger and the store: the budget after every operation, copies only where they are needed, loud mistakes."""

import ctypes
import os
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar.errors import BudgetError, ConfigError, StateError
from pstar.memory.block_store import BlockStore
from pstar.memory.copy_queue import CopyQueue
from pstar.memory.disk import DiskTier
from pstar.memory.links import Links
from pstar.memory.tier import FAR, NEAR, Ledger, Tier, format_bytes, keep_freed_memory, parse_bytes
from pstar.profile.recording import Profile
from pstar.schedule.schedule import Schedule
from tests import toy
from tests.cover import quick_only
from tests.harness.program import run_forked
from tests.limits import HANGS_S

CPU = torch.device("cpu")


class Views:
    """Records which blocks leave near; no user keeps a view of them."""

    def __init__(self):
        self.left = []

    def leave(self, key: tuple[str, int], buffer: torch.Tensor) -> bool:
        self.left.append(key)
        return False


def make(near: int | None = 100, far: int | None = None) -> tuple[BlockStore, list]:
    views = Views()
    return BlockStore(Tier(NEAR, CPU, near), Tier(FAR, CPU, far), Ledger(), Schedule("lru"), views), views.left


def test_a_tier_counts_every_byte():
    tier = Tier(NEAR, CPU, 1000)
    first, second = tier.allocate(100, torch.float32, "param"), tier.allocate(100, torch.bfloat16, "grad")
    assert (tier.used_bytes, tier.peak_bytes, dict(tier.used_by_kind)) == (600, 600, {"param": 400, "grad": 200})
    tier.release(first)
    assert (tier.used_bytes, tier.idle_bytes, tier.peak_bytes) == (200, 400, 600)
    assert tier.has_room(800) and not tier.has_room(801)
    tier.release(second)


def test_the_end_of_a_step_frees_what_the_step_did_not_need():
    tier = Tier("far", torch.device("cpu"))
    for buffer in [tier.allocate(100, torch.uint8, "param") for _ in range(3)]:
        tier.release(buffer)
    assert tier.reserved_bytes == 300
    tier.end_step(first=False)
    assert tier.reserved_bytes == 300, "the step needed them all at once, and the next one may"
    tier.release(tier.allocate(100, torch.uint8, "param"))
    tier.end_step(first=False)
    assert tier.reserved_bytes == 300
    tier.release(tier.allocate(100, torch.uint8, "param"))
    tier.end_step(first=False)
    assert tier.reserved_bytes == 100
    tier.end_step(first=True)
    assert tier.reserved_bytes == 0


def test_a_model_that_stays_near_keeps_no_far_memory_from_its_start():
    model, optimizer = toy.build()
    toy.train(model, optimizer, 1)
    assert model.far.peak_bytes > 0 == model.far.reserved_bytes


def test_fault_cache_hands_out_a_buffer_of_the_wrong_size():
    tier = Tier(NEAR, CPU, 1000)
    tier.release(tier.allocate(100, torch.float32, "param"))
    assert tier.allocate(50, torch.float32, "param").numel() == 50
    again = tier.allocate(100, torch.float32, "param")
    assert again.nbytes == 400 and tier.idle_bytes == 0, "the idle buffer of the right size is used again"


def test_fault_room_making_fails_although_there_is_room():
    tier = Tier(NEAR, CPU, 1000)
    for size in (100, 60, 90):                          # idle buffers of other sizes give way
        tier.release(tier.allocate(size, torch.float32, "param"))
    assert tier.allocate(250, torch.float32, "param").nbytes == 1000


def test_an_allocation_that_does_not_fit_is_refused_and_changes_nothing():
    tier = Tier(NEAR, CPU, 1000)
    kept = tier.allocate(100, torch.float32, "param")
    with pytest.raises(BudgetError, match="near: 800 bytes for grad do not fit: 400 of 1000"):
        tier.allocate(200, torch.float32, "grad")
    assert tier.used_bytes == 400
    tier.release(kept)
    with pytest.raises(StateError, match="not in use"):
        tier.release(kept)


def test_a_clean_block_leaves_without_a_copy_and_a_written_one_with():
    store, _ = make()
    store.create(("param", 0), 10, torch.float32, FAR).fill_(1)
    store.ensure(("param", 0), NEAR)
    store.send_far(("param", 0))
    assert dict(store.ledger.moves) == {"far to near": 1}
    store.ensure(("param", 0), NEAR).fill_(2)
    store.mark_written(("param", 0), NEAR)
    store.send_far(("param", 0))
    assert dict(store.ledger.moves) == {"far to near": 2, "near to far": 1}
    assert store.peek(("param", 0))[1].eq(2).all()


def test_the_least_recently_used_leaves_and_a_pinned_one_never():
    store, left = make(near=80)
    for group in range(3):
        store.create(("param", group), 10, torch.float32, FAR)
    for group in (0, 1):
        store.schedule.touch(("param", group))
        store.ensure(("param", group), NEAR)
    store.pin(("param", 0))
    store.ensure(("param", 2), NEAR)
    assert left == [("param", 1)]
    store.pin(("param", 2))
    with pytest.raises(BudgetError, match="near: no room for param of group 1 .* give --near-budget at least"):
        store.ensure(("param", 1), NEAR)
    with pytest.raises(StateError, match="in use"):
        store.drop(("param", 0))


def test_far_drops_duplicates_before_it_raises():
    store, _ = make(near=200, far=80)
    store.create(("param", 0), 20, torch.float32, FAR).fill_(7)
    store.ensure(("param", 0), NEAR)                # a copy in both tiers
    store.create(("param", 1), 20, torch.float32, FAR)
    assert store.peek(("param", 0))[1].eq(7).all() and FAR not in store.blocks[("param", 0)].copies
    with pytest.raises(BudgetError, match="far: no room"):
        store.create(("param", 2), 20, torch.float32, FAR)


def test_illegal_transitions_raise():
    store, _ = make()
    store.create(("param", 0), 10, torch.float32, FAR)
    for call, message in [
        (lambda: store.create(("param", 0), 10, torch.float32, FAR), "exists already"),
        (lambda: store.mark_written(("param", 0), NEAR), "where it is not"),
        (lambda: store.unpin(("param", 0)), "unpinned more often"),
        (lambda: store.peek(("param", 9)), "there is no block"),
    ]:
        with pytest.raises(StateError, match=message):
            call()


operations = st.lists(st.tuples(st.sampled_from(["near", "write", "far", "drop", "new", "pin", "unpin"]), st.integers(0, 5)),
                      max_size=60)


@pytest.mark.parametrize("examples", quick_only([60, 300], 60))
def test_the_budget_holds_and_no_content_is_lost_under_random_operations(examples):
    @settings(max_examples=examples)
    @given(operations, st.integers(100, 400), st.lists(st.integers(5, 25), min_size=6, max_size=6))
    def holds(steps, budget, sizes):
        store, _ = make(near=budget)
        expected: dict[int, float] = {}
        for clock, (operation, group) in enumerate(steps):
            _do(store, operation, group, clock, sizes, expected)
            near = store.tiers[NEAR]
            used = sum(block.num_bytes for block in store.blocks.values() if NEAR in block.copies)
            assert near.used_bytes == used and near.reserved_bytes <= budget
        for group, value in expected.items():
            assert store.peek(("param", group))[1].eq(value).all()

    holds()


@pytest.mark.parametrize("text, value", [("64MiB", 64 * 2**20), ("1.5 GB", 1_500_000_000), ("25%", 250), (4096, 4096),
                                         ("100", 100), ("2gib", 2 * 2**30)])
def test_amounts_of_memory(text, value):
    assert parse_bytes(text, 1000) == value


@pytest.mark.parametrize("text", ["", "much", "-5MiB", "5 parsecs", "0", "0%", True, "1e3"])
def test_a_wrong_amount_of_memory_is_refused(text):
    with pytest.raises(ConfigError, match="memory"):
        parse_bytes(text, 1000)


def test_amounts_for_people():
    amounts = {12: "12 bytes", 2048: "2 KiB", 5.4 * 2**20: "5.4 MiB", 2**50: "1024 TiB"}
    assert [format_bytes(number) for number in amounts] == list(amounts.values())


FAULTS = """
import ctypes, resource, sys, torch
from pstar.memory.tier import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    kept = keep_freed_memory()
else:
    kept = ctypes.CDLL(None).mallopt(-3, 65536)    # M_MMAP_THRESHOLD: every piece is mapped, and returned when it is freed
def step():
    held = [torch.ones(1_000_000) for _ in range(20)]    # 80 MB, in pieces of 4
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(int(kept), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc here")
def test_freed_memory_is_kept_for_the_next_step(monkeypatch, tmp_path):
    """By default the C library may or may not keep freed memory. One option makes it return memory, to show the cost."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    program, faults = tmp_path / "program.py", {}
    program.write_text(FAULTS)
    for mode in ("keep", "leave"):
        status, said = run_forked([sys.executable, str(program), mode], env | {"PYTHONPATH": os.pathsep.join(sys.path)})
        assert status == 0, said
        kept, faults[mode] = map(float, said.split())
        assert kept == 1, "both options are set"
    assert faults["keep"] < 0.1 * faults["leave"]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_freed_memory(), "the user's settings are kept"


SIZES = """
import resource, sys, torch
from pstar.memory.tier import Tier, keep_freed_memory
assert keep_freed_memory()
tier = Tier("near", torch.device("cpu"), budget_bytes=12_000_000)
if sys.argv[1] == "heap":
    tier.use_heap(["grad"])
def step():
    for numel in (2_000_000, 1_500_000, 2_500_000, 1_500_000):    # each needs the memory of the one before
        tier.release(tier.allocate(numel, torch.float32, "grad").fill_(1.0))
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc here")
def test_chunks_of_other_sizes_use_the_memory_of_released_ones(tmp_path):
    """Without the heap a buffer gives its pages back when one of another size needs the budget: a fault for each page."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    program, faults = tmp_path / "program.py", {}
    program.write_text(SIZES)
    for mode in ("heap", "pages"):
        status, said = run_forked([sys.executable, str(program), mode], env | {"PYTHONPATH": os.pathsep.join(sys.path)})
        assert status == 0, said
        faults[mode] = float(said)
    assert faults["pages"] > 4_000 and faults["heap"] < 400    # a step writes 30 MB, 7324 pages


def test_a_buffer_of_the_heap_is_freed_when_released_unless_a_copy_uses_it():
    class Copy:
        ended = False

        def wait(self):
            self.ended = True

    tier, copy = Tier(FAR, torch.device("cpu"), budget_bytes=1000), Copy()
    tier.use_heap(["grad"])
    tier.release(tier.allocate(100, torch.uint8, "grad"))
    assert tier.idle_bytes == 0
    tier.release(tier.allocate(100, torch.uint8, "grad"), [copy])
    assert tier.idle_bytes == 100 and not copy.ended
    tier.release(tier.allocate(100, torch.uint8, "grad"))
    assert copy.ended, "the next buffer of this size waits for the copy"
    assert (tier.idle_bytes, tier.used_bytes, tier.peak_bytes) == (0, 0, 100)
    tier.release(tier.allocate(100, torch.uint8, "param"))
    assert tier.idle_bytes == 100, "of the given kinds only"


background = st.lists(st.tuples(st.sampled_from(["near", "ahead", "write", "far", "read", "drop", "new", "pin", "unpin",
                                                 "update"]), st.integers(0, 5)), max_size=40)


@pytest.mark.parametrize("examples", quick_only([80, 500], 80))
def test_three_tiers_and_copies_in_the_background(examples, tmp_path):
    """Budgets hold after every operation, content is never lost or torn, whatever is copied meanwhile."""
    @settings(max_examples=examples)
    @given(background, st.integers(100, 300), st.integers(100, 300), st.lists(st.integers(5, 25), min_size=6, max_size=6),
           st.booleans())
    def hold(steps, near_bytes, far_bytes, sizes, by_need):
        three_tiers_hold(tmp_path, steps, near_bytes, far_bytes, sizes, by_need)

    hold()


def three_tiers_hold(folder, steps, near_bytes, far_bytes, sizes, by_need):
    disk = DiskTier(folder)
    links = Links(by_need=by_need)
    store = BlockStore(Tier(NEAR, CPU, near_bytes), Tier(FAR, CPU, far_bytes), Ledger(), Schedule("lru"),
                          None, disk, links)
    expected: dict[int, float] = {}
    try:
        for clock, (operation, group) in enumerate(steps, 1):
            _do(store, operation, group, clock, sizes, expected)
            for tier, bound in ((NEAR, near_bytes), (FAR, far_bytes)):
                used = sum(block.num_bytes for block in store.blocks.values() if tier in block.copies)
                assert store.tiers[tier].used_bytes == used
                assert store.tiers[tier].reserved_bytes <= bound
        for block in store.blocks.values():
            block.pins = 0
        for group, value in expected.items():
            assert store.peek(("param", group))[1].eq(value).all()
    finally:
        links.close()
        disk.close()


def _do(store: BlockStore, operation: str, group: int, clock: int, sizes: list[int], expected: dict[int, float]) -> None:
    key = ("param", group)
    if (operation == "new") != (group not in expected):
        return
    try:
        if operation == "new":
            store.create(key, sizes[group], torch.float32, FAR).fill_(clock)
            expected[group] = clock
        elif operation == "ahead":
            store.load_ahead(key, NEAR, next_use=-1)
        elif operation in ("near", "write"):
            store.schedule.touch(key)
            data = store.ensure(key, NEAR)
            assert data.eq(expected[group]).all() and data.numel() == sizes[group]
            if operation == "write":
                data.fill_(clock)
                store.mark_written(key, NEAR)
                expected[group] = clock
        elif operation == "update" and not store.blocks[key].pins:
            store.work("update", [key], FAR, lambda buffers: lambda: buffers[key].fill_(clock), background=clock % 3 > 0)
            expected[group] = clock
        elif operation == "far" and not store.blocks[key].pins:
            store.send_far(key)
        elif operation == "read":
            with store.reading([key]) as places:
                assert places[key][1].eq(expected[group]).all()
        elif operation == "drop" and not store.blocks[key].pins:
            store.drop(key)
            del expected[group]
        elif operation == "pin" and store.is_near(key):
            store.pin(key)
        elif operation == "unpin" and store.blocks[key].pins:
            store.unpin(key)
    except BudgetError:
        pass                                            # honest when the pinned blocks leave no room


def test_the_profile_shows_a_copy_without_its_wait_for_earlier_copies():
    """The copy to near waits until the copy to far has ended, which uses the other link."""
    profile, may_end, ended = Profile(), threading.Event(), []
    links = Links()
    tiers = Tier(NEAR, CPU, 100), Tier(FAR, CPU)
    store = BlockStore(*tiers, Ledger(), Schedule("lru"), Views(), links=links, profile=profile)
    store.create(("param", 0), 10, torch.float32, FAR)

    def end() -> None:
        may_end.wait(HANGS_S)
        ended.append(profile.now())

    store.blocks["param", 0].pending.append(links.submit(NEAR, FAR, end, 0))
    assert store.load_ahead(("param", 0), NEAR, 1.0)
    may_end.set()
    store.finish(("param", 0))
    links.close()
    (span,) = [span for span in profile.recording().spans if span.lane == "far to near"]
    assert ended[0] <= span.begin <= span.end


class Fence:
    """A copy that writes down who follows it: this thread (wait) or the current stream (order)."""

    def __init__(self):
        self.calls = []

    def wait(self) -> None:
        self.calls.append("wait")

    def order(self) -> None:
        self.calls.append("order")


@pytest.mark.parametrize("name, call", [(NEAR, "order"), (FAR, "wait")])
def test_memory_that_a_tier_gives_away_has_no_copy_under_way(name, call):
    tier, taken, forgotten, freed = Tier(name, CPU, 1000), Fence(), Fence(), Fence()
    tier.release(tier.allocate(100, torch.float32, "param"), [taken])
    tier.allocate(100, torch.float32, "param")
    assert taken.calls == [call], "the user of a buffer gave no list, so the tier waits for it"
    tier.release(tier.allocate(50, torch.float32, "param"), [forgotten], keep=False)
    assert forgotten.calls == [call], "the tier forgets this buffer"
    tier.release(tier.allocate(60, torch.float32, "param"), [freed])
    tier.allocate(120, torch.float32, "param")
    assert freed.calls == [call], "the idle buffer gave way to another size"


def test_who_waits_for_a_copy_in_any_case_takes_its_buffer_and_leaves_the_free_one():
    """A group's parameters, which come back behind its gradient and its update, leave a buffer to the next gradient."""
    copies, go, tier = CopyQueue("test", by_need=True), threading.Event(), Tier(NEAR, CPU, 1000)
    other, gradient = (copies.submit(lambda: go.wait(HANGS_S)) for _ in range(2))
    update = copies.submit(lambda: None, before=[gradient])
    buffers = [tier.allocate(25, torch.float32, "grad") for _ in range(3)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for buffer, fences in zip(buffers, ([other], [gradient], []), strict=True):
        tier.release(buffer, fences)
    fences: list = []
    assert tier.allocate(25, torch.float32, "param", fences, after=[update]).data_ptr() == addresses[1]
    assert fences == [gradient]
    assert tier.allocate(25, torch.float32, "grad", fences).data_ptr() == addresses[2] and fences == [gradient]
    go.set()
    copies.close()
