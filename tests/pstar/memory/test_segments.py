"""Segments that grow are set before CUDA starts and never over the user; reserved bytes are compared with near_memory."""

from __future__ import annotations

import os

import pytest
import torch

import pstar
from pstar.memory import segments
from tests import toy

NAMES = (segments.SETTING, *segments.OLDER)


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_segments_grow_where_nothing_is_set_and_cuda_has_not_started():
    assert segments.grow_segments() and segments.grow_segments()
    assert settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_of_the_users_own_stays_alone(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not segments.grow_segments()
    assert settings() == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize("error", [None, RuntimeError, AttributeError])
def test_after_cuda_has_started_torch_is_told(error, monkeypatch):
    told = []

    def tell(setting: str) -> None:
        told.append(setting)
        if error is not None:
            raise error("this allocator cannot")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", tell)
    assert segments.grow_segments() == (error is None)
    assert told == [segments.GROWING] and settings() == {segments.SETTING: segments.GROWING}


def test_an_engine_on_the_cpu_sets_nothing_and_reports_no_allocator():
    model, _ = toy.build()
    assert settings() == {} and "allocator" not in dict(model.memory_table())
    assert "near_reserved_bytes" not in model.step_scalars()


def test_an_engine_for_a_gpu_sets_it_before_it_asks_cuda_for_anything(monkeypatch):
    at_start = []

    def started():
        at_start.append(settings())
        raise RuntimeError("there is no GPU here")

    monkeypatch.setattr(torch.cuda, "_lazy_init", started)
    with pytest.raises(RuntimeError, match="no GPU here"):
        pstar.initialize_engine(toy.Toy, 0, toy.config(), device="cuda:0")
    assert at_start == [{"PYTORCH_ALLOC_CONF": "expandable_segments:True"}]


@pytest.mark.parametrize("near_memory, reserved, words", [
    (None, [2**20, 2**21, 2**20], "2 MiB reserved at most"),
    (2**22, [2**20, 2**21, 2**20], "2 MiB reserved at most, 2 MiB less than near_memory"),
    (2**22, [2**22, 3 * 2**21, 2**21], "6 MiB reserved at most, 2 MiB more than near_memory (holes"),
])
def test_the_report_compares_the_largest_measurement_with_near_memory(near_memory, reserved, words, monkeypatch):
    told = iter(reserved)
    monkeypatch.setattr(segments, "reserved_bytes", lambda device: next(told))
    watch = segments.Reserved(torch.device("cuda:0"), near_memory)
    peaks = [watch.look() for _ in reserved[:-1]]
    (name, text), = watch.rows()
    assert peaks == [reserved[0], max(reserved)] and name == "allocator" and text.startswith(words)


def test_an_engine_reports_what_the_allocator_reserves(monkeypatch):
    monkeypatch.setattr(segments, "reserved_bytes", lambda device: 5 * 2**20)
    model, _ = toy.build(near_memory="4MiB")
    assert model.step_scalars()["near_reserved_bytes"] == 5 * 2**20
    assert dict(model.memory_table())["allocator"].startswith("5 MiB reserved at most, 1 MiB more than near_memory")
