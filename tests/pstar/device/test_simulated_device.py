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


@dataclass(frozen=True)
class Program:
    """Files of tests, how late the streams are, how many tests must pass, pytest's -k and -m."""

    name: str
    files: tuple[str, ...]
    at_least: int
    late: str = "default,others"
    select: str = ""
    marks: str = "not deep"

    def __str__(self) -> str:
        return self.name


ACTIVATION_PEAK = "tests/pstar/memory/test_activation_peak.py"
LEFT_OUT = {
    "on a device autograd runs backward in a thread of its own": (
        "tests/pstar/memory/test_copy_queue.py::"
        "test_without_a_gpu_autograd_runs_backward_in_the_callers_thread_and_copies_are_submitted_there",),
    "LiveBytes counts host memory only": (
        f"{ACTIVATION_PEAK}::test_of_an_engine_a_step_is_counted_and_no_number_changes",
        f"{ACTIVATION_PEAK}::test_compiled_modules_stay_compiled"),
    "it counts bytes by hand, without a device's whole pages and aligned slots": (
        "tests/pstar/test_engine.py::test_bytes_per_parameter_to_the_byte",
        "tests/pstar/test_engine.py::test_a_budget_too_small_names_the_module_and_the_smallest_that_would_do"),
    "AllocatorPeak is not exact while chunks move: the room for chunks differs a little": (
        "tests/pstar/test_placement.py::test_looking_ahead_moves_nothing_more[{'near_memory'",),
    "it watches the program's thread, and backward on a device has a thread of its own": (
        "tests/pstar/chunks/test_step.py::test_the_way_of_one_parameter_is_told_in_the_order_of_the_calls",),
}
"""Tests of the CPU that cannot hold on a device, by the reason."""

PLACEMENT = ("tests/pstar/test_placement.py",)
ENGINE = ("tests/pstar/test_engine.py", "tests/pstar/optim/test_state_bits.py")
CHUNKS = ("tests/pstar/chunks/test_step.py", "tests/pstar/chunks/test_stays.py")
"""Without test_prefetch.py, which holds copies back in the worker's thread: on a device the program issues them itself."""
MEMORY = ("tests/pstar/memory/test_tiers.py", "tests/pstar/memory/test_copy_queue.py", ACTIVATION_PEAK)
STREAMS = "near_filled or near_memory or streamed"
PROGRAMS = (
    Program("the device itself", (INSIDE.format("device"),), 11),
    Program("code for accelerators", (INSIDE.format("engine"),), 10),
    Program("counts of a step", (INSIDE.format("counts"),), 3),
    Program("each wait removed", (INSIDE.format("mutations"),), 13),
    Program("engine, all streams late", ENGINE, 70, select="not the_curve_of_fp32_states", marks=""),
    Program("chunks, all streams late", CHUNKS, 8),
    Program("updates during backward, all streams late", ("tests/pstar/optim/test_speculative.py",), 9,
            select="2-2-min-fp32 or between"),
    Program("memory, all streams late", MEMORY, 40, marks=""),
    Program("random programs, all streams late", ("tests/pstar/test_programs.py",), 3, select="twenty"),
    Program("placement, all streams late", PLACEMENT, 30, select="never_changes_a_number", marks=""),
    Program("placement, the default stream late", PLACEMENT, 15, "default", STREAMS, ""),
    Program("placement, other streams late", PLACEMENT, 15, "others", STREAMS, ""),
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
               "-q", "--tb=short", "--show-capture=no", "-m", program.marks, "-k", program.select,
               *(f"--deselect={name}" for name in left_out), *program.files]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2 * HANGS_S)
    assert report.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    outcomes = Counter(json.loads(report.read_text()).values())
    assert run.returncode == 0 and outcomes["failed"] == 0, run.stdout[-6000:]
    assert outcomes["passed"] >= program.at_least, outcomes
