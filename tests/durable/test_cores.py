"""The cores that a process may use are those whose time its control groups give it, not all that it sees."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from durable.cores import num_cores
from tests.control_group import join, limited_group

CORES = 8
GROUPS = {  # files below sys/fs/cgroup, /proc/self/cgroup
    "no control groups": ({}, ""),
    "docker run --cpus=2": ({"cpu.max": "200000 100000\n"}, "0::/\n"),
    "docker run --cpus=1.5": ({"cpu.max": "150000 100000\n"}, "0::/\n"),
    "docker run --cpus=0.1": ({"cpu.max": "10000 100000\n"}, "0::/\n"),
    "docker run --cpus=20": ({"cpu.max": "2000000 100000\n"}, "0::/\n"),
    "docker run": ({"cpu.max": "max 100000\n"}, "0::/\n"),
    "version 1, docker run --cpus=3": ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"},
                                       "3:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n"),
    "version 1, docker run": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/\n"),
    "systemd-run -p CPUQuota=500%": ({"system.slice/run.service/cpu.max": "500000 100000\n",
                                      "system.slice/cpu.max": "max 100000\n"}, "0::/system.slice/run.service\n"),
    "a slice around it has less": ({"system.slice/run.service/cpu.max": "500000 100000\n",
                                    "system.slice/cpu.max": "400000 100000\n"}, "0::/system.slice/run.service\n"),
    "another group": ({"other.slice/cpu.max": "100000 100000\n"}, "0::/system.slice\n"),
    "from outside the container": ({"cpu.max": "600000 100000\n"}, "0::/../other\n"),
}


def written(root: Path, files: dict[str, str], own: str) -> Path:
    for name, text in {f"sys/fs/cgroup/{name}": text for name, text in files.items()}.items() | {("proc/self/cgroup", own)}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("group, cores", list(zip(GROUPS, (8, 2, 2, 1, 8, 8, 3, 8, 5, 4, 8, 6), strict=True)))
def test_a_limit_of_cpu_time_is_a_number_of_cores(
    group: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))
    assert num_cores(written(tmp_path, *GROUPS[group])) == cores


def test_a_system_without_proc_and_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert num_cores(tmp_path) == 6


TRAIN = """
from types import SimpleNamespace
from gpt2_chinese.distributed.torchrun import launch
launch(SimpleNamespace(nproc=1, device="cpu", deterministic=False))
"""
GENERATE = """
from gpt2_chinese.checkpoint.trained_model import pick_device
pick_device("auto")
"""
PRINT = """
import torch
from durable.cores import num_cores
print(num_cores(), torch.get_num_threads())
"""


@pytest.mark.parametrize("program", [TRAIN, GENERATE], ids=["train", "generate"])
def test_programs_compute_with_the_cores_of_a_real_control_group(program: str) -> None:
    one_core = {"cpu.cfs_quota_us": "100000"}, {"cpu.max": "100000 100000"}
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with limited_group("cpu", *one_core) as group:
        for given, cores_and_threads in (({}, "1 1"), ({"OMP_NUM_THREADS": "2"}, "1 2"))[: 2 if program == TRAIN else 1]:
            said = subprocess.run([sys.executable, "-c", program + PRINT], env=kept | given, preexec_fn=partial(join, group),
                                  check=True, capture_output=True, text=True).stdout  # fmt: skip
            assert said.strip() == cores_and_threads
