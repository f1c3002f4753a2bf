"""A pytest plugin: the tests of this process run on the simulated device (test_simulated_device.py starts such processes).

    SIMULATED_DEVICE=library.so SIMULATED_LATE=default,others python -m pytest -p tests.pstar.device.plugin tests/pstar/...

Tests were written for the CPU. On a GPU the user moves inputs there; here the engine's forward moves them. The outcomes are
written to $SIMULATED_REPORT.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.pstar.device import simulated

DEVICE = simulated.load(Path(os.environ["SIMULATED_DEVICE"]))
_LATE = os.environ["SIMULATED_LATE"].split(",")
DEVICE.late(default="default" in _LATE, others="others" in _LATE)

import torch  # noqa: E402  (after the device)
from torch.utils._pytree import tree_map  # noqa: E402

import pstar.engine  # noqa: E402
from tests import program_models  # noqa: E402

# The device has no kernels for a GRU and for batch norm in training.
program_models.KINDS = tuple(kind for kind in program_models.KINDS
                             if kind not in (program_models.Recurrent, program_models.Statistics))  # fmt: skip

_forward = pstar.engine.Engine.forward
_outcomes: dict[str, str] = {}


def _to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _forward_with_inputs_moved(self: pstar.Engine, *args: Any, **keys: Any) -> Any:
    args, keys = tree_map(lambda value: _to_device(value, self.device), (args, keys))
    return _forward(self, *args, **keys)


pstar.engine.Engine.forward = _forward_with_inputs_moved


@pytest.fixture
def device() -> simulated.Device:
    """The simulated device of this process."""
    return DEVICE


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    if path := os.environ.get("SIMULATED_REPORT"):
        Path(path).write_text(json.dumps(_outcomes))
