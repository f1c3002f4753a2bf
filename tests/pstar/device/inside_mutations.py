"""Each wait of the engine is needed: without it, numbers on the simulated device are wrong, or a task fails.

These tests run in a process that has loaded the device (test_simulated_device.py). The list of waits is that of the recorder
of happens-before (tests/pstar/memory/test_happens_before.py), so a new wait is tested here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from pstar.memory.copy_queue import Handle
from pstar.memory.links import Links
from tests import toy
from tests.pstar.device.simulated import Device
from tests.pstar.memory.test_happens_before import DROPPED_COPY, WAITS, Wait, mutate

STEPS = 4
LATENESS = ((True, False, False), (False, True, False), (True, True, False), (False, False, True))
"""(default stream, other streams, updates on the host). A thread of the host may get no processor for a while; on some
machines it always gets one at once."""

HOST_LATE_S = 0.01
ATTEMPTS = 3

UNSEEN: dict[str, str] = {}
"""Waits without which the device gives the right numbers, by their text, each with the reason."""


def train(folder, wait: Wait | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    keys = dict(wait.keys) if wait else {"near_budget": "min"}
    if "disk" in keys:
        keys |= {"disk_path": str(folder), "far_budget": keys.pop("disk")}
    num_micros = keys.get("gradient_accumulation_steps", 1)
    model, optimizer = toy.build(**{"default_chunk_size": 5_000} | keys)
    losses = toy.train(model, optimizer, STEPS, num_micros=num_micros)
    return losses, model.gather_state()[0]


def is_right(folder, wait: Wait | None) -> bool:
    """Whether the numbers are those of plain PyTorch on the CPU."""
    num_micros = dict(wait.keys).get("gradient_accumulation_steps", 1) if wait else 1
    losses, weights, _ = toy.oracle(STEPS, num_micros)
    try:
        found, state = train(folder, wait)
    except Exception:    # a task that reads memory too early may also fail
        return False
    finally:
        torch.accelerator.synchronize()
    return found == losses and all(torch.equal(state[name], weight) for name, weight in weights.items())


@pytest.fixture
def late(device: Device, monkeypatch) -> Callable[[bool, bool, bool], None]:
    """Makes the streams and the updates on the host late, or not."""
    update, pause_s = Links.update, 0.0

    def update_late(links: Links, job: Callable[[], object], *more: object) -> Handle:
        def run() -> object:
            time.sleep(pause_s)
            return job()

        return update(links, run, *more)

    def choose(default: bool, others: bool, host: bool) -> None:
        nonlocal pause_s
        device.late(default, others)
        pause_s = HOST_LATE_S if host else 0.0

    monkeypatch.setattr(Links, "update", update_late)
    return choose


@pytest.mark.filterwarnings("ignore")    # gradients that are not finite
@pytest.mark.parametrize("wait", [wait for wait in (*WAITS, DROPPED_COPY) if str(wait) not in UNSEEN], ids=str)
def test_a_removed_wait_gives_wrong_numbers(wait: Wait, late: Callable[[bool, bool, bool], None], tmp_path, monkeypatch):
    for number, who in enumerate(LATENESS):
        late(*who)
        assert is_right(tmp_path / f"right{number}", wait), "with the wait"
    mutate(monkeypatch, wait)
    for attempt, who in enumerate(LATENESS * ATTEMPTS):    # threads of the host have a timing of their own
        late(*who)
        if not is_right(tmp_path / f"wrong{attempt}", wait):
            return
    pytest.fail("without it the numbers are right: the wait is not needed, or UNSEEN needs the reason")


def test_the_reasons_are_of_waits_that_are_there():
    assert set(UNSEEN) <= set(map(str, WAITS))
