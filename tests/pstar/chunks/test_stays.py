"""Where nothing ever leaves near, modules have no hooks that report what is in use: the bits stay the same."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import pstar
from tests import toy
from tests.harness.program import run_forked

SILENT, TOLD = {}, {"near_budget": "min"}
OTHERS = {"near_memory": "1GiB"}, {"offload_activations": True}, {"optimizer": {"params": {"use_hybrid_adam": False}}}


def hooked(model: pstar.Engine) -> bool:
    return any(child._forward_pre_hooks for child in model.module.modules())


@pytest.mark.parametrize("config, silent", [(SILENT, True), (TOLD, False), *((config, False) for config in OTHERS)])
def test_modules_have_hooks_only_where_something_may_leave(config, silent):
    model, _ = toy.build(toy.Toy, **config)
    assert hooked(model) is not silent


def test_evaluation_saving_and_loading_in_between_change_no_bit():
    silent, told = toy.build(toy.Toy, **SILENT), toy.build(toy.Toy, **TOLD)
    inputs, _ = toy.batch(9)
    assert toy.train(*silent, 3) == toy.train(*told, 3)
    with torch.no_grad():    # before the first step, and after a load, parameters may be far
        assert torch.equal(silent[0](inputs), told[0](inputs))
    kept = told[0].gather_state()
    assert toy.train(*silent, 2, first=3) == toy.train(*told, 2, first=3)
    fresh, optimizer = toy.build(toy.Toy, **SILENT)
    fresh.load_state(*kept)
    told[0].load_state(*kept)
    with torch.no_grad():
        assert torch.equal(fresh(inputs), told[0](inputs))
    assert toy.train(fresh, optimizer, 3, first=3) == toy.train(*told, 3, first=3)
    for name, param in told[0].gather_state()[0].items():
        assert torch.equal(fresh.gather_state()[0][name], param)


TEAMS = """
import os, torch
from pstar.kernels import BlockCodes
from pstar.memory.links import Links
torch.set_num_threads(2)
a, b, codes = torch.ones(2**22), torch.zeros(2**22), BlockCodes(4)
frozen = torch.zeros(2**22)
a.add_(1)
before, links = len(os.listdir("/proc/self/task")), Links()
for target, source in ((b, a), (a.bfloat16(), b.bfloat16())):
    links.submit("far", "near", lambda: {copy}, 2**24).wait()
assert b.eq(2).all()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("copy, more", [("links.copy(target, source)", 1), ("target.copy_(source)", 2),
                                        ("(links.copy(target, source), codes.decode_tail(frozen))", 1)])
def test_a_copy_in_the_background_brings_no_team_of_threads(copy, more, tmp_path):
    """The copy adds one thread, the worker's; torch's copy_ would add a second one, as the second case shows. Nor
    does a worker that decodes frozen weights."""
    (tmp_path / "program.py").write_text(TEAMS.format(copy=copy))
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    status, said = run_forked([sys.executable, str(tmp_path / "program.py")], environment)
    assert status == 0, said
    assert int(said) == more
