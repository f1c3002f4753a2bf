"""The flags that chapter 01 adds."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpt2_chinese.errors import UserError
from gpt2_chinese.settings import ParallelSettings, flag


@dataclass
class Settings(ParallelSettings):
    backend: str = flag("own", "own (server.py) or torch (nn.DataParallel, several GPUs).", choices=("own", "torch"))
    mode: str = flag("sync", "sync, or async: the server does not wait for slow workers.", choices=("sync", "async"))
    staleness: int = flag(4, "With --mode async: how many server steps old a gradient's weights may be.")
    slow_worker_s: float = flag(0.0, "Seconds that rank 1 idles in each of its steps, to show the effect of a straggler.")
    num_devices: int = field(default=0, init=False)  # GPUs of --backend torch, which is one process

    @property
    def in_step(self) -> bool:
        """Asynchronous ranks meet only after a step that evaluates or saves."""
        return self.mode == "sync"

    def validate(self) -> None:
        super().validate()
        if self.staleness < 0:
            raise UserError(f"--staleness must be at least 0, not {self.staleness}")
        if not 0 <= self.slow_worker_s < self.timeout_s:
            raise UserError(
                f"--slow-worker-s must be at least 0 and below --timeout-s {self.timeout_s}, not {self.slow_worker_s}"
            )
        if self.slow_worker_s and (self.nproc == 1 or self.backend == "torch"):
            raise UserError("--slow-worker-s slows rank 1 down, which --nproc 1 and --backend torch do not have")
        if self.mode == "async" and self.precision == "fp16":
            raise UserError("--mode async with --precision fp16: gradients in flight would have an older loss scale")
        if self.backend == "torch":
            self._use_data_parallel()

    def _use_data_parallel(self) -> None:
        """nn.DataParallel is one process with a thread for each GPU, so --nproc becomes the number of GPUs."""
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() and self.device != "cpu" else 0
        if self.recompute != "none":
            raise UserError("--recompute needs --backend own: nn.DataParallel's threads would share one list of segments")
        if self.documents == "pack":
            raise UserError("--documents pack needs --backend own: nn.DataParallel averages its replicas' means")
        if self.mode == "async":
            raise UserError("--mode async needs --backend own: nn.DataParallel is synchronous")
        if num_gpus < max(2, self.nproc):
            raise UserError(
                f"--backend torch is nn.DataParallel, one process on --nproc {self.nproc} GPUs (at least 2), and torch "
                f"finds {num_gpus} here: leave --backend torch out to use this chapter's server"
            )
        if self.nproc < 2:
            raise UserError("--backend torch is nn.DataParallel, which shares the work among at least --nproc 2 GPUs")
        self.num_devices, self.nproc = self.nproc, 1
