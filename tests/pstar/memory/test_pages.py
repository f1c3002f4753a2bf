"""Too little host memory is one line that says what to do: before the start, when a buffer is made, and in training."""

from __future__ import annotations

import re

import pytest
import torch

import pstar.engine
from pstar.errors import BudgetError
from pstar.memory import pages
from pstar.memory.pages import free_host_bytes
from pstar.memory.tier import FAR, Tier, format_bytes
from tests import toy

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    600 kB\nSwapFree:         50 kB\nHugePages_Total:       0\n"
GROUPS = {
    "none": {},
    "version 2, no limit": {"memory.max": "max", "memory.current": "1"},
    "version 2": {"memory.max": "300000", "memory.current": "250000", "memory.stat": "anon 9\ninactive_file 40000\n"},
    "version 2, full": {"memory.max": "300000", "memory.current": "300001", "memory.stat": "anon 9\n"},
    "version 1": {"memory/memory.limit_in_bytes": "400000", "memory/memory.usage_in_bytes": "100000"},
    "version 2, a job": {"slurm/job_7/memory.max": "350000", "slurm/job_7/memory.current": "100000", "memory.max": "max"},
    "version 1, no limit": {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "100000"},
}


@pytest.mark.parametrize("group, free", list(zip(GROUPS, (665600, 665600, 90000, 0, 300000, 250000, 665600),
                                                 strict=True)))
def test_free_memory_is_what_the_system_and_the_control_group_leave(group, free, tmp_path):
    files = {f"sys/fs/cgroup/{name}": text for name, text in GROUPS[group].items()}
    files |= {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/slurm/job_7\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path) == free


def test_a_system_that_does_not_say_is_not_asked_again(tmp_path, monkeypatch):
    assert free_host_bytes(tmp_path) is None
    monkeypatch.setattr(pstar.engine, "free_host_bytes", lambda: None)
    toy.build(near_budget="min")


def test_a_model_that_needs_more_than_is_free_is_refused_before_any_chunk_is_made(monkeypatch):
    model, _ = toy.build(near_budget="min")
    least = model._plan.least_far
    assert 4 * model.model_data_bytes == 3 * least, "gradients come later"
    monkeypatch.setattr(pstar.engine, "free_host_bytes", lambda: least)
    toy.build(near_budget="min")
    monkeypatch.setattr(pstar.engine, "free_host_bytes", lambda: least - 1)
    monkeypatch.setattr(Tier, "allocate", lambda *_: pytest.fail("a chunk was made"))
    line = rf"host memory: 1 process\(es\) on \S+ need {re.escape(format_bytes(least))} for far, .* are free: give a far"
    with pytest.raises(BudgetError, match=line):
        toy.build(near_budget="min")


def case(rank: int, num_ranks: int) -> str:
    """Both ranks are on one machine, which has room for one of them, and tells only one of them so."""
    patches = pytest.MonkeyPatch()
    free = toy.build(near_budget="min")[0]._plan.least_far * 3 // 2
    with patches.context() as patch:
        patch.setattr(pstar.engine, "free_host_bytes", lambda: free if rank == 0 else None)
        try:
            toy.build(near_budget="min")
        except BudgetError as error:
            return str(error)
    return ""


def test_all_ranks_of_a_machine_count_and_all_get_the_error(ranks):
    first, second = ranks(2).run(case)
    assert first == second and first.startswith("host memory: 2 process(es) on ")


@pytest.mark.parametrize("num_bytes, error", [(2**20, OSError(12, "Cannot allocate memory")),
                                              (100, RuntimeError("DefaultCPUAllocator: can't allocate memory: 100 bytes")),
                                              (100, MemoryError())], ids=repr)
def test_a_buffer_that_the_system_refuses_is_one_line(num_bytes, error, monkeypatch):
    tier = Tier(FAR, torch.device("cpu"))
    kept = tier.allocate(4096, torch.uint8, "param")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(pages.Pages, "__new__", refuse)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(BudgetError, match=r"^far: the system has no .* of host memory for grad, with 4 KiB in far: give"):
        tier.allocate(num_bytes, torch.uint8, "grad")
    assert tier.used_bytes == 4096
    tier.release(kept)


def test_other_errors_of_an_allocation_stay_what_they_are(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("another bug")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(RuntimeError, match="another bug"):
        Tier(FAR, torch.device("cpu")).allocate(10, torch.uint8, "grad")


class Greedy(toy.Toy):
    """Asks torch for a pebibyte; torch's own message is the oracle."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        torch.empty(2**50, dtype=torch.uint8)
        return super().forward(inputs, targets)


def test_a_forward_without_host_memory_is_one_line_and_the_engine_goes_on():
    model, optimizer = toy.build(Greedy, near_budget="min")
    with pytest.raises(BudgetError, match=r"^host memory is full, with .* of chunks in far: give a far_budget") as refused:
        model(*toy.batch(0))
    assert "\n" not in str(refused.value)
    model.module.__class__ = toy.Toy
    assert toy.train(model, optimizer, 2) == toy.oracle(2)[0]
