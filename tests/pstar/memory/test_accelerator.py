"""Near is whatever torch.accelerator finds; one file and the CUDA kernels know of CUDA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import pstar
from pstar.memory import accelerator

PSTAR = Path(pstar.__file__).parent


@pytest.mark.parametrize("found, expected", [("cuda", "cuda:1"), ("xpu", "xpu:1"), ("mps", "cpu"), (None, "cpu")])
def test_near_is_an_accelerator_with_streams_or_the_host(found, expected, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found and torch.device(found))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    near = accelerator.near_device(1)
    assert near == torch.device(expected) and accelerator.is_accelerator(near) == (expected != "cpu")
    assert accelerator.near_device(None) == torch.device(expected.split(":")[0])
    assert not accelerator.is_accelerator(None)
    if expected != "cpu":
        with pytest.raises(pstar.ConfigError, match=rf"^local_rank is 2, and this process sees 2 {found} device\(s\)"):
            accelerator.near_device(2)


SAY_CUDA = {"memory/accelerator.py", "memory/pinned.py", "memory/segments.py"}
"""Besides the kernels: what torch.accelerator lacks; page-locking by CUDA's runtime; settings of CUDA's allocator."""


def test_only_named_files_and_the_kernels_say_cuda():
    """Code for all accelerators asks torch.accelerator, or `accelerator.py` for what it lacks."""
    says_cuda = re.compile(r"""torch\.cuda|["']cuda""")
    files = {path.relative_to(PSTAR).as_posix() for path in PSTAR.rglob("*.py") if says_cuda.search(path.read_text())}
    assert {name for name in files if not name.startswith("kernels/")} <= SAY_CUDA
