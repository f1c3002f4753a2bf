"""Random programs: model, loop and configuration are drawn from a seed; the engine gives plain PyTorch's numbers.

On a GPU (where dropout draws other numbers), in 16 bit, with 8-bit states and with codes the oracle is an engine that has
everything near and copies nothing ahead: placement changes no number. A configuration may be refused in one line before
training; later nothing may fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import pstar
from pstar.chunks.gradients import Gradients
from pstar.memory.tier import NEAR
from tests.programs import Chunked, Loop, Plain, Program, calls_loss_backward, first_difference, placement_of

SIMPLE = {"near_budget": "100%", "prefetch": 0, "default_chunk_size": 400}


@contextmanager
def same_kernels() -> Iterator[None]:
    """In an evaluation torch's attention computes by another kernel, unless its module has hooks as in some placements."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def outcome(program: Program, folder: Path, rank: int = 0) -> str:
    """equal, refused, or the first difference on this rank."""
    keys = placement_of(program, folder)
    (folder / "oracle").mkdir(parents=True, exist_ok=True)
    try:
        chunked = Chunked(program, keys, folder, calls_loss_backward(program))
    except (pstar.BudgetError, pstar.ConfigError) as error:
        assert "too small" in str(error) and "\n" not in str(error), error
        return "refused"
    plain = program.precision == "fp32" and program.num_ranks == 1 and chunked.model.device.type == "cpu"
    oracle = Plain(program) if plain else Chunked(program, SIMPLE, folder / "oracle")
    expected = Loop(oracle, rank).run()
    try:
        found = Loop(chunked, rank).run()
    except pstar.BudgetError as error:    # the first step measures the activations
        assert "near_memory" in keys and "near_memory" in str(error), f"seed {program.seed}: {error}"
        return "refused"
    return first_difference(expected, found) or "equal"


def outcomes_of(seeds: range, folder: Path, rank: int = 0, num_ranks: int = 1) -> dict[int, str]:
    """Seed to outcome."""
    with same_kernels():
        return {seed: outcome(Program(seed, num_ranks), folder / str(seed), rank) for seed in seeds}


def judge(outcomes: dict[int, str]) -> Counter[str]:
    """Counts the outcomes, each of which must be equal or refused."""
    wrong = {seed: each for seed, each in outcomes.items() if each not in ("equal", "refused")}
    assert not wrong, wrong
    return Counter(outcomes.values())


def check(seeds: range, folder: Path) -> Counter[str]:
    return judge(outcomes_of(seeds, folder))


@pytest.mark.parametrize("first", [0, 20, 40])
def test_twenty_random_programs(first, tmp_path):
    assert check(range(first, first + 20), tmp_path)["equal"] >= 10


@pytest.mark.deep
@pytest.mark.parametrize("first", range(1000, 1500, 100))
def test_a_hundred_random_programs(first, tmp_path):
    assert check(range(first, first + 100), tmp_path)["equal"] >= 60


def test_mutation_a_sum_of_sums_is_found(tmp_path, monkeypatch):
    """Two gradients of one micro-step (a layer used twice, with reentrant checkpoints) must be added one after the other."""
    add_grad = Gradients.add_grad

    def add_both_first(self, unit, key, name, grad, last_micro_step) -> None:
        if key is not unit.grad_key and name in unit.leaving:
            self.parameters.view(name, self.store.ensure(key, NEAR)).add_(grad)
        else:
            add_grad(self, unit, key, name, grad, last_micro_step)

    monkeypatch.setattr(Gradients, "add_grad", add_both_first)
    with pytest.raises(AssertionError, match="10: 'layers.4.first.weight'"):
        check(range(10, 11), tmp_path)
