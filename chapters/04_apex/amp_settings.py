"""The flags that chapter 04 adds, and the combinations that it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from apex_fused import why_not

from gpt2_chinese.distributed.horovod_launcher import adopt_ranks
from gpt2_chinese.errors import UserError
from gpt2_chinese.settings import ParallelSettings, flag


@dataclass
class Settings(ParallelSettings):
    opt_level: str | None = flag(None, "Which parts are 16 bit: O0 nothing, O1 products, O2 also weights, O3 all.",
                                 ("O0", "O1", "O2", "O3"), "O2; O0 with --precision fp32")  # fmt: skip
    half: str | None = flag(None, "Which 16-bit type (a CPU is slow in fp16).", ("fp16", "bf16"), "--precision, else bf16")
    loss_scale: str | None = flag(None, "dynamic, or a fixed number.", shown="dynamic in fp16, else 1")
    scale_window: int = flag(2000, "Good steps after which a dynamic scale is doubled.")
    backend: str = flag("own", "own (amp.py) or torch (torch.amp: O0 and O1).", ("own", "torch"))
    comm: str = flag("ddp", "Who averages the gradients: torch's DistributedDataParallel or Horovod.", ("ddp", "horovod"))
    apex: bool = flag(False, "FusedAdam and FusedLayerNorm of NVIDIA Apex (on GPUs, where it is installed).")

    def validate(self) -> None:
        super().validate()
        if self.precision == "fp32" and self.opt_level not in (None, "O0"):
            raise UserError(f"--precision fp32 means --opt-level O0, not {self.opt_level}: leave one of them out")
        if self.precision in ("fp16", "bf16") and self.half not in (None, self.precision):
            raise UserError(f"--precision {self.precision} and --half {self.half} contradict each other")
        if self.precision in ("fp16", "bf16") and self.opt_level == "O0":
            raise UserError(f"--precision {self.precision} and --opt-level O0, which is fp32, contradict each other")
        self.opt_level = self.opt_level or ("O0" if self.precision == "fp32" else "O2")
        self.half = self.half or (self.precision if self.precision in ("fp16", "bf16") else "bf16")
        self.precision = "fp32" if self.opt_level == "O0" else self.half
        self.loss_scale = self.loss_scale or ("dynamic" if self.precision == "fp16" else "1")
        if self.loss_scale != "dynamic" and not _is_positive(self.loss_scale):
            raise UserError(f"--loss-scale {self.loss_scale}: give a number above 0, or dynamic")
        if self.scale_window < 1:
            raise UserError(f"--scale-window must be at least 1, not {self.scale_window}")
        if self.backend == "torch" and self.opt_level in ("O2", "O3"):
            raise UserError(f"--backend torch works with --opt-level O0 and O1 (autocast), not with {self.opt_level}")
        if self.backend == "torch" and self.loss_scale not in ("dynamic", "1"):
            raise UserError(f"--loss-scale {self.loss_scale}: torch's scale is dynamic; a fixed one needs --backend own")
        if self.comm == "horovod" and self.is_given("hang_after"):
            raise UserError("--hang-after and --comm horovod: Horovod ends a run that hangs, after --timeout-s")
        if self.apex and (reason := why_not(self.device)):
            raise UserError(f"--apex: {reason}")

    def prepare(self) -> None:
        adopt_ranks()

    def about(self) -> list[tuple[str, str]]:
        scale = "no loss scaling" if self.loss_scale == "1" else f"loss scale {self.loss_scale}"
        by = "amp.py" if self.backend == "own" else "torch.amp"
        over = "DistributedDataParallel" if self.comm == "ddp" else "Horovod"
        what = "fp32" if self.opt_level == "O0" else f"{self.half}, {scale}"
        return [*super().about(), ("precision", f"{self.opt_level} ({what}) by {by}, over {over}")]


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
