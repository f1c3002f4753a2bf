"""How many processes, on which device, in which precision: decided for machines made up of a number of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2_chinese.distributed import devices
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings
from tests.gpt2_chinese.chapter_settings import CHAPTERS, ROOT, settings_of
from tests.limits import HANGS_S

ONE_PROCESS = ("00_single",)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function: the settings of a chapter's command on a machine with so many GPUs."""

    def settings(chapter: str, num_gpus: int, *flags: object) -> Settings:
        monkeypatch.setattr(devices, "count_gpus", lambda: num_gpus)
        given = [str(flag) for flag in ("--output-dir", tmp_path / "run", *flags)]
        return resolve(settings_of(chapter).from_command_line(str(ROOT / "chapters" / chapter / "train.py"), None, given))

    return settings


def decided(settings: Settings) -> tuple[int, str, str]:
    return settings.nproc, settings.device, settings.precision


@pytest.mark.parametrize("chapter", sorted({*CHAPTERS} - {"08_param_efficient"}))    # which would train its base model
def test_by_default_there_is_one_process_per_gpu_and_without_a_gpu_there_are_two(on, chapter: str) -> None:
    alone = chapter in ONE_PROCESS
    for num_gpus, nproc, device in ((0, 2, "cpu"), (1, 1, "cuda"), (2, 2, "cuda"), (4, 4, "cuda")):
        half = "bf16" if device == "cuda" or chapter == "04_apex" else "fp32"
        assert decided(on(chapter, num_gpus)) == (1 if alone else nproc, device, half), num_gpus


@pytest.mark.parametrize("chapter, num_gpus, flags, nproc", [
    ("02_ddp", 8, (), 8),
    ("02_ddp", 5, (), 4),                                # 24 sequences are not divisible by 5
    ("02_ddp", 8, ("--grad-accum", 4), 6),               # 24 = 4 x 6
    ("02_ddp", 7, ("--batch-size", 7), 7),
    ("05_model_parallel", 8, (), 4),                     # four layers
    ("05_model_parallel", 8, ("--tp", 2), 8),            # two halves of four stages
    ("05_model_parallel", 8, ("--pp", 1), 8),
    ("05_model_parallel", 8, ("--pp", 2, "--tp", 2), 8),
    ("05_model_parallel", 7, ("--pp", 2), 6),
    ("07_patrickstar", 8, ("--backend", "own"), 1),
])  # fmt: skip
def test_as_many_gpus_are_used_as_can_share_a_batch(on, capsys, chapter: str, num_gpus: int, flags, nproc: int) -> None:
    assert decided(on(chapter, num_gpus, *flags))[:2] == (nproc, "cuda")
    note = f"note: --nproc {nproc} of {num_gpus} GPUs"
    assert (note in capsys.readouterr().out) == (nproc < num_gpus and "own" not in flags)


def test_a_number_that_is_given_stays(on, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(on("02_ddp", 8, "--nproc", 2)) == (2, "cuda", "bf16")
    assert decided(on("02_ddp", 8, "--nproc", 3, "--precision", "fp32")) == (3, "cuda", "fp32")
    assert decided(on("02_ddp", 8, "--device", "cpu")) == (2, "cpu", "fp32")
    assert "note:" not in capsys.readouterr().out
    for name, value in (("RANK", 0), ("WORLD_SIZE", 4), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    assert decided(on("02_ddp", 2)) == (4, "cuda", "bf16"), "two nodes with two GPUs each"


@pytest.mark.parametrize("num_gpus, line", [
    (0, "--device cuda with --nproc 2: this machine has 0 GPUs that torch can use; "
        "give --device cpu, or leave --device out"),
    (1, "--device cuda with --nproc 2: this machine has 1 GPUs that torch can use: give --nproc 1 or less"),
])  # fmt: skip
def test_more_processes_than_gpus_are_one_line(on, capsys, num_gpus: int, line: str) -> None:
    with pytest.raises(SystemExit) as end:
        on("02_ddp", num_gpus, "--device", "cuda", "--nproc", 2)
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {line}\n")


def test_a_run_that_leaves_the_gpus_says_so_in_one_line(on, capsys) -> None:
    assert decided(on("02_ddp", 1, "--nproc", 2)) == (2, "cpu", "fp32")
    said = capsys.readouterr().out
    assert said == ("note: --nproc 2 on a machine with 1 GPU: each process would need one, so the run computes on the CPU; "
                    "give --nproc 1 or less to compute on GPUs\n")  # fmt: skip


def test_the_count_is_torchs_and_without_a_driver_torch_is_not_loaded() -> None:
    assert devices.count_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    program = ("import sys; from gpt2_chinese.distributed import devices; devices._has_driver = lambda: False; "
               "assert devices.count_gpus() == 0 and 'torch' not in sys.modules")  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANGS_S)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Restores torch's choice of kernels after the test; a function that returns it."""
    attention = ("flash", "mem_efficient", "cudnn", "math")

    def chosen() -> dict[str, bool]:
        return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in attention}

    before, benchmark = chosen(), torch.backends.cudnn.benchmark
    monkeypatch.delenv(devices.CUBLAS_VARIABLE, raising=False)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield chosen
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fill, benchmark
    for name, enabled in before.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deterministic_kernels_are_chosen_and_on_a_cpu_attention_stays(kernels, monkeypatch, device: str) -> None:
    """The switches are torch's own, which need no GPU. On a CPU the flash switch would choose another kernel, other bits."""
    before, torch.backends.cudnn.benchmark = kernels(), True
    devices.choose_deterministic_kernels(device)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[devices.CUBLAS_VARIABLE] == ":4096:8"
    math_only = dict.fromkeys(before, False) | {"math": True}
    assert (kernels(), torch.backends.cudnn.benchmark) == ((math_only, False) if device == "cuda" else (before, True))
    assert torch.empty(1000).isnan().sum() < 1000, "memory is not filled"
    for given, kept in ((":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")):
        monkeypatch.setenv(devices.CUBLAS_VARIABLE, given)
        devices.choose_deterministic_kernels(device)
        assert os.environ[devices.CUBLAS_VARIABLE] == kept
