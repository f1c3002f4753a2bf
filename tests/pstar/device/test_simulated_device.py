"""The engine on a simulated CUDA device: numbers equal the CPU's, however late the streams are; each removed wait is found.

Each test here is one program that runs many tests (plugin.py): the device changes torch for the whole process. The programs
run the files inside_*.py, and tests of the engine that were written for the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.limits import HANGS_S
from tests.pstar.device import simulated

pytestmark = pytest.mark.deep
ROOT = Path(__file__).resolve().parents[3]
INSIDE = "tests/pstar/device/inside_{}.py"
LATE = ("default", "others", "default,others")


@dataclass(frozen=True)
class Program:
    """Files of tests, how late the streams are, and how many tests must pass."""

    name: str
    files: tuple[str, ...]
    at_least: int
    late: str = "default,others"
    without: tuple[str, ...] = ()
    """Tests that are left out: names, as `LEFT_OUT` explains them."""

    def __str__(self) -> str:
        return self.name


LEFT_OUT: dict[str, tuple[str, ...]] = {}
"""Why tests of the CPU cannot run on the device: a reason, and the names of the tests."""

ENGINE = ("tests/pstar/test_placement.py",)
PROGRAMS = (
    Program("the device itself", (INSIDE.format("device"),), 11),
    Program("code for accelerators", (INSIDE.format("engine"),), 10),
    Program("counts of a step", (INSIDE.format("counts"),), 3),
    Program("each wait removed", (INSIDE.format("mutations"),), 13),
)


@pytest.fixture(scope="session")
def library() -> Path:
    try:
        return simulated.build()
    except simulated.Unavailable as error:
        pytest.skip(f"no simulated device: {error}")


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_on_the_simulated_device(program: Program, library, tmp_path):
    report = tmp_path / "report.json"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TESTS_"))}
    env |= {"SIMULATED_DEVICE": str(library), "SIMULATED_LATE": program.late, "SIMULATED_REPORT": str(report),
            "OMP_NUM_THREADS": "1"}
    left_out = [name for names in LEFT_OUT.values() for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "tests.pstar.device.plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
               "-q", "--tb=short", "--show-capture=no", "-m", "not deep",
               *(f"--deselect={name}" for name in left_out), *program.files]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=10 * HANGS_S)
    assert report.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    outcomes = Counter(json.loads(report.read_text()).values())
    assert run.returncode == 0 and outcomes["failed"] == 0, run.stdout[-6000:]
    assert outcomes["passed"] >= program.at_least, outcomes
