"""Decides where a run computes: how many processes, on which device, in which precision, with which kernels.

The decisions are functions of the number of GPUs, so tests call them with machines that they do not have.
torch is imported only on a machine with a GPU driver: elsewhere a wrong flag is answered before torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from gpt2_chinese.errors import UserError, notice

if TYPE_CHECKING:
    from gpt2_chinese.settings import Settings

NVIDIA_DRIVER = "libcuda.so.1"  # torch opens the same file
CUBLAS_VARIABLE, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
AMD_DRIVER = "/dev/kfd"  # ROCm, whose GPUs torch calls cuda, too


def count_gpus() -> int:
    """Number of GPUs of this machine that torch can use."""
    if not _has_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_driver() -> bool:
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError:
        return os.path.exists(AMD_DRIVER)
    return True


def choose_nproc(settings: Settings, num_gpus: int) -> None:
    """Sets --nproc where it was left out: one process per GPU, for as many GPUs as can share a batch.

    Without a GPU, with --device cpu, in a chapter of one process and under a launcher --nproc stays as it is.
    """
    alone = settings.flags()["nproc"].default == 1
    if alone or settings.device == "cpu" or num_gpus == 0 or settings.is_given("nproc") or "WORLD_SIZE" in os.environ:
        return
    settings.nproc = next((n for n in range(num_gpus, 0, -1) if settings.can_share(n)), num_gpus)
    if settings.nproc < num_gpus:
        notice(f"note: --nproc {settings.nproc} of {num_gpus} GPUs: more processes cannot share this model and batch evenly")


def choose_device(settings: Settings, num_gpus: int) -> None:
    """Sets --device auto, and a missing --precision, to what the machine has.

    Raises:
        UserError: --device cuda with more processes than GPUs.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.nproc))
    if settings.device == "cuda" and num_gpus < local_ranks:
        raise UserError(
            f"--device cuda with --nproc {local_ranks}: this machine has {num_gpus} GPUs that torch can use"
            + (f": give --nproc {num_gpus} or less" if num_gpus else "; give --device cpu, or leave --device out")
        )
    if settings.device == "auto":
        settings.device = "cuda" if local_ranks <= num_gpus else "cpu"
        if settings.device == "cpu" and num_gpus:
            gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
            notice(f"note: --nproc {local_ranks} on a machine with {gpus}: each process would need one, so the run "
                   f"computes on the CPU; give --nproc {num_gpus} or less to compute on GPUs")  # fmt: skip
    if settings.precision is None:
        settings.precision = "bf16" if settings.device == "cuda" else "fp32"


def choose_deterministic_kernels(device: str) -> None:
    """Makes torch use only kernels that give the same bits in every run of the same program; --deterministic.

    On a GPU the usual ones may not: flash attention's backward adds by atomics, in any order, and cuBLAS with several
    streams picks a workspace, and so a kernel, by chance. An operation that has no deterministic kernel raises an error.
    On a CPU all kernels that a run uses are deterministic already, and stay the same.

    Call it before CUDA starts, because cuBLAS reads its variable then. Ranks inherit the variable from their launcher.
    """
    import torch

    if os.environ.get(CUBLAS_VARIABLE) not in (CUBLAS_WORKSPACE, ":16:8"):  # NVIDIA names these two
        os.environ[CUBLAS_VARIABLE] = CUBLAS_WORKSPACE
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no result depends on it, and it would cost a pass
    if device == "cuda":
        torch.backends.cudnn.benchmark = False
        for other_than_math in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{other_than_math}_sdp")(False)
