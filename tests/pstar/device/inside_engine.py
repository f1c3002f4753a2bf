"""The engine's code for accelerators, line by line: tests that a CPU cannot run.

These tests run in a process that has loaded the simulated device (test_simulated_device.py).
"""

from __future__ import annotations

import gc

import pytest
import torch

import pstar
from pstar.layout.budget import default_near_bytes
from pstar.memory import accelerator
from pstar.memory.links import Links
from pstar.memory.tier import FAR
from pstar.planner.speeds import measure_here
from tests import toy
from tests.pstar.chunks import test_activations as acts
from tests.pstar.device.simulated import PROPERTIES, Device

STEPS = 4


@pytest.fixture(autouse=True)
def no_engine_of_another_test():
    """An engine is in reference cycles; if it is freed while a test measures memory, the test counts too little."""
    gc.collect()


def test_near_is_the_accelerator_and_far_is_pinned():
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    assert accelerator.near_device(0) == torch.device("cuda", 0) and accelerator.near_device(None) == torch.device("cuda")
    assert model.device == model.near.device == torch.device("cuda", 0)
    assert toy.train(model, optimizer, STEPS) == toy.oracle(STEPS)[0]
    far = [block.copies[FAR] for block in model._store.blocks.values() if FAR in block.copies]
    assert far and model.far.locked.locked_bytes == model.far.reserved_bytes


@pytest.mark.parametrize("keys", [{"near_budget": "min"}, {"near_budget": "60%", "far_states": "stream"}, {},
                                  {"near_budget": "min", "bf16": {"enabled": True}}], ids=str)
def test_the_programs_default_device_is_not_far(keys: dict):
    """torch.set_default_device("cuda") is the first line of many programs."""
    def losses_of() -> list[float]:
        model, optimizer = toy.build(default_chunk_size=5_000, **keys)
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = model(inputs, targets)
            model.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    batches = [tuple(part.to("cuda") for part in toy.batch(step)) for step in range(STEPS)]
    expected = losses_of()
    torch.set_default_device("cuda")
    try:
        assert losses_of() == expected
    finally:
        torch.set_default_device(None)


def test_the_launcher_says_which_device_is_near(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(pstar.ConfigError, match=r"^local_rank is 1, and this process sees 1 cuda device\(s\)"):
        pstar.initialize_engine(toy.Toy)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert pstar.initialize_engine(toy.Toy)[0].device == torch.device("cuda", 0)


def test_without_a_budget_near_is_a_part_of_the_accelerators_free_memory():
    kept = torch.ones(2**24, device="cuda")
    free = accelerator.free_bytes(kept.device)
    assert free == PROPERTIES.total_memory - torch.accelerator.memory_allocated() <= PROPERTIES.total_memory - kept.nbytes
    model, _ = toy.build()
    assert model.near.budget_bytes == default_near_bytes([free])


def activation_bytes() -> int:
    """The most bytes of activations in the first step, as the engine measures them."""
    model, optimizer = toy.build(near_memory="2500KiB", default_chunk_size=5_000)
    toy.train(model, optimizer, 1)
    return model._chunks.room._largest_peak


def test_another_engine_that_is_alive_is_no_activation():
    alone = activation_bytes()
    gc.collect()
    other, _ = toy.build(near_budget="100%")
    toy.train(other, _, 1)
    kept = torch.ones(2**20, device=other.device)
    assert other.near.used_bytes > 500_000 < kept.nbytes
    assert activation_bytes() == alone > 500_000


def test_all_speeds_are_measured_on_the_accelerator(device: Device):
    device.total_bytes(2**32)
    speeds = measure_here("fp32")
    device.total_bytes(PROPERTIES.total_memory)
    assert min(speeds.link_bytes_per_s, speeds.gpu_memory_bytes_per_s, speeds.host_adam_params_per_s) > 0


def test_a_checkpoint_holds_the_accelerators_random_state(tmp_path):
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 2)
    torch.manual_seed(7)
    before = torch.cuda.get_rng_state(0)
    model.save_checkpoint(tmp_path / "checkpoint")
    expected = toy.train(model, optimizer, 2, first=2)
    torch.manual_seed(8)
    model, optimizer = toy.build(near_budget="50%")
    model.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(torch.cuda.get_rng_state(0), before)
    assert toy.train(model, optimizer, 2, first=2) == expected == toy.oracle(4)[0][2:]


def test_out_of_memory_says_what_to_do(device: Device):
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 1)
    device.total_bytes(torch.accelerator.memory_allocated() + 2**17)
    with pytest.raises(pstar.BudgetError, match="cuda:0: out of memory .* give a smaller near_budget"):
        toy.train(model, optimizer, 1)
    device.total_bytes(PROPERTIES.total_memory)


@pytest.mark.parametrize("default, others", [(True, False), (False, True), (True, True)])
def test_activations_that_wait_in_far_change_no_number(default, others, device: Device):
    expected, _ = acts.plain(None, 1)
    device.late(default, others)
    model, optimizer = acts.build(None, near_budget="min", offload_activations=True)
    losses = []
    for step in range(acts.STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(acts.tokens(10 * step))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    device.late(True, True)
    assert losses == expected and model.far.peak_bytes > model.far.used_bytes


def test_links_of_a_device_copy_on_streams_of_their_own():
    """The copy to near waits for the stream on which its target is still read."""
    links, device = Links(device=torch.device("cuda", 0)), torch.device("cuda", 0)
    near, far, other = torch.zeros(100, device=device), torch.ones(100, pin_memory=True), torch.Stream(device)
    torch.accelerator.synchronize()
    with other:
        read = near + 1
        links.submit("far", "near", lambda: links.copy(near, far), far.nbytes).wait()
    other.synchronize()
    assert read.cpu().eq(1).all() and near.cpu().eq(1).all()
    links.close()
