"""Locked far memory: exact bytes, each buffer unlocked once and before it is unmapped, and training that never notices.

There is no GPU here: a Driver stands in for cudaHostRegister and checks what CUDA asks of a program (CUDA Runtime API,
"Memory Management"): whole pages, nothing locked twice, nothing unlocked that is not locked, or unmapped before.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import pstar
import pstar.engine
from pstar.config import Config
from pstar.errors import BudgetError
from pstar.layout.budget import choose_near_states
from pstar.memory import pinned
from pstar.memory.pages import PAGE_BYTES, whole_pages
from pstar.memory.pinned import CudaRegistration, LockedPages, registration_for
from pstar.memory.tier import FAR, NEAR, Tier
from pstar.numerics.precision import Precision
from pstar.planner import predict as planner
from pstar.planner.gpt_shape import GptShape
from pstar.planner.machines import MACHINES
from tests import toy
from tests.limits import HANGS_S
from tests.pstar.planner import test_predict as planned

CPU = torch.device("cpu")


def mapped() -> list[tuple[int, int]]:
    """(begin, end) of the address ranges of this process, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    with open("/proc/self/maps", encoding="ascii") as file:
        for line in file:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if ranges and ranges[-1][1] == begin:
                begin = ranges.pop()[0]
            ranges.append((begin, end))
    return ranges


def is_mapped(address: int, num_bytes: int) -> bool:
    return any(begin <= address and address + num_bytes <= end for begin, end in mapped())


class Driver:
    """Locks pages in a table; refuses above most_bytes, like a system with a limit."""

    def __init__(self, most_bytes: int | None = None):
        self.locked: dict[int, int] = {}
        self.most_bytes, self.wrong, self.asked, self.unlocked = most_bytes, [], 0, 0

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())

    def register(self, address: int, num_bytes: int) -> str | None:
        self.asked += 1
        if address % PAGE_BYTES or num_bytes % PAGE_BYTES or not num_bytes:
            self.wrong.append(f"locked parts of pages: {num_bytes} bytes at {address}")
        if any(address < end and begin < address + num_bytes for begin, end in self._ranges()):
            self.wrong.append("locked twice")
        if self.most_bytes is not None and self.locked_bytes + num_bytes > self.most_bytes:
            return "out of memory"
        self.locked[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        self.unlocked += 1
        if address not in self.locked:
            self.wrong.append("unlocked what is not locked")
        elif not is_mapped(address, self.locked.pop(address)):
            self.wrong.append("unlocked after it was unmapped")

    def _ranges(self) -> list[tuple[int, int]]:
        return [(address, address + num_bytes) for address, num_bytes in self.locked.items()]


@pytest.mark.parametrize("seed", range(4))
def test_locked_bytes_are_those_of_the_ledger_after_every_operation(seed):
    """Any order of allocations, releases and limits."""
    driver, rng, held = Driver(), random.Random(seed), []
    tier = Tier(FAR, CPU, 60 * PAGE_BYTES, driver)
    for _ in range(150):
        if rng.random() < 0.55:
            try:
                held.append(tier.allocate(rng.choice([1, 7, 1024, 1025, 3000, 9000]), torch.float32, "param"))
            except BudgetError:
                assert tier.used_bytes > 30 * PAGE_BYTES
        elif held:
            tier.release(held.pop(rng.randrange(len(held))), keep=rng.random() < 0.7)
        if rng.random() < 0.1:
            tier.limit(rng.choice([None, 40 * PAGE_BYTES]))
        assert driver.locked_bytes == tier.reserved_bytes == tier.locked.locked_bytes <= 60 * PAGE_BYTES
    assert tier.used_bytes == sum(whole_pages(buffer.nbytes) for buffer in held) == sum(tier.used_by_kind.values())
    del held, tier
    gc.collect()
    assert driver.wrong == [] and driver.locked == {} and driver.unlocked == driver.asked > 20


def test_a_view_keeps_a_released_buffer_locked_and_mapped():
    driver = Driver()
    tier = Tier(FAR, CPU, None, driver)
    buffer = tier.allocate(3000, torch.float32, "param").fill_(3)
    view, address = buffer[100:200], buffer.data_ptr()
    tier.release(buffer, keep=False)
    del buffer
    assert driver.locked == {address: 3 * PAGE_BYTES} and view.eq(3).all()
    del view
    assert driver.locked == {} and driver.wrong == []
    assert not is_mapped(address, 3 * PAGE_BYTES)


def test_a_closed_tier_has_unlocked_all_and_its_buffers_stay_readable():
    driver = Driver()
    tier = Tier(FAR, CPU, None, driver)
    kept = tier.allocate(5000, torch.float32, "param").fill_(7)
    tier.release(tier.allocate(99, torch.float32, "grad"))
    tier.close()
    tier.close()
    assert driver.locked == {} and driver.unlocked == 2 and tier.idle_bytes == 0 and kept.eq(7).all()
    later = tier.allocate(10, torch.float32, "param").fill_(1)
    assert driver.asked == 2, "nothing would unlock it"
    del kept, later, tier
    gc.collect()
    assert driver.unlocked == 2 and driver.wrong == []


def test_a_system_that_refuses_gets_pageable_memory_and_one_warning():
    driver = Driver(3 * PAGE_BYTES)
    tier = Tier(FAR, CPU, None, driver)
    first = tier.allocate(2 * PAGE_BYTES, torch.uint8, "param")
    with pytest.warns(UserWarning, match=r"locks no more than 8192 bytes .*\(out of memory\): the rest of far is pageable"):
        second = tier.allocate(2 * PAGE_BYTES, torch.uint8, "param")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = tier.allocate(PAGE_BYTES, torch.uint8, "param")
    for number, buffer in enumerate((first, second, third)):
        assert buffer.fill_(number).eq(number).all()
    assert driver.asked == 2 and driver.locked_bytes == 2 * PAGE_BYTES and tier.used_bytes == 5 * PAGE_BYTES
    del first, second, third, buffer, tier
    gc.collect()
    assert driver.locked == {} and driver.unlocked == 1 and driver.wrong == []


def test_new_buffers_are_zeros_and_empty_ones_are_never_locked():
    driver = Driver()
    pages = LockedPages(driver)
    assert pages.allocate(0).numel() == 0 and driver.asked == 0
    assert pages.allocate(5).tolist() == [0] * 5 and driver.asked == 1


AT_EXIT = """
import sys, threading, torch
from pstar.memory.copy_queue import CopyQueue
from pstar.memory.tier import FAR, Tier

class Driver:
    def register(self, address, num_bytes):
        print("locked", num_bytes, flush=True)
    def unregister(self, address):
        print("unlocked", flush=True)

tier = Tier(FAR, torch.device("cpu"), None, Driver())
buffers = [tier.allocate(4096, torch.uint8, "param") for _ in range(2)]
queue, begun = CopyQueue("test"), threading.Event()

def copy():
    begun.set()
    stop = queue._worker.stopping
    stop.wait()                     # until the process ends
    buffers[0].fill_(1)
    print("copied", flush=True)

queue.submit(copy)
begun.wait()
"""


def test_at_the_end_of_the_process_all_is_unlocked_after_the_copy_under_way():
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=HANGS_S)
    assert run.returncode == 0 and run.stderr == ""
    assert run.stdout.split("\n") == ["locked 4096", "locked 4096", "copied", "unlocked", "unlocked", ""]


# ---------------------------------------------------------------------------------------------- CUDA's side of it

class Runtime:
    """torch with a CUDA runtime that records calls. A failed call is reported again by the next kernel, once."""

    def __init__(self, status: int = 0):
        self.calls, self.status, self.pending = [], status, False
        self.cuda = SimpleNamespace(
            cudart=lambda: self, device=lambda device: pytest.MonkeyPatch.context(),
            synchronize=lambda device: self.calls.append(("synchronize", str(device))))

    def __getattr__(self, name):
        return getattr(torch, name)

    def cudaHostRegister(self, address, num_bytes, flags):    # noqa: N802 (CUDA's names)
        self.calls.append(("register", address, num_bytes, flags))
        self.pending = self.status != 0
        return self.status

    def cudaHostUnregister(self, address):    # noqa: N802
        self.calls.append(("unregister", address))
        self.pending = self.status != 0
        return self.status

    def cudaGetErrorString(self, status):    # noqa: N802
        return "out of memory"

    def ones(self, numel, dtype, device):
        if self.pending:
            self.pending = False
            raise RuntimeError("CUDA error: out of memory")
        return torch.ones(numel, dtype=dtype)


@pytest.mark.parametrize("status", [0, 2])
def test_cuda_registers_for_all_devices_and_leaves_no_error_behind(status, monkeypatch):
    runtime, registration = Runtime(status), registration_for(torch.device("cuda:1"))
    monkeypatch.setattr(pinned, "torch", runtime)
    assert isinstance(registration, CudaRegistration) and registration_for(CPU) is None
    buffer = LockedPages(Driver()).allocate(8192)
    address = buffer.data_ptr()
    assert registration.register(address, 8192) == (None if status == 0 else "out of memory (CUDA error 2)")
    assert not runtime.pending, "the next kernel would fail for it"
    registration.unregister(address)
    assert runtime.calls == [("register", address, 8192, 1), ("synchronize", "cuda:1"), ("unregister", address)]
    assert not runtime.pending and buffer.eq(0).all()


# ---------------------------------------------------------------------------------------------- the engine and the plan

@pytest.fixture
def driver(monkeypatch) -> Driver:
    """All engines lock their far memory with it, as those with a GPU do."""
    made = Driver()
    for module in (pinned, pstar.engine):
        monkeypatch.setattr(module, "registration_for", lambda device: made)
    return made


@pytest.mark.parametrize("keys", [{"near_budget": "min"}, {"near_budget": "min", "offload_activations": True},
                                  {"near_budget": "40%", "overlap_update": True, "gradient_accumulation_steps": 2}], ids=str)
def test_an_engine_locks_its_far_tier_and_no_number_changes(keys, driver):
    losses = toy.oracle(3, num_micros=keys.get("gradient_accumulation_steps", 1))[0]
    model, optimizer = toy.build(default_chunk_size=5_000, **keys)
    assert toy.train(model, optimizer, 3, num_micros=keys.get("gradient_accumulation_steps", 1)) == losses
    assert driver.locked_bytes == model.far.reserved_bytes > model.far.used_bytes // 2 > 0 and model.near.locked is None
    model._links.drain()    # a copy for a next step keeps its buffers
    del model, optimizer
    gc.collect()
    assert driver.locked == {} and driver.unlocked == driver.asked and driver.wrong == []


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("bits", [8, 32])
def test_the_plan_counts_whole_pages_exactly(bits, micro_steps, driver):
    """A chunk of 4,096 elements fills pages in fp32; states in 8 bits, scales and small groups do not."""
    job = planner.replace(planned.JOB, micro_steps=micro_steps, state_bits=bits)
    machine = planned.one_gpu(10**7, 10**9, job).changed(host_page_bytes=PAGE_BYTES)
    plan = planner.predict(planned.TINY, machine, job, modes=("far",))
    engine = planned.trained(10**7, hybrid=False, micro_steps=micro_steps, state_bits=bits)
    assert plan.mode == "far" and plan.far_bytes == engine.far.peak_bytes
    exact = planner.predict(planned.TINY, machine.changed(host_page_bytes=1), job, modes=("far",)).far_bytes
    assert plan.far_bytes > exact or bits == 32


def test_the_least_far_budget_is_enough_and_a_byte_less_is_refused(driver):
    keys = {"near_budget": "min", "default_chunk_size": 3_000}
    with pytest.raises(BudgetError, match="give at least") as refused:
        toy.build(far_budget=1000, **keys)
    least = int(str(refused.value).split("give at least ")[1].split(",")[0])
    assert least % PAGE_BYTES == 0
    model, optimizer = toy.build(far_budget=least, **keys)
    assert toy.train(model, optimizer, 2) == toy.oracle(2)[0]
    assert model.far.peak_bytes <= least and driver.locked_bytes <= least
    with pytest.raises(BudgetError):
        toy.build(far_budget=least - 1, **keys)


def test_the_check_before_processes_start_counts_pages_for_a_gpu_only():
    keys = toy.config(near_budget="min", default_chunk_size=3_000)
    least = {device: pstar.plan_engine(toy.Toy, keys, device=device).least_far for device in ("cuda:0", "cpu", None)}
    assert least["cuda:0"] % PAGE_BYTES == 0 and least["cpu"] < least["cuda:0"]
    assert least[None] == least["cuda:0" if torch.cuda.is_available() else "cpu"]


def test_twelve_billion_parameters_lock_the_bytes_of_their_plan():
    """No page is touched. An allocator that rounds to powers of two would lock 110.9 GiB."""
    shape, machine = GptShape(40, 5120, 40, 21128, 1024), MACHINES["h200"]
    job = planner.Job(batch=32, precision="bf16")
    plan = planner.predict(shape, machine, job)
    need = planner.choose_layout(shape, job.costs, 1, plan.near_budget, job, machine.packing)[1]
    near = choose_near_states("margin", plan.layout, plan.near_budget, job.costs, "group", need, Config.prefetch)
    driver, precision = Driver(), Precision("bf16")
    tier, held = Tier(FAR, CPU, plan.far_bytes, driver), []
    for group in plan.layout.groups:
        dtypes = {"param": precision.param_dtype}
        if group.index not in near:
            dtypes |= {"grad": precision.grad_dtype(False), **precision.states}
        held += [tier.allocate(group.piece_elems, dtype, kind) for kind, dtype in dtypes.items()]
    assert plan.mode == "hybrid" and shape.num_params == 12_699_002_880
    assert driver.locked_bytes == tier.used_bytes == plan.far_bytes
    assert f"{driver.locked_bytes / 2**30:.1f}" == "80.8"
    rounded = sum(1 << (buffer.nbytes - 1).bit_length() for buffer in held)
    assert f"{rounded / 2**30:.1f}" == "110.9"
    assert Tier(NEAR, CPU).size_of(5) == 5
