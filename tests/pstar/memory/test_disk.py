"""The disk tier: no content is lost, the budget is the file's, and a full or broken disk gives one line."""

import ctypes
import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar.errors import BudgetError, ConfigError, DiskError, StateError
from pstar.memory.disk import ALIGN, DiskTier, check_disk_path
from pstar.memory.tier import FAR, OWN_PAGES_BYTES, Tier
from tests.cover import quick_only
from tests.limits import HANGS_S

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(params=["direct", "buffered"])
def tier(request, tmp_path):
    """With direct I/O and without it; on the folder of the temporary files, whose file system may have none."""
    made = DiskTier(tmp_path, direct=None if request.param == "direct" else False)
    if request.param == "direct" and not made.direct:
        pytest.skip("no direct I/O in the folder of temporary files")
    yield made
    made.close()


@contextmanager
def mounted(tmp_path: Path, options: str, kind: str = "tmpfs"):
    """A file system of its own; skipped where this user may not mount one."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["mount", "-t", kind, "-o", options, "pstar_test", str(folder)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def file_limit(num_bytes: int):
    """No file may be written beyond num_bytes. (Python ignores the signal that comes with it.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def buffer(num_bytes: int) -> torch.Tensor:
    """As the far tier makes them: with pages of its own, if it is large."""
    return Tier(FAR, CPU).allocate(num_bytes, torch.uint8, "test")


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.each
@pytest.mark.parametrize("numel", [0, 1, 1000, ALIGN, ALIGN + 1, OWN_PAGES_BYTES, OWN_PAGES_BYTES + 7, 5 * MIB + 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int16, torch.float32])
def test_a_read_returns_the_bytes_that_were_written(tier, numel, dtype):
    content = random_bytes(numel * dtype.itemsize, numel)
    source, target = buffer(content.nbytes), buffer(content.nbytes)
    source.copy_(content)
    extents = [tier.allocate(numel, dtype, "exp_avg") for _ in range(2)]
    tier.write(extents[1], source.view(dtype))
    tier.write(extents[0], buffer(content.nbytes).view(dtype))
    tier.read(extents[1], target.view(dtype))
    assert target.equal(content) and source.equal(content)
    assert extents[1].offset % ALIGN == 0 and extents[1].nbytes == content.nbytes


@pytest.mark.each
@pytest.mark.parametrize("skipped", [1, 512, ALIGN, ALIGN + 24])
def test_a_view_of_a_larger_tensor(tier, skipped):
    """Whatever the alignment of its first byte."""
    whole, target = buffer(MIB), buffer(MIB).zero_()
    whole.copy_(random_bytes(MIB))
    part = whole[skipped:skipped + 300_001]
    extent = tier.allocate(part.numel(), part.dtype, "param")
    tier.write(extent, part)
    tier.read(extent, target[7:7 + part.numel()])
    assert target[7:7 + part.numel()].equal(part)
    assert not target[:7].any() and not target[7 + part.numel():].any(), "nothing beside it is touched"
    grid = whole.view(4, -1)[1:3]
    tier.write(extent := tier.allocate(grid.numel(), grid.dtype, "param"), grid)
    tier.read(extent, back := torch.empty_like(grid))
    assert back.equal(grid)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages it holds")
def test_whole_blocks_go_around_the_page_cache(tier):
    extent, content = tier.allocate(MIB + 1, torch.uint8, "param"), buffer(MIB + 1).fill_(1)
    tier.write(extent, content)
    tier.read(extent, content)
    with mmap.mmap(tier._buffered, tier.file_bytes) as pages:
        held = (ctypes.c_ubyte * (tier.file_bytes // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(first := ctypes.c_char.from_buffer(pages)))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(tier.file_bytes), held) == 0
        del first
    num_cached = sum(page & 1 for page in held)
    assert num_cached <= 1 if tier.direct else num_cached == len(held)


def test_direct_and_buffered_bytes_are_the_same_file(tier):
    """What is written one way is read the other, in the same extent."""
    aligned, shifted = buffer(MIB + 100), buffer(MIB + 101)[1:]
    extent = tier.allocate(MIB + 100, torch.uint8, "param")
    for seed, (source, target) in enumerate([(aligned, shifted), (shifted, aligned), (aligned, aligned)]):
        content = random_bytes(MIB + 100, seed)
        source.copy_(content)
        tier.write(extent, source)
        target.zero_()
        tier.read(extent, target)
        assert target.equal(content)


def test_bytes_of_content_are_counted_and_the_budget_is_the_files(tmp_path):
    tier = DiskTier(tmp_path, 3 * ALIGN)
    first, second = tier.allocate(100, torch.float32, "param"), tier.allocate(100, torch.bfloat16, "exp_avg")
    assert (tier.used_bytes, tier.peak_bytes, dict(tier.used_by_kind)) == (600, 600, {"param": 400, "exp_avg": 200})
    assert tier.has_room(ALIGN) and not tier.has_room(ALIGN + 1), "each of the two takes a whole block"
    with pytest.raises(BudgetError, match=f"disk: {ALIGN + 4} bytes for param do not fit: {2 * ALIGN} of {3 * ALIGN} bytes"):
        tier.allocate(ALIGN // 4 + 1, torch.float32, "param")
    assert (tier.used_bytes, tier.file_bytes) == (600, 2 * ALIGN), "a refusal changes nothing"
    tier.release(first)
    assert (tier.used_bytes, tier.idle_bytes, tier.reserved_bytes, tier.peak_bytes) == (200, ALIGN, ALIGN + 200, 600)
    assert tier.used_by_kind["param"] == 0
    tier.release(second)
    tier.close()


def test_an_extent_of_equal_size_is_used_again_before_the_file_grows(tmp_path):
    tier = DiskTier(tmp_path)
    extents = [tier.allocate(size * ALIGN, torch.uint8, "param") for size in (1, 2, 1, 3)]
    for extent in extents[1::2]:
        tier.release(extent)
    assert tier.allocate(3 * ALIGN - 5, torch.uint8, "param").offset == extents[3].offset, "the smallest gap that holds it"
    assert tier.allocate(2 * ALIGN, torch.uint8, "param").offset == extents[1].offset
    assert tier.file_bytes == 7 * ALIGN and tier.idle_bytes == 0
    tier.close()


def test_gaps_that_lie_apart_hold_one_extent(tmp_path):
    tier = DiskTier(tmp_path, 6 * ALIGN)
    extents = [tier.allocate(ALIGN, torch.uint8, "param") for _ in range(6)]
    for extent in extents[::2]:
        tier.release(extent)
    others = [random_bytes(ALIGN, number) for number in range(3)]
    for extent, content in zip(extents[1::2], others, strict=True):
        tier.write(extent, content)
    assert tier.has_room(3 * ALIGN)
    large, content = tier.allocate(3 * ALIGN - 9, torch.uint8, "param"), random_bytes(3 * ALIGN - 9, 9)
    tier.write(large, content)
    assert len(large.pieces) == 3
    for extent, expected in [*zip(extents[1::2], others, strict=True), (large, content)]:
        tier.read(extent, back := torch.empty_like(expected))
        assert back.equal(expected)
    tier.release(large)
    for extent in extents[1::2]:
        tier.release(extent)
    assert len(tier.allocate(6 * ALIGN, torch.uint8, "param").pieces) == 1, "neighbouring gaps became one"
    tier.close()


def test_wrong_calls_of_the_disk_tier_raise(tmp_path):
    tier, other = DiskTier(tmp_path), DiskTier(tmp_path)
    extent, foreign = tier.allocate(10, torch.float32, "param"), other.allocate(10, torch.float32, "param")
    tensor = torch.zeros(10)
    for call, message in [
        (lambda: tier.write(extent, torch.zeros(11)), "of that size"),
        (lambda: tier.read(extent, torch.zeros(10, 2)[:, 0]), "contiguous"),
        (lambda: tier.write(extent, torch.zeros(10, device="meta")), "CPU"),
        (lambda: tier.write(foreign, tensor), "not in use"),
        (lambda: tier.release(foreign), "not in use"),
    ]:
        with pytest.raises(StateError, match=message):
            call()
    tier.release(extent)
    for call in (lambda: tier.release(extent), lambda: tier.read(extent, tensor)):
        with pytest.raises(StateError, match="not in use"):
            call()
    for _ in range(2):
        tier.close()
        other.close()
    assert tier.file_bytes == tier.reserved_bytes == 0
    for call in (lambda: tier.allocate(1, torch.float32, "param"), lambda: other.read(foreign, tensor)):
        with pytest.raises(StateError, match="closed"):
            call()


def test_threads_read_and_write_at_the_same_time(tier):
    failures = []

    def work(seed: int) -> None:
        sizes = [OWN_PAGES_BYTES + seed * 1000 + 1, 100, 2 * OWN_PAGES_BYTES]
        held = []
        for turn in range(20):
            size = sizes[turn % 3]
            content = buffer(size)
            content.copy_(random_bytes(size, seed * 100 + turn))
            tier.write(extent := tier.allocate(size, torch.uint8, "param"), content)
            held.append((extent, content))
            for extent, content in held:
                tier.read(extent, back := buffer(content.nbytes))
                if not back.equal(content):
                    failures.append((seed, turn))
            if turn % 4 == 3:
                tier.release(held.pop(turn % len(held))[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert not failures and tier.used_bytes > 0


def test_nothing_goes_away_while_it_is_read_or_written(tmp_path):
    tier = DiskTier(tmp_path)
    extent, closer = tier.allocate(10, torch.float32, "param"), threading.Thread(target=tier.close)
    with tier._using(extent):
        with pytest.raises(StateError, match="while it is read or written"):
            tier.release(extent)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive() and os.fstat(tier._buffered).st_size == ALIGN
    closer.join(HANGS_S)
    assert not closer.is_alive() and tier.file_bytes == 0


# ---- disks that fail


def test_a_full_disk_is_noticed_when_space_is_reserved(tmp_path):
    with mounted(tmp_path, f"size={MIB}") as folder:
        tier = DiskTier(folder)
        extent, content = tier.allocate(MIB // 2, torch.uint8, "param"), random_bytes(MIB // 2)
        tier.write(extent, content)
        with pytest.raises(DiskError) as caught:
            tier.allocate(MIB, torch.uint8, "exp_avg")
        assert str(caught.value) == (f"disk: reserving 1 MiB in {folder} failed: {os.strerror(errno.ENOSPC)}; free 1 MiB "
                                     "there or give another --disk-path; the last checkpoint is complete")
        rest = tier.allocate(MIB // 2, torch.uint8, "exp_avg")    # what the failure had taken came back
        tier.write(rest, content)
        tier.read(extent, back := torch.empty_like(content))
        assert back.equal(content)
        with pytest.raises(DiskError):
            tier.allocate(1, torch.uint8, "param")
        tier.release(rest)
        tier.allocate(1, torch.uint8, "param")
        tier.close()


def test_a_full_disk_at_the_start(tmp_path):
    with mounted(tmp_path, f"size={4 * ALIGN}") as folder:
        (folder / "other").write_bytes(bytes(4 * ALIGN))
        with pytest.raises(ConfigError, match="^--disk-path .*: No space left"):
            check_disk_path(folder)


def test_a_limit_on_the_size_of_files(tmp_path):
    tier = DiskTier(tmp_path)
    with file_limit(MIB), pytest.raises(DiskError, match="raise the limit on the size of files .ulimit -f. or give another"):
        tier.allocate(2 * MIB, torch.uint8, "param")
    assert tier.file_bytes == tier.used_bytes == 0
    tier.allocate(2 * MIB, torch.uint8, "param")
    tier.close()


def test_a_write_that_fails_in_the_middle(tier):
    """The first half arrives, then the system refuses: a short write is continued, and the refusal is told."""
    before, torn = tier.allocate(ALIGN, torch.uint8, "param"), tier.allocate(MIB, torch.uint8, "param")
    kept, content = random_bytes(ALIGN, 1), buffer(MIB)
    content.copy_(random_bytes(MIB, 2))
    tier.write(before, kept)
    with file_limit(torn.offset + MIB // 2), pytest.raises(DiskError) as caught:
        tier.write(torn, content)
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).startswith(f"disk: writing 1 MiB in {tier.folder} failed: {os.strerror(errno.EFBIG)}; ")
    tier.read(torn, back := buffer(MIB).zero_())
    assert back[:MIB // 2].equal(content[:MIB // 2]) and not back[MIB // 2:].equal(content[MIB // 2:])
    tier.read(before, back := torch.empty_like(kept))
    assert back.equal(kept), "the other extents are as before"
    tier.write(torn, content)
    tier.read(torn, back := torch.empty_like(content))
    assert back.equal(content), "and the tier goes on"
    tier.release(torn)


def test_a_file_that_somebody_has_cut(tier):
    extent = tier.allocate(MIB, torch.uint8, "param")
    os.ftruncate(tier._buffered, MIB // 2)
    with pytest.raises(DiskError, match="reading 1 MiB in .* failed: the file ends early; give another --disk-path"):
        tier.read(extent, buffer(MIB))


def test_paths_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"^--disk-path {folder}: Not a directory; give a folder that this user may"):
            check_disk_path(folder)
        with pytest.raises(DiskError, match=f"^disk: making a file in {folder} failed: .*; give another --disk-path$"):
            DiskTier(folder)
    with pytest.raises(ConfigError, match="--disk-path"):
        check_disk_path("a\0b")
    check_disk_path(tmp_path / "new" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a check leaves nothing"


def test_a_folder_that_may_not_be_written(tmp_path):
    if os.geteuid() == 0:    # root may write everywhere, except on a read-only system
        with mounted(tmp_path, "ro,size=1m") as folder:
            refused(folder)
    else:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o500)
        refused(folder)


def refused(folder: Path) -> None:
    for path in (folder, folder / "below"):
        with pytest.raises(ConfigError, match="^--disk-path .*; give a folder that this user may write to$"):
            check_disk_path(path)
        with pytest.raises(DiskError, match="^disk: making a file in"):
            DiskTier(path)


def test_direct_io_where_there_is_none(tmp_path):
    with mounted(tmp_path, "mode=755", "ramfs") as folder:
        tier = DiskTier(folder)
        content = buffer(MIB).fill_(7)
        tier.write(extent := tier.allocate(MIB, torch.uint8, "param"), content)
        tier.read(extent, back := buffer(MIB))
        tier.close()
        assert not tier.direct and back.equal(content)
        with pytest.raises(ConfigError, match="no direct I/O"):
            DiskTier(folder, direct=True)
        assert list(folder.iterdir()) == []


def test_a_system_that_cannot_reserve(tmp_path, monkeypatch):
    """macOS has no such call: the space is taken with zeros."""
    monkeypatch.delattr(os, "posix_fallocate")
    tier = DiskTier(tmp_path)
    tier.allocate(3 * MIB + 1, torch.uint8, "param")
    assert os.fstat(tier._buffered).st_blocks * 512 >= tier.file_bytes == 3 * MIB + ALIGN
    with file_limit(4 * MIB), pytest.raises(DiskError, match="reserving 2 MiB"):
        tier.allocate(2 * MIB, torch.uint8, "param")
    assert os.fstat(tier._buffered).st_size == tier.file_bytes, "what the failure had taken came back"
    tier.close()


# ---- processes that end

HOLDS_MUCH = """
import sys, time, torch
from pathlib import Path
from pstar.memory.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]))
extent = tier.allocate(8 * 2**20, torch.uint8, "param")
tier.write(extent, torch.ones(8 * 2**20, dtype=torch.uint8))
print("ready", flush=True)
time.sleep(600)
"""


def kill_the_holder(folder: Path) -> int:
    """Starts a process that holds 8 MiB there and kills it; returns the bytes that were free while it held them."""
    with subprocess.Popen([sys.executable, "-c", HOLDS_MUCH, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "ready\n"
            free = os.statvfs(folder).f_bfree * os.statvfs(folder).f_bsize
        finally:
            holder.send_signal(signal.SIGKILL)
    assert holder.returncode == -signal.SIGKILL
    return free


@pytest.mark.deep    # the next test sees the same, on a file system of its own
def test_a_killed_process_leaves_nothing_behind(tmp_path):
    kill_the_holder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_space_of_a_killed_process_returns(tmp_path):
    with mounted(tmp_path, f"size={16 * MIB}") as folder:
        before = os.statvfs(folder).f_bfree * os.statvfs(folder).f_bsize
        assert before - kill_the_holder(folder) >= 8 * MIB, "it did hold them"
        after = os.statvfs(folder).f_bfree * os.statvfs(folder).f_bsize
        assert after == before and list(folder.iterdir()) == []


def test_a_closed_tier_gives_its_space_back(tmp_path):
    tier = DiskTier(tmp_path)
    tier.allocate(MIB, torch.uint8, "param")
    numbers = [number for number in (tier._buffered, tier._direct) if number is not None]
    assert os.fstat(numbers[0]).st_blocks * 512 >= MIB and os.fstat(numbers[0]).st_nlink == 0
    tier.close()
    for number in numbers:    # an open one would keep the file
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


# ---- anything in any order

MEMORY = mmap.mmap(-1, 6 * ALIGN)    # aligned, so that whole blocks go directly
operations = st.lists(st.tuples(st.sampled_from(["new", "new", "write", "read", "drop"]), st.integers(0, 7),
                                st.integers(0, 6 * ALIGN)), max_size=40)


@pytest.mark.parametrize("examples", quick_only([80, 500], 80))
def test_the_budget_holds_and_no_content_is_lost_under_random_operations(examples):
    @settings(max_examples=examples)
    @given(operations, st.integers(ALIGN, 20 * ALIGN), st.booleans())
    def hold(steps, budget, direct):
        the_budget_holds(steps, budget, direct)

    hold()


def the_budget_holds(steps, budget, direct):
    tier = DiskTier(Path(tempfile.gettempdir()), budget, direct=None if direct else False)
    held: dict[int, tuple] = {}
    memory = torch.frombuffer(MEMORY, dtype=torch.uint8)
    for clock, (operation, number, size) in enumerate(steps):
        if operation == "new" and number not in held:
            if tier.has_room(size):
                extent = tier.allocate(size, torch.uint8, "param")
                held[number] = extent, random_bytes(size, clock)
                tier.write(*held[number])
            else:
                with pytest.raises(BudgetError):
                    tier.allocate(size, torch.uint8, "param")
        elif number not in held:
            continue
        elif operation == "write":
            extent, old = held[number]
            memory[:old.nbytes].copy_(random_bytes(old.nbytes, clock))
            held[number] = extent, memory[:old.nbytes].clone()
            tier.write(extent, memory[:old.nbytes])
        elif operation == "read":
            same(tier, *held[number], memory)
        else:
            tier.release(held.pop(number)[0])
        blocks = sum(-(-content.nbytes // ALIGN) * ALIGN for _, content in held.values())
        assert tier.used_bytes == sum(content.nbytes for _, content in held.values())
        assert blocks + tier.idle_bytes == tier.file_bytes == os.fstat(tier._buffered).st_size <= budget
    for extent, content in held.values():
        same(tier, extent, content, memory)
    tier.close()


def same(tier: DiskTier, extent, content: torch.Tensor, memory: torch.Tensor) -> None:
    tier.read(extent, memory[:content.nbytes])
    assert memory[:content.nbytes].equal(content)
