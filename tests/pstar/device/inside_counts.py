"""What one training step costs on a device, in counts that do not depend on the machine's speed.

These tests run in a process that has loaded the simulated device (test_simulated_device.py). The toy has 3 layers; near
holds the least, so parameters come and gradients leave all the time. To lower a limit, lower its number.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from pstar.memory.copy_queue import Handle
from tests import toy
from tests.pstar.device.simulated import Device
from tests.pstar.python_calls import PythonCalls

STEPS = 4
STAGES = ("forward", "backward", "update")
LIMITS = {
    "device waits of forward": 0,
    "device waits of backward": 0,
    "device waits of update": 25,
    "handle waits of forward": 0,
    "handle waits of backward": 0,
    "handle waits of update": 22,
    "device waits of all threads": 34,
    "operations": 1198,
    "copies in": 16,
    "copies out": 10,
    "copies inside": 105,
    "python calls": 8_447,
    "pinned bytes": 1_130_496,
}
"""Of one step, after the trace is known. A device wait: the program's thread waits for a stream, an event or a number. A
handle wait: it waits for a copy, done or not; no copy ends before somebody waits for it, for the streams are late. Python
calls: of pstar's functions, in the program's thread. Pinned bytes: at the end, rounded to whole pages by the engine."""


class Waits:
    """Counts the handles for which threads other than the workers wait."""

    def __init__(self, patches: pytest.MonkeyPatch):
        self.num = 0
        original = Handle._wait_for_end

        def counted(handle: Handle) -> None:
            self.num += not threading.current_thread().name.startswith("pstar copy queue")
            original(handle)

        patches.setattr(Handle, "_wait_for_end", counted)


def measured(device: Device, patches: pytest.MonkeyPatch, **keys) -> Counter[str]:
    """The counts of the last of some steps."""
    model, optimizer = toy.build(**{"near_budget": "min", "default_chunk_size": 5_000} | keys)
    waits, thread, loss = Waits(patches), threading.get_native_id(), None
    found: Counter[str] = Counter()
    for step in range(STEPS):
        found.clear()
        calls = PythonCalls()
        inputs, targets = (tensor.to(model.device) for tensor in toy.batch(step))
        torch.accelerator.synchronize()
        before = device.counts()
        for stage in STAGES:
            device_waits, handle_waits = device.waits_of(thread), waits.num
            with calls, torch.autograd.set_multithreading_enabled(False):    # backward in this thread
                if stage == "forward":
                    optimizer.zero_grad()
                    loss = model(inputs, targets)
                elif stage == "backward":
                    model.backward(loss)
                else:
                    optimizer.step()
            found[f"device waits of {stage}"] = device.waits_of(thread) - device_waits
            found[f"handle waits of {stage}"] = waits.num - handle_waits
        model._links.drain()
        after = device.counts()
    found["python calls"] = calls.num
    found["device waits of all threads"] = after["waits"] - before["waits"]
    found["operations"] = after["kernels"] - before["kernels"]
    for way in ("in", "out", "inside"):
        found[f"copies {way}"] = after[f"copies_{way}"] - before[f"copies_{way}"]
    found["pinned bytes"] = after["pinned_bytes"]
    return found


def test_a_step_costs_no_more_than_its_limits(device, monkeypatch):
    """Run first in its process: pinned bytes are those of all engines."""
    found = measured(device, monkeypatch)
    over = {name: (found[name], most) for name, most in LIMITS.items() if found[name] > most}
    assert not over, f"(found, limit): {over}"


def test_the_counts_are_the_same_in_every_run(device, monkeypatch):
    tables = [measured(device, monkeypatch) for _ in range(2)]
    for table in tables:
        del table["pinned bytes"]
    assert tables[0] == tables[1] and tables[0]["operations"] > 100


def test_a_wait_more_is_counted(device, monkeypatch):
    """An engine that waited for the device before each copy would be over the limits."""
    from pstar.memory.links import Links

    submit = Links.submit

    def slow(*args) -> Handle:
        torch.accelerator.synchronize()
        return submit(*args)

    as_it_is = measured(device, monkeypatch)
    monkeypatch.setattr(Links, "submit", slow)
    with_waits = measured(device, monkeypatch)
    assert all(with_waits[f"device waits of {stage}"] > as_it_is[f"device waits of {stage}"] for stage in STAGES[:2])
