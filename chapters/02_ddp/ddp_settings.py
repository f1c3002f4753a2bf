"""The flags that chapter 02 adds."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import check_output_file
from gpt2_chinese.settings import ParallelSettings, flag

MOST_MB = 1 << 20  # 1 TiB; torch counts bytes in 64 bits


@dataclass
class Settings(ParallelSettings):
    backend: str = flag("own", "own (ddp.py) or torch (DistributedDataParallel).", choices=("own", "torch"))
    variant: str = flag(
        "bucket", "With --backend own: how gradients are averaged, see ddp.py.", choices=("naive", "bucket", "ring")
    )
    bucket_mb: float = flag(1.0, "MiB of gradients in one all-reduce; torch's default is 25.")
    timeline: str | None = flag(None, "Chrome trace of a few steps to write (and a PNG next to it).", shown="none")

    def validate(self) -> None:
        super().validate()
        if not 0 < self.bucket_mb < float("inf"):
            raise UserError(f"--bucket-mb must be above 0, not {self.bucket_mb}")
        if self.bucket_mb > MOST_MB:
            raise UserError(f"--bucket-mb {self.bucket_mb} is too large: give at most {MOST_MB}")
        if self.timeline is not None:
            check_output_file(self.timeline, "--timeline", in_new_folder=True)
        if self.backend == "torch" and self.variant != "bucket":
            raise UserError(f"--variant {self.variant} needs --backend own: torch's DistributedDataParallel has buckets")
