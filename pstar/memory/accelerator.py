"""The accelerator of this process: whatever torch.accelerator finds (CUDA, ROCm, XPU), by functions that all of them have.

torch.accelerator of torch 2.11 to 2.13 has memory statistics, current_stream, synchronize and empty_cache. Three things it
lacks are here: its free memory, its random generator, and events on which the host sleeps (torch.Event takes blocking=True
and ignores it). torch.cuda and torch.xpu have them under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from pstar.errors import ConfigError

CPU = torch.device("cpu")
WITHOUT_STREAMS = ("mps",)
"""Accelerators that share the host's memory and have no streams: near is host memory there."""


def near_device(local_rank: int | None = 0) -> torch.device:
    """The accelerator of this number, of any number (None: "cuda"), or the CPU if there is none that pstar can use.

    Raises ConfigError if there are accelerators, but none of this number.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type in WITHOUT_STREAMS:
        return CPU
    if local_rank is None:
        return torch.device(found.type)
    if local_rank >= (count := torch.accelerator.device_count()):
        raise ConfigError(f"local_rank is {local_rank}, and this process sees {count} {found.type} device(s), counted from "
                          "0: start one process for each device of the machine; where each process sees only its own "
                          "device, give local_rank=0")
    return torch.device(found.type, local_rank)


def is_accelerator(device: torch.device | None) -> bool:
    """Whether the device has memory and streams of its own."""
    return device is not None and device.type != "cpu"


def module_of(device: torch.device) -> ModuleType:
    """torch.cuda for CUDA and ROCm, torch.xpu for XPU."""
    return torch.get_device_module(device)


def free_bytes(device: torch.device) -> int:
    """Bytes of the accelerator that this process can have: the free ones, and those that torch's allocator keeps unused."""
    module = module_of(device)
    return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread's kernels run."""
    return module_of(device).current_stream(device)


class Event(Protocol):
    """torch.cuda.Event and torch.xpu.Event."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Event) -> float: ...


def event(device: torch.device, timed: bool = False, sleeping: bool = False) -> Event:
    """An event. timed: elapsed_time may use it. sleeping: its synchronize() lets the host sleep instead of spinning on a
    core, where the accelerator can."""
    options = {"blocking": True} if sleeping and device.type == "cuda" else {}
    return module_of(device).Event(enable_timing=timed, **options)


def empty_caches() -> None:
    """Returns unused memory of the accelerator, and unused page-locked host memory (torch 2.11 keeps the latter)."""
    torch.accelerator.empty_cache()
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def random_state(device: torch.device) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """How to get and how to put the state of the accelerator's random generator."""
    module = module_of(device)
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)
