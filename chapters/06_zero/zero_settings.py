"""The flags that chapter 06 adds, and the combinations that it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2_chinese.errors import UserError
from gpt2_chinese.settings import ParallelSettings, flag

SHARDED = {0: "nothing", 1: "optimizer states", 2: "optimizer states, gradients",
           3: "optimizer states, gradients, parameters"}  # fmt: skip
OFFLOADS = ("none", "optimizer", "optimizer,params")


@dataclass
class Settings(ParallelSettings):
    without = {"recompute": "--activation-checkpointing"}
    zero_stage: int = flag(3, "What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.",
                           (0, 1, 2, 3))  # fmt: skip
    offload: str = flag("none", "Kept in host memory: the optimizer (states and update), params (needs stage 3).",
                        OFFLOADS)  # fmt: skip
    backend: str = flag("own", "own (the folder zero) or torch (ZeroRedundancyOptimizer, FSDP2).", ("own", "torch"))
    activation_checkpointing: bool = flag(False, "Keep one activation a block, recompute the rest in backward.")
    loss_scale: str | None = flag(None, "dynamic, or a fixed number.", shown="dynamic in fp16, else 1")

    def validate(self) -> None:
        super().validate()
        if self.offload == "optimizer,params" and self.zero_stage < 3:
            raise UserError(f"--offload optimizer,params needs --zero-stage 3: at {self.zero_stage} every rank computes "
                            "with whole parameters all the time")  # fmt: skip
        if self.loss_scale is not None and self.loss_scale != "dynamic" and not _is_positive(self.loss_scale):
            raise UserError(f"--loss-scale {self.loss_scale}: give a number above 0, or dynamic")
        if self.backend == "torch":
            self._validate_torch()
        if self.zero_stage == 3 or self.backend == "torch":
            self.check_sync = 0  # stage 3 has no replicas to compare, and torch's parameters may be sharded

    def _validate_torch(self) -> None:
        if self.zero_stage == 0:
            raise UserError("--backend torch has no --zero-stage 0: use chapter 02 with --backend torch")
        if self.precision == "fp16" or self.loss_scale is not None:
            raise UserError("--backend torch is for fp32 and bf16 here: --precision fp16 and --loss-scale need "
                            "--backend own")  # fmt: skip
        if self.offload != "none" and self.zero_stage == 1:
            raise UserError(f"--offload {self.offload} with --backend torch uses FSDP2: it needs --zero-stage 2 or 3")
        if self.offload == "optimizer":
            raise UserError("--offload optimizer: FSDP2's CPUOffloadPolicy moves parameters too, so --backend torch "
                            "needs --zero-stage 3 --offload optimizer,params")  # fmt: skip

    def about(self) -> list[tuple[str, str]]:
        by = {"own": "zero/stages012.py" if self.zero_stage < 3 else "zero/stage3.py",
              "torch": "ZeroRedundancyOptimizer" if self.zero_stage == 1 else "FSDP2"}[self.backend]  # fmt: skip
        where = "" if self.offload == "none" else f"; in host memory: {self.offload}"
        return [*super().about(), ("ZeRO", f"stage {self.zero_stage} by {by}, sharded: {SHARDED[self.zero_stage]}{where}")]


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
