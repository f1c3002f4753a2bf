"""The flags that chapter 07 adds, and the check of the memory plan before any process is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpt2_chinese.errors import UserError
from gpt2_chinese.settings import Settings as BaseSettings
from gpt2_chinese.settings import flag


@dataclass
class Settings(BaseSettings):
    nproc: int = flag(2, "Processes on this machine, one per GPU where there are GPUs.")
    near_budget: str = flag("auto", "Device memory for chunks: 64MiB, 25% of all model data, min, the least that works, or "
                            "auto: 25%, or min where a quarter is too little.")
    far_budget: str = flag("auto", "Host memory for chunks: 2GiB, 80% of all model data, or auto, no bound.")
    chunk_size: str = flag("auto", "Elements in a chunk, or auto, the size that wastes least within the near budget.")
    ownership: str = flag("whole", "Whole chunks per rank, or every chunk sharded over them.", choices=("whole", "sharded"))
    policy: str = flag("next_use", "Which chunk leaves when room is short.", choices=("next_use", "lru"))

    def engine_config(self) -> dict[str, Any]:
        """These settings as pstar's configuration (DeepSpeed's keys where DeepSpeed has one)."""
        return {
            "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "betas": [0.9, 0.95], "eps": 1e-8}},
            "bf16": {"enabled": self.precision == "bf16"},
            "gradient_clipping": self.clip_grad_norm,
            "gradient_accumulation_steps": self.grad_accum,
            "default_chunk_size": self.chunk_size if self.chunk_size == "auto" else int(self.chunk_size),
            "ownership": self.ownership,
            "near_budget": self.near_budget,
            "far_budget": self.far_budget,
            "eviction_policy": self.policy,
        }

    def validate(self) -> None:
        super().validate()
        if self.precision == "fp16":
            raise UserError("--precision fp16: this chapter computes in fp32 or bf16; give one of them")
        if self.chunk_size != "auto" and not (self.chunk_size.isdecimal() and int(self.chunk_size) > 0):
            raise UserError(f"--chunk-size {self.chunk_size} is no number of elements: give a whole number, or auto")

    def resolve(self) -> None:
        """Adds what only the model's shapes can tell: whether its largest module fits into the near budget."""
        super().resolve()
        import pstar
        from gpt2_chinese.model import GPT2LMHeadModel

        def plan() -> None:
            pstar.plan_engine(lambda: GPT2LMHeadModel(self.model), self.engine_config(), self.nproc)

        try:
            if self.near_budget == "auto":
                self.near_budget = "25%"
                try:
                    plan()
                except pstar.BudgetError:  # a large vocabulary on a small model: the embedding alone is more than that
                    self.near_budget = "min"
            plan()
        except pstar.PstarError as error:
            raise UserError(f"--near-budget {self.near_budget}, --far-budget {self.far_budget}: {error}") from error
