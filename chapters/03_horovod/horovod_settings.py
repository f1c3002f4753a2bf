"""The flags that chapter 03 adds, and the flags of horovodrun that follow from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpt2_chinese.distributed.horovod_launcher import adopt_ranks, discovery_flags
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import check_output_file
from gpt2_chinese.settings import ParallelSettings, flag

MOST_MB = 1 << 20  # 1 TiB; Horovod counts bytes in 64 bits
DISCOVER = Path(__file__).with_name("discover_hosts.sh")


@dataclass
class Settings(ParallelSettings):
    without = {"hang_after": "--timeout-s"}  # Horovod's thread ends the run
    fusion_mb: int = flag(64, "MiB of gradients that Horovod packs into one message; 0: one gradient a message.")
    compression: str = flag("none", "none sends gradients as they are, fp16 in half their bytes.", ("none", "fp16"))
    timeline: str | None = flag(None, "File for Horovod's own trace, for Perfetto or chrome://tracing.", shown="none")
    elastic: bool = flag(False, "Continue with the remaining workers when one is lost.")

    def validate(self) -> None:
        super().validate()
        if self.fusion_mb < 0:
            raise UserError(f"--fusion-mb must be at least 0, not {self.fusion_mb}")
        if self.fusion_mb > MOST_MB:
            raise UserError(f"--fusion-mb {self.fusion_mb} is too large: give at most {MOST_MB}")
        if self.timeline is not None:
            check_output_file(self.timeline, "--timeline")
        if not self.elastic:
            return
        if self.nproc < 2 and "WORLD_SIZE" not in os.environ:
            raise UserError("--elastic --nproc 1: no worker would remain after a loss, give --nproc 2 or more")
        if self.precision == "fp16":
            raise UserError("--elastic does not go with --precision fp16")
        for fewer in range(self.nproc, 0, -1):
            if self.batch_size % (fewer * self.grad_accum):
                raise UserError(
                    f"--elastic: --batch-size {self.batch_size} must stay divisible when workers are lost, and with "
                    f"--grad-accum {self.grad_accum} it is not divisible among {fewer}"
                )

    def prepare(self) -> None:
        adopt_ranks()

    def horovodrun_flags(self) -> list[str]:
        """Flags of horovodrun for these settings."""
        flags = ["--fusion-threshold-mb", str(self.fusion_mb)]
        if self.timeline:
            flags += ["--timeline-filename", str(Path(self.timeline).absolute())]
        return flags + (discovery_flags(DISCOVER, self.nproc) if self.elastic else [])
