"""Technique files of chapters, imported by tests and by the ranks of their pools, and a small run to hold them to.

    ddp = technique("02_ddp", "ddp")

A case trains a small model for a few steps on its share of a global batch of 48 rows. 1, 2, 3 and 4 ranks with 1 and 4
micro-batches divide it. `oracle` is the same on one process in plain PyTorch.
Tolerance: as in test_02_ddp_ranks.py: the same fp32 numbers are added in another order; seen: 1e-7 in losses, 1e-6 in
norms.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH, VOCAB, WIDTH = 48, 6, 61, 16
STEPS, CLIP, PEAK = 6, 0.5, 1e-2


def technique(chapter: str, module: str) -> ModuleType:
    """A module of a chapter, or `folder.module`; a chapter cannot be a package because its name begins with a digit."""
    folder = str(ROOT / "chapters" / chapter)
    root = module.partition(".")[0]
    known = sys.modules.get(root)
    if known is not None and Path(folder) not in Path(known.__file__).parents:
        for name in [name for name in sys.modules if name.partition(".")[0] == root]:
            del sys.modules[name]  # a file of the same name in another folder, benchmarks/zero.py for example
    # First in the path while it is imported, and last afterwards: the module's late imports must be found too.
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def settings_error(chapter: str, module: str | None, capsys: Any, *flags: object) -> str:
    """Returns the error that a chapter's program prints for these flags; asserts one line and status 2.

    `module` has its Settings; None for chapter 00.
    """
    kind = Settings if module is None else technique(chapter, module).Settings
    program = str(ROOT / "chapters" / chapter / "train.py")
    with pytest.raises(SystemExit) as end:
        resolve(kind.from_command_line(program, "", [str(flag) for flag in flags]))
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


class Small(nn.Module):
    """Embedding, two residual layers, tied head, a buffer; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(1) + 0.5)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Odd(Small):
    """One layer is used only by ranks that set `uses`, another one by no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses = False

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(inputs, targets)
        return loss + self.sometimes(self.embed(inputs)).square().mean() if self.uses else loss


def rows(step: int, rank: int = 0, num_ranks: int = 1, micro: int = 0, num_micros: int = 1) -> tuple[Tensor, Tensor]:
    """(inputs, targets), (rows, LENGTH) int64, of one micro-batch."""
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    size = BATCH // (num_ranks * num_micros)
    part = tokens[(rank * num_micros + micro) * size :][:size]
    return part[:, :-1], part[:, 1:]


def build(seed: int) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Small()
    return model, torch.optim.AdamW(model.parameters(), lr=PEAK)


def learning_rate(step: int) -> float:
    return PEAK * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clips and steps; the norm before. Asserts that what the optimizer sees is within the limit."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
    seen = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert seen <= CLIP * (1 + 1e-5)
    optimizer.step()
    return norm


@functools.cache
def oracle() -> dict[str, Any]:
    """Losses, norms and final weights of one plain process."""
    model, optimizer = build(0)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss = model(*rows(step))
        loss.backward()
        norms.append(clip_and_step(model, optimizer))
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def mean_over_ranks(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def assert_follows(results: list[dict[str, Any]]) -> None:
    """Every rank's losses, norms (where it has them) and weights are the oracle's, and one step a logged step was made."""
    expected = oracle()
    assert sum(norm > CLIP for norm in expected["norms"]) >= STEPS // 2, "clipping is not at work"
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        if result["norms"]:
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
            assert result["optimizer_steps"] == STEPS
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=0, atol=1e-5)
            assert torch.equal(result["weights"][name], results[0]["weights"][name]), f"{name} differs among ranks"


def assert_unused(grads: dict[str, Tensor | None], num_ranks: int, user: int) -> None:
    """`grads` of an `Odd` made from seed 0, `user` being the one rank that used its layer, are one process's at step 1."""
    torch.manual_seed(0)
    model = Odd()
    for rank in range(num_ranks):
        model.uses = rank == user
        (model(*rows(1, rank, num_ranks)) / num_ranks).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert grads[name] is None, f"{name}: nobody used it, so the optimizer must leave it alone"
        else:
            torch.testing.assert_close(grads[name], parameter.grad)


def is_red(check: Callable[[], None]) -> None:
    """Asserts that a check fails: for a technique whose communication has been taken away."""
    with pytest.raises(AssertionError):
        check()
