"""The parts of benchmarks/gpu/run.sh as data: each step is one program, which writes its own table.

| part | table | what it shows |
|---|---|---|
| tests | gpu_tests.md | the tests that need CUDA |
| chapters | gpu_chapters.md | the losses of chapters 00 to 07 in fp32, bf16 and fp16 beside those of chapter 00 |
| equal | gpu_equal.md | small models: the losses with least memory near equal those with everything near |
| adam | gpu_adam.md | Adam beside torch's fused AdamW, a device copy, and copies from and to pinned host memory |
| models | gpu_models.md | 1.5, 7, 13 and 17 billion parameters beside plain PyTorch or FSDP2, until each fails |
| curve | gpu_curve.md | 1.5 billion parameters with 8 and 12 GB of the GPU, 7 billion with 24, 40 and 80 GB |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("tests", "chapters", "equal", "adam", "models", "curve")
VARIANTS = ("plain", "pstar-all", "pstar-25", "pstar-25-no-prefetch", "pstar-25-early", "pstar-25-overlap",
            "pstar-25-stream")
"""Contenders of one model that fits into the GPU eight times."""
COMPILED = ("plain", "plain-compiled", "pstar-all", "pstar-all-compiled")
"""The same; torch.compile takes longer than the steps."""
MODELS = (
    (1.5, 8, "pstar,pstar-all,plain", 2), (1.5, 8, "fsdp2", 2), (7, 16, "pstar", 3.5), (7, 16, "fsdp2", 4),
    (13, 16, "pstar", 5), (13, 16, "fsdp2", 0.5), (17, 32, "pstar", 6), (17, 32, "fsdp2", 0.5))  # fmt: skip
"""(billions of parameters, sequences a step, contenders, about so many minutes)"""
CAPS = ((1.5, 8, 8, 0.8), (1.5, 8, 12, 0.8), (7, 16, 24, 2), (7, 16, 40, 3.5), (7, 16, 80, 3.5))
"""(billions of parameters, sequences a step, GB of the GPU, about so many minutes)

8, 12 and 24 GB are consumer cards, 40 and 80 server cards."""


@dataclass(frozen=True)
class Step:
    """One program of a part."""

    name: str
    """The part, or the part, a dash and more."""
    command: tuple[str, ...]
    """What follows `python`."""
    minutes: float
    """About so many on an H200, guessed until it ran on one. The step starts only if so much time is left."""


def steps(device: str, toy: bool, folder: Path) -> list[Step]:
    """All steps in order; they write into `folder`."""
    usual = ("--device", device, "--results", str(folder), *(("--quick",) if toy else ()))
    few = ("--rounds", "1") if toy else ()

    def step(name: str, minutes: float, program: str, *flags: str) -> Step:
        return Step(name, (str(HERE / program), *flags, *usual), 0.0 if toy else minutes)

    def model(billions: float, batch: int, only: str, *flags: str) -> tuple[str, ...]:
        size = ("--billions", f"{billions:g}", "--batch", str(batch), "--only", only)
        return "models.py", *size, "--until-it-fails", *flags, *few

    found = [step("tests", 1.5, "cuda_tests.py"), step("chapters", 2, "chapters.py"), step("equal", 1.5, "equal.py"),
             step("adam", 1, "adam.py"),
             step("models-0.5-variants", 2.2, *model(0.5, 4, ",".join(VARIANTS), "--no-recompute")),
             step("models-0.5-compiled", 3, *model(0.5, 4, ",".join(COMPILED), "--no-recompute"))]
    for billions, batch, only, minutes in MODELS:
        name = f"models-{billions:g}-{only.replace(',', '-')}"
        found.append(step(name, minutes, *model(billions, batch, only)))
    for billions, batch, cap, minutes in CAPS:
        found.append(step(f"curve-{billions:g}-{cap}", minutes, *model(billions, batch, "pstar", "--cap", str(cap))))
    return found


def select(every: list[Step], only: list[str]) -> list[Step]:
    """The steps that `only` names, as parts ("models"), or as beginnings of their names up to a dash ("models-7")."""
    return [step for step in every if any(f"{step.name}-".startswith(f"{name}-") for name in only)]
