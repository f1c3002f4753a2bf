"""A copy queue: copies in order, errors that are not lost, and processes that end."""

import functools
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from random import Random

import pytest
import torch

from pstar.errors import StateError
from pstar.memory.block_log import BlockLog
from pstar.memory.block_store import BlockStore
from pstar.memory.copy_queue import CopyQueue, Handle
from pstar.memory.disk import DiskTier
from pstar.memory.links import Links
from pstar.memory.tier import FAR, NEAR, Ledger, Tier
from pstar.schedule.schedule import Schedule
from tests import toy
from tests.cover import quick_only
from tests.harness.program import run_forked
from tests.limits import HANGS_S as LONG_S
from tests.limits import wait_until


@pytest.fixture(params=[True, False], ids=["thread", "at once"])
def copy_queue(request):
    made = CopyQueue("test", asynchronous=request.param)
    yield made
    made.close()


def fail(message: str) -> None:
    raise ValueError(message)


def test_copies_run_in_the_order_in_which_they_were_submitted(copy_queue):
    seen, threads = [], set()

    def job(number: int) -> None:
        seen.append(number)
        threads.add(threading.current_thread() is threading.main_thread())

    handles = [copy_queue.submit(lambda number=number: job(number)) for number in range(200)]
    handles[120].wait()
    assert seen[:121] == list(range(121))
    copy_queue.drain()
    assert seen == list(range(200)) and all(handle.done for handle in handles)
    assert threads == {not copy_queue.asynchronous}


def test_a_read_after_a_write_sees_what_was_written(copy_queue, tmp_path):
    tier = DiskTier(tmp_path)
    extent, content = tier.allocate(100_000, torch.float32, "param"), torch.empty(100_000)
    for turn in range(10):
        content.fill_(turn)
        back = torch.empty_like(content)
        copy_queue.submit(lambda: tier.write(extent, content), content.nbytes)
        copy_queue.submit(lambda back=back: tier.read(extent, back), content.nbytes).wait()
        assert back.eq(turn).all()
    tier.close()


def blocked(name: str) -> tuple[CopyQueue, threading.Event, Handle]:
    """(a queue by need, an event, its first job, which waits for the event)."""
    copy_queue, go = CopyQueue(name, by_need=True), threading.Event()
    return copy_queue, go, copy_queue.submit(lambda: go.wait(LONG_S))


def test_of_the_copies_that_may_begin_the_most_urgent_one_runs_and_the_first_of_equal_ones():
    (out, go, _), (back, go_back, first_back) = blocked("out"), blocked("back")
    seen = []
    for name, needed in [("c", 3.0), ("a", 1.0), ("b", 2.0), ("b again", 2.0), ("never needed", float("inf"))]:
        out.submit(functools.partial(seen.append, name), needed=needed)
    out.submit(functools.partial(seen.append, "behind the other queue"), before=[first_back], needed=0.0)
    go.set()
    wait_until(lambda: len(seen) == 5, "five copies")
    assert seen == ["a", "b", "b again", "c", "never needed"]
    go_back.set()
    wait_until(lambda: len(seen) == 6, "the copy behind the other queue")
    out.close()
    back.close()


def test_a_copy_that_somebody_waits_for_comes_first_behind_those_that_must_end_before_it():
    (out, go, _), (back, go_back, _) = blocked("out"), blocked("back")
    seen = []
    for number in range(5):
        out.submit(functools.partial(seen.append, number), needed=number)
    gradient = out.submit(functools.partial(seen.append, "gradient"), needed=8.0)
    parameters = back.submit(functools.partial(seen.append, "parameters"), before=[gradient], needed=8.0)
    thread = threading.Thread(target=parameters.wait)
    thread.start()
    wait_until(lambda: gradient.urgency < (False, 9.0), "a wait for the parameters")
    go_back.set()
    go.set()
    thread.join(LONG_S)
    wait_until(lambda: len(seen) == 7, "all copies")
    assert seen[0] == "gradient" and [each for each in seen if each in range(5)] == [*range(5)]
    out.close()
    back.close()


@pytest.mark.parametrize("seed", quick_only(range(12), 0))
def test_copies_of_queues_that_wait_for_each_other_all_run_each_behind_those_before_it(seed):
    random = Random(seed)
    queues, ended, early, handles = [CopyQueue(name, by_need=True) for name in "abc"], set(), [], []

    def job(number: int, before: list[int]) -> None:
        early.extend(each for each in before if each not in ended)
        ended.add(number)

    for number in range(300):
        before = random.sample(range(number), min(number, random.randrange(4)))
        handles.append(random.choice(queues).submit(functools.partial(job, number, before), needed=random.randrange(5),
                                                    before=[handles[each] for each in before]))
        if random.random() < 0.03:
            random.choice(handles).wait()
    for each in queues:
        each.drain()
        each.close()
    assert ended == {*range(300)} and not early
    assert not handles[250].follows(handles[0]), "it has ended"


def test_an_error_before_a_copy_is_its_error_too():
    """As in the other queues: its job waits for the copies before it, which raises their errors."""
    copy_queue = CopyQueue("test", by_need=True)
    bad = copy_queue.submit(lambda: fail("broken"))
    behind = copy_queue.submit(bad.wait, before=[bad])
    with pytest.raises(ValueError, match="broken"):
        behind.wait()
    copy_queue.close()


def test_a_copy_that_has_ended_keeps_none_of_those_before_it():
    copy_queue = CopyQueue("test", by_need=True)
    first = copy_queue.submit(lambda: None)
    kept, last = weakref.ref(first), copy_queue.submit(lambda: None, before=[first])
    last.wait()
    copy_queue.submit(lambda: None).wait()    # which forgets what has ended
    copy_queue.submit(lambda: None).wait()
    del first
    assert kept() is None
    copy_queue.close()


def test_submitting_does_not_wait_for_the_copy():
    copy_queue, started, go = CopyQueue("test"), threading.Event(), threading.Event()
    handle = copy_queue.submit(lambda: (started.set(), go.wait(LONG_S)))
    following = copy_queue.submit(lambda: None)
    assert started.wait(LONG_S) and not handle.done and not following.done
    go.set()
    following.wait()
    assert handle.done
    copy_queue.close()


def test_a_job_that_keeps_a_tier_alive_to_the_last_does_not_wait_for_itself():
    """A tier's end waits for the copies that use its buffers. Here the worker drops the tier with the copy's job."""
    copies, go, tier = CopyQueue("test"), threading.Event(), Tier(FAR, torch.device("cpu"))
    buffer = tier.allocate(100, torch.float32, "param")
    handle = copies.submit(lambda keeps=tier: go.wait(LONG_S))
    tier.release(buffer, [handle])
    ended = weakref.ref(tier)
    del tier
    go.set()
    wait_until(lambda: handle.done, "the end of the job")
    assert ended() is None
    copies.close()


def test_the_last_update_of_a_log_may_drop_it_before_the_copies_behind_it():
    """An engine is dropped during an early update: the copy of its parameters to near is behind that update."""
    go, key = threading.Event(), ("param", 0)
    store = BlockStore(*(Tier(name, torch.device("cpu")) for name in (NEAR, FAR)), Ledger(), Schedule("lru"), links=Links())
    log = BlockLog(store, 1_000)
    store.create(key, 10, torch.float32, FAR).zero_()
    log.record(0, [key], [], lambda buffers: lambda: go.wait(LONG_S), "update", background=True)
    assert store.load_ahead(key, NEAR, next_use=1.0)
    update, load = store.blocks[key].pending
    log.forget(0)
    ended = weakref.ref(log)
    del log
    go.set()
    wait_until(lambda: update.done and load.done, "the update and the copy behind it")
    assert ended() is None


def test_an_error_is_raised_at_every_wait_and_stops_nothing(copy_queue):
    bad = copy_queue.submit(lambda: fail("broken"))
    good = copy_queue.submit(lambda: None)
    good.wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            bad.wait()
    assert bad.done
    copy_queue.drain()    # which has nothing new to say


def test_an_error_that_nobody_waited_for_is_raised_by_drain(copy_queue):
    copy_queue.submit(lambda: fail("first"))
    for _ in range(10):
        copy_queue.submit(lambda: None)
    second, after = copy_queue.submit(lambda: fail("second")), copy_queue.submit(lambda: None)
    with pytest.raises(ValueError, match="first"):
        copy_queue.drain()
    assert after.done, "all copies have ended"
    copy_queue.drain()
    with pytest.raises(ValueError, match="second"):
        second.wait()


def test_closing_finishes_the_copies_and_refuses_new_ones(copy_queue):
    seen = []
    copy_queue.submit(lambda: fail("not raised by close"))
    copy_queue.submit(lambda: seen.append(1))
    for _ in range(2):
        copy_queue.close()
    assert seen == [1] and not any(thread.name == "pstar copy queue test" for thread in threading.enumerate())
    with pytest.raises(StateError, match="copy queue test takes no more copies: it is closed"):
        copy_queue.submit(lambda: None)


def test_the_thread_starts_with_the_first_copy_and_ends_with_its_queue():
    copy_queue = CopyQueue("unused")
    assert not any(thread.name == "pstar copy queue unused" for thread in threading.enumerate())
    tensor = torch.ones(10)
    held = weakref.ref(tensor)
    copy_queue.submit(tensor.zero_).wait()
    thread, = (thread for thread in threading.enumerate() if thread.name == "pstar copy queue unused")
    copy_queue.submit(lambda: None).wait()    # the first copy is behind the worker now
    del tensor
    assert held() is None, "the worker keeps nothing of a copy that it has done"
    del copy_queue
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_slow_link_takes_at_least_its_time(copy_queue):
    slow = CopyQueue("slow", copy_queue.asynchronous, bytes_per_s=10**6)
    begin = time.perf_counter()
    for num_bytes in (20_000, 30_000):
        slow.submit(lambda: None, num_bytes)
    slow.drain()
    assert time.perf_counter() - begin >= 0.05 and slow.busy_s >= 0.05, "one after the other"
    with pytest.raises(ValueError):
        slow.submit(lambda: fail("slow too"), 10_000).wait()
    assert slow.busy_s >= 0.06
    slow.close()
    assert copy_queue.busy_s == 0


def test_ctrl_c_in_a_copy_that_runs_at_once_is_the_users():
    def interrupt() -> None:
        raise KeyboardInterrupt

    copy_queue = CopyQueue("test", asynchronous=False)
    with pytest.raises(KeyboardInterrupt):
        copy_queue.submit(interrupt)
    copy_queue.drain()


def test_the_interpreter_goes_on_while_the_disk_tier_copies(tmp_path):
    """No thread is made to give the interpreter away here, so the count goes on during a write only if the write lets it."""
    tier, copy_queue, count, during = DiskTier(tmp_path, direct=False), CopyQueue("test"), [0], []
    content = torch.ones(2**24)
    extent = tier.allocate(content.numel(), content.dtype, "param")

    def job() -> None:
        before = count[0]
        tier.write(extent, content)
        during.append(count[0] - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(LONG_S)
    try:
        for _ in range(20):
            handle = copy_queue.submit(job)
            while not handle.done:
                count[0] += 1
                time.sleep(0)
            if during[-1]:
                break
    finally:
        sys.setswitchinterval(interval)
    copy_queue.drain()
    assert max(during) > 0
    copy_queue.close()
    tier.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_an_error(tmp_path):
    code = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)    # Python 3.12 and newer warn of a fork beside a thread
from pstar.errors import StateError
from pstar.memory.copy_queue import CopyQueue
copy_queue, go = CopyQueue("test"), threading.Event()
handle = copy_queue.submit(lambda: go.wait(60))
child = os.fork()
if child == 0:
    for call in (lambda: copy_queue.submit(print), handle.wait, copy_queue.drain):
        try:
            call()
        except StateError as error:
            print(error, flush=True)
    copy_queue.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go.set()
handle.wait()
"""
    (tmp_path / "program.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    status, said = run_forked([sys.executable, str(tmp_path / "program.py")], environment)
    lines = said.splitlines()
    assert status == 0 and lines[3:] == ["7"], said
    assert "before a fork" in lines[0] and "forked while" in lines[1] and lines[1] == lines[2]


PENDING = """
import atexit, sys
@atexit.register    # before all the others, so that it runs last, after the queue's own
def last():
    tier.close()
    errors = []
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            errors.append(str(error))
    print(started.is_set(), 0 < len(errors) < 1000, set(errors))
import threading, torch
from pathlib import Path
from pstar.memory.disk import DiskTier
from pstar.memory.copy_queue import CopyQueue
tier, handles = DiskTier(Path(sys.argv[1])), []
started = threading.Event()
copy_queue = CopyQueue("test", bytes_per_s=1e9)
source, target = torch.ones(2**22), torch.empty(2**22)
extent = tier.allocate(2**22, torch.float32, "param")
def job():
    started.set()
    target.copy_(source)
    tier.write(extent, target)
handles += [copy_queue.submit(job, 2**24) for _ in range(1000)]
started.wait(60)
if sys.argv[2] == "error":
    raise RuntimeError("of the program")
sys.exit(3)
"""


@pytest.mark.parametrize("how, status, last_line", [
    pytest.param("exit", 3, None, marks=pytest.mark.deep), ("error", 1, "RuntimeError: of the program")])
def test_a_process_with_pending_copies_ends_cleanly(tmp_path, how, status, last_line):
    run = subprocess.run([sys.executable, "-c", PENDING, str(tmp_path), how], capture_output=True, text=True, timeout=LONG_S)
    assert run.stdout == "True True {'the process ends: this copy was dropped'}\n"
    lines = run.stderr.splitlines()
    assert run.returncode == status and (lines[-1] == last_line if last_line else not lines)


FREED_BY_THE_WORKER = """
import sys, time, torch
from pstar.memory.copy_queue import CopyQueue
copy_queue = CopyQueue("test", bytes_per_s=2e7, by_need=sys.argv[2] == "by need")
other, last = CopyQueue("other", by_need=sys.argv[2] == "by need"), None
for _ in range(8):    # the job holds the only references
    last = copy_queue.submit(lambda a=torch.randn(300_000), b=torch.empty(300_000): b.copy_(a), 1_200_000)
    other.submit(lambda a=torch.randn(300_000), b=torch.empty(300_000): (last.wait(), b.copy_(a)), before=[last])
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("after_s", quick_only([0.0, 0.03, 0.09], 0.03))
@pytest.mark.parametrize("order", ["as submitted", "by need"])
def test_the_tensors_of_a_copy_under_way_are_freed_before_the_process_ends(after_s, order):
    """A thread that is stopped while it frees one takes the process down: terminate called without an active exception."""
    command = [sys.executable, "-c", FREED_BY_THE_WORKER, str(after_s), order]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert (run.returncode, run.stderr) == (0, "")


def test_without_a_gpu_autograd_runs_backward_in_the_callers_thread_and_copies_are_submitted_there(monkeypatch):
    """torch/csrc/autograd/engine.cpp: only operations on other devices than the CPU get a thread for each device."""
    seen, submit = [], CopyQueue.submit

    def watched(copy_queue: CopyQueue, *args, **keys):
        seen.append((threading.current_thread(), torch._C._current_autograd_node() is not None))
        return submit(copy_queue, *args, **keys)

    monkeypatch.setattr(CopyQueue, "submit", watched)
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 2)
    assert {thread for thread, _ in seen} == {threading.current_thread()}
    assert {in_backward for _, in_backward in seen} == {True, False}
