"""What the simulated device promises. These tests run in a process that has loaded it (test_simulated_device.py)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest
import torch

from tests.pstar.device.simulated import Device

HERE = torch.device("cuda", 0)
N = 1000


@pytest.fixture(autouse=True)
def late(device: Device):
    device.late(True, True)
    yield
    torch.accelerator.synchronize()
    device.late(True, True)


def test_a_host_that_touches_device_memory_is_killed():
    values = torch.ones(N, device=HERE)
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        faulthandler.disable()    # its lines would be in the output of this test
        ctypes.string_at(values.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def test_host_tensors_in_an_operation_of_the_device_are_an_error():
    values = torch.ones(N, device=HERE)
    for call in (lambda: values + torch.ones(N), lambda: torch.mm(values.view(10, -1), torch.ones(100, 10)),
                 lambda: torch.cat([values, torch.ones(N)])):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()
    assert (values * torch.tensor(2.0) + 1).sum().item() == 3 * N, "numbers may be on the host"


def test_operations_give_the_bits_of_the_cpu():
    x, weight, bias, targets = torch.randn(12, 48), torch.rand(48), torch.rand(48), torch.randint(0, 48, (12,))

    def results(move) -> list[torch.Tensor]:
        a = move(x).requires_grad_()
        b = torch.nn.functional.layer_norm(a, (48,), move(weight), move(bias))
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.gelu(b) @ b.detach().t() @ b, move(targets))
        loss.backward()
        return [loss.detach().cpu(), a.grad.cpu(), (move(targets) * 2.5).cpu(), move(x)[move(targets) > 20].cpu()]

    for expected, found in zip(results(lambda t: t.clone()), results(lambda t: t.to(HERE)), strict=True):
        assert torch.equal(expected, found) and expected.dtype == found.dtype


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("late_one", ["default", "others"])
def test_a_missing_wait_between_streams_shows_in_the_numbers(device, waits, late_one):
    """The late stream writes what the other one reads."""
    device.late(late_one == "default", late_one == "others")
    other, source, target = torch.Stream(HERE), torch.zeros(N, device=HERE), torch.zeros(N, device=HERE)
    torch.accelerator.synchronize()
    writer, reader = (torch.accelerator.current_stream(), other)[:: 1 if late_one == "default" else -1]
    with writer:
        source.fill_(7)
        written = torch.Event(HERE)
        written.record()
    with reader:
        if waits:
            reader.wait_event(written)
        target.copy_(source)
    reader.synchronize()
    assert target.cpu().eq(7 if waits else 0).all()


def test_memory_is_counted_and_its_end_is_an_error(device):
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    kept = torch.empty(1000, dtype=torch.uint8, device=HERE)
    more = torch.empty(5000, dtype=torch.uint8, device=HERE)
    assert torch.accelerator.memory_allocated() - before == 1024 + 5120, "rounded to 512 bytes"
    del more
    assert torch.accelerator.memory_allocated() - before == 1024
    assert torch.accelerator.max_memory_allocated() - before == 1024 + 5120
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**30, dtype=torch.uint8, device=HERE)
    assert kept.numel() == 1000


def test_memory_that_nobody_has_written_holds_nan():
    first = torch.ones(N, device=HERE)
    del first
    assert torch.empty(N, device=HERE).cpu().isnan().all()


def test_memory_freed_last_is_taken_first():
    """A missing wait before memory is freed shows only in its next user."""
    held = [torch.empty(N, device=HERE) for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in held]
    for number in (1, 0, 2):
        held[number] = None
    again = [torch.empty(N, device=HERE) for _ in range(3)]
    assert [tensor.data_ptr() for tensor in again] == [addresses[number] for number in (2, 0, 1)]


def test_pinned_memory_is_rounded_up_and_kept_until_its_copy_has_ended(device):
    before = device.counts()["pinned_bytes"]
    host = torch.ones(3 * 2**20 // 4, pin_memory=True)
    assert host.is_pinned() and not torch.ones(3).is_pinned()
    assert device.counts()["pinned_bytes"] - before == 4 * 2**20
    target = host.to(HERE, non_blocking=True)
    del host
    again = torch.zeros(3 * 2**20 // 4, pin_memory=True)
    assert device.counts()["pinned_bytes"] - before == 8 * 2**20, "the copy still reads the first"
    assert target.cpu().eq(1).all() and again.eq(0).all()
    third = torch.empty(3 * 2**20 // 4, pin_memory=True)
    assert third.is_pinned() and device.counts()["pinned_bytes"] - before == 8 * 2**20, "now the first is used again"


def test_registered_memory_is_pinned_until_it_is_unregistered(device):
    memory = torch.ones(N)
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0 and memory.is_pinned()
    target = memory.to(HERE, non_blocking=True)
    assert runtime.cudaHostUnregister(memory.data_ptr()) != 0, "a copy reads it"
    assert target.cpu().eq(1).all()
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 0 and not memory.is_pinned()
