"""Records a run: peak memory, versions, the rows of metrics.jsonl, the curves of TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from durable.printable import utf8
from gpt2_chinese import __version__
from gpt2_chinese.locks import try_lock
from gpt2_chinese.run.flops import Rates


class Metrics:
    """metrics.jsonl and TensorBoard's files of a run; rank 0 alone writes them.

    Args:
        directory: --output-dir.
        rates: turns tokens/s into FLOP/s and MFU.
    """

    def __init__(self, directory: Path, rates: Rates) -> None:
        self.directory, self.path = directory, directory / "metrics.jsonl"
        self.rates = rates

    def take(self) -> bool:
        """Locks metrics.jsonl, as every run does with its file; False when another run holds the lock."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            return try_lock(self._file.fileno()) and os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        return False

    def begin(self, first_step: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Rewrites metrics.jsonl with the rows before `first_step` only, and returns these; for step 1 there are none."""
        kept = rows_before(self.path, first_step) if first_step > 1 else []
        staging = self.path.with_name("metrics.jsonl.tmp")
        staging.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        taken, self._file = self._file, staging.open("a", encoding="utf-8", buffering=1)
        try_lock(self._file.fileno())
        os.replace(staging, self.path)
        taken.close()

        from torch.utils.tensorboard import SummaryWriter  # late: it takes a second to import

        self._board = SummaryWriter(str(self.directory / "tensorboard"), purge_step=first_step)
        if first_step == 1:
            self.text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()), 0)
        return kept

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes a row, numbers that are not finite as null. Raises OSError."""
        row = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(("valid/" if name.startswith("valid_") else "train/") + name, value, row["step"])

    def text(self, name: str, text: str, step: int) -> None:
        """Adds a text to TensorBoard."""
        self._board.add_text(name, utf8(text), step)

    def compare(self, settings: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Adds the run to TensorBoard's table of hyper-parameters."""
        self._board.add_hparams(
            {k: utf8(v) if isinstance(v, str) else v for k, v in settings.items() if isinstance(v, int | float | str)},
            {f"hparam/{k}": v for k, v in results.items()},
            run_name=".",
        )

    def sync(self) -> None:
        """Waits until all rows are on the disk."""
        self._board.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes metrics.jsonl and TensorBoard's files."""
        self._board.close()
        self._file.close()


def versions() -> dict[str, str]:
    """Versions of the software that the numbers depend on."""
    return {"gpt2_chinese": __version__, "torch": torch.__version__, "python": platform.python_version()}


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: by torch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return 1024 * int(found[1])
    import resource  # the second choice on Linux, where its peak begins with the parent process's peak

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def evaluation_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("valid_loss", "valid_ppl", "valid_acc")}


def rows_before(metrics: Path, step: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl before a step. A line that a kill cut short or a disk damaged is left out."""
    rows = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] < step:
            rows.append(row)
    return rows
