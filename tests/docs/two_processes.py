"""Programs of the engine's page on two processes against one at the same global batch. They print a line "losses [...]",
and rank 0 writes model.safetensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.docs.pages import ROOT


def losses_of_program(program: str, command: list[str], folder: Path) -> list[float]:
    folder.mkdir()
    (folder / "tune.py").write_text(program)
    done = subprocess.run([*command, "tune.py"], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return json.loads(re.search(r"^losses (.*)$", done.stdout, re.MULTILINE).group(1))


def assert_two_processes_follow_one(for_two: str, for_one: str, folder: Path) -> None:
    """Tolerance: the sums have another order, as in tests/pstar/test_engine_ranks.py."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = losses_of_program(for_two, [sys.executable, *torchrun], folder / "two")
    one = losses_of_program(for_one, [sys.executable], folder / "one")
    assert two == pytest.approx(one, rel=1e-5) and two[-1] < two[0]
    found, expected = (load_file(folder / name / "model.safetensors") for name in ("two", "one"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)
