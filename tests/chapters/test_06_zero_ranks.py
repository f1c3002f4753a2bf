"""Chapter 06's technique on ranks: one process's curve at every stage, bytes to the byte, and that its tests can fail."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpt2_chinese.distributed.ranks import Ranks
from tests.chapters.technique import (
    CLIP,
    STEPS,
    Small,
    assert_follows,
    is_red,
    learning_rate,
    mean_over_ranks,
    oracle,
    rows,
    technique,
)

zero = technique("06_zero", "zero")
comm = technique("06_zero", "zero.comm")
ledger = technique("06_zero", "zero.ledger")
units = technique("06_zero", "zero.units")
CASES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "optimizer,params")]


def plan(stage: int, offload: str = "none", precision: str = "fp32", **more: Any) -> SimpleNamespace:
    values = {"zero_stage": stage, "offload": offload, "precision": precision, "loss_scale": None, "backend": "own",
              "activation_checkpointing": False}  # fmt: skip
    return SimpleNamespace(**values | more)


class WithUnused(Small):
    """One vector that no rank uses, and one that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
        self.use = False

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs, targets) + (self.sometimes.sum() if self.use else 0)


def train(rank: int, num_ranks: int, settings: SimpleNamespace, micros: int = 1, without: str = "", kind: type = Small
          ) -> dict[str, Any]:  # fmt: skip
    """A few steps; `without` names a collective that is taken away. The returned weights are the whole masters."""
    torch.manual_seed(0 if kind is Small else 7)
    model = kind()
    if kind is WithUnused:
        model.use = rank == 0
    ranks = Ranks(rank, num_ranks, rank, torch.device("cpu"), dist.group.WORLD if num_ranks > 1 else None)
    names = {"reduce-scatter": ("reduce_scatter_mean", lambda comm, flat: lambda: flat[: flat.numel() // num_ranks].clone()),
             "all-gather": ("all_gather", lambda comm, full, own: lambda: full)}  # fmt: skip
    broken = mock.patch.object(comm.Comm, *names[without]) if without else contextlib.nullcontext()
    result: dict[str, Any] = {"losses": [], "norms": [], "optimizer_steps": 0, "sent": 0}
    losses = []
    with broken:
        sharded, scaler = zero.shard(model, ranks, settings)
        sharded.optimizer = optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = learning_rate(step)
            optimizer.zero_grad()
            total = 0.0
            for micro in range(micros):
                with sharded.no_sync(micro < micros - 1):
                    loss = sharded(*rows(step, rank, num_ranks, micro, micros)) / micros
                    scaler.scale(loss).backward()
                total += loss.item()
            sharded.wait()
            scaler.unscale_(optimizer)
            result["norms"].append(sharded.clip_gradients(CLIP).item())
            scaler.step(optimizer)
            scaler.update()
            result["optimizer_steps"] += 1
            losses.append(total)
            sharded.step_scalars()
    result["losses"] = mean_over_ranks(losses) if num_ranks > 1 else losses
    result["weights"] = whole(sharded, ranks)
    result["states"], result["formula"] = sharded.ledger.states["after backward"], sharded.ledger.formula()
    result["sent"] = sum(sharded.comm.last_sent.values())
    result["numels"] = [unit.numel for unit in sharded.units]
    result["whole"] = (sharded.ledger.gradients_bytes, sharded.ledger.gathered_bytes)
    result["host"] = sharded.host.last if sharded.host else {}
    result["updates"] = sharded.num_updates
    return result


def whole(sharded: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The masters of all ranks put together."""
    found = {name: torch.zeros(p.shape) for unit in sharded.units for name, p in unit.parameters.items()}
    for piece in sharded.pieces:
        found[piece.name].view(-1)[piece.start :][: piece.numel] = piece.master.detach().view(-1)
    return {name: ranks.sum(tensor) / (1 if sharded.stage else ranks.num_ranks) for name, tensor in found.items()}


@pytest.mark.parametrize("num_ranks, micros", [(1, 4), (2, 1), (3, 4), (4, 1)])
@pytest.mark.parametrize("stage, offload", CASES)
def test_every_stage_is_one_process(ranks, stage: int, offload: str, num_ranks: int, micros: int) -> None:
    results = ranks(num_ranks).run(train, plan(stage, offload), micros)
    assert_follows(results)
    assert results[0]["norms"][0] == pytest.approx(oracle()["norms"][0], rel=1e-5), "of the same weights: the global norm"
    for result in results:  # the last rank may hold padding (less than p elements a unit), and then has fewer moments
        assert sum(result["states"].values()) == pytest.approx(sum(result["formula"].values()), rel=0.02)
    assert results[0]["states"] == results[0]["formula"], "to the byte"
    sent = ledger.sent_formula(results[0]["numels"], stage, num_ranks, 4, micros)
    assert {result["sent"] for result in results} == {sent if num_ranks > 1 else 0}


@pytest.mark.parametrize("stage, without", [(1, "reduce-scatter"), (2, "reduce-scatter"), (3, "reduce-scatter"),
                                            (1, "all-gather"), (2, "all-gather"), (3, "all-gather")])  # fmt: skip
def test_the_oracle_fails_without_reduce_scatter_or_all_gather(ranks, stage: int, without: str) -> None:
    results = ranks(2).run(train, plan(stage), 1, without)
    is_red(lambda: assert_follows(results))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_of_16_bit_are_those_of_the_paper(ranks, stage: int) -> None:
    """2 + 2 + 12 bytes, each divided by p as the stage says; and training stays near that of fp32."""
    result = ranks(2).run(train, plan(stage, precision="bf16"))[0]
    assert result["states"] == result["formula"]
    assert result["losses"] == pytest.approx(oracle()["losses"], rel=0.01)
    numel = sum(result["numels"])
    shares = {0: (1, 1, 1), 1: (1, 1, 2), 2: (1, 2, 2), 3: (2, 2, 2)}[stage]
    paper = sum(num_bytes * numel / share for num_bytes, share in zip((2, 2, 12), shares, strict=True))
    assert sum(result["states"].values()) == pytest.approx(paper, rel=0.001)


def test_the_formulas_are_those_of_the_paper() -> None:
    """Figure 1 of the paper: 7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    numels = [7_500_000_000]
    for stage, gigabytes in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.9)):
        assert sum(ledger.state_formula(numels, stage, 64, 2).values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)
    for stage, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        assert ledger.sent_formula([0, 64_000_000], stage, 64, 2) == times * 2 * 64_000_000 * 63 // 64


def test_stage_3_holds_few_whole_units_at_a_time(ranks) -> None:
    result = ranks(2).run(train, plan(3))[0]
    outside, block = result["numels"][0], result["numels"][1]
    assert result["whole"][1] <= 4 * (outside + 2 * block + 6)
    assert 0 < result["whole"][0] < 4 * sum(result["numels"])


def test_bytes_that_offload_moves_are_counted(ranks) -> None:
    """fp32 gradients of the shard out, the new parameters of the shard back; with params: in before each gather."""
    padded = lambda numels: sum(2 * math.ceil(n / 2) for n in numels)  # noqa: E731
    result = ranks(2).run(train, plan(2, "optimizer"))[0]
    assert result["host"] == {"to_host_bytes": 2 * padded(result["numels"]), "to_device_bytes": 2 * padded(result["numels"])}
    result = ranks(2).run(train, plan(3, "optimizer,params"))[0]
    blocks = padded(result["numels"][1:])
    assert result["host"] == {"to_host_bytes": 2 * padded(result["numels"]),
                              "to_device_bytes": 2 * padded(result["numels"]) + 2 * blocks}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_no_rank_uses_is_left_alone(ranks, stage: int) -> None:
    """Weight decay must not change it; a parameter that some ranks use follows the mean."""
    for result in ranks(2).run(train, plan(stage), 1, "", WithUnused):
        assert torch.equal(result["weights"]["never"], torch.ones(3)) and result["updates"]["never"] == 0
        assert not torch.equal(result["weights"]["sometimes"], torch.ones(5)) and result["updates"]["sometimes"] == STEPS


def test_blocks_are_found_and_what_two_of_them_share_is_in_none() -> None:
    model = Small()
    model.layers[0].extra = model.layers[1].bias
    (nothing, outside), (first, inside), (second, rest) = units.groups_of(model)
    assert nothing is None and list(outside) == ["embed.weight", "layers.0.extra"]
    assert first is model.layers[0] and list(inside) == ["layers.0.weight", "layers.0.bias"]
    assert second is model.layers[1] and list(rest) == ["layers.1.weight"]
