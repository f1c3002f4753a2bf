"""Batches: the same windows in the same order, however the work is shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpt2_chinese.data.batches import IGNORED, Batches
from gpt2_chinese.errors import UserError

IDS = np.arange(1, 1000, dtype=np.uint16)  # each id is its own position, so the first id identifies a window
T, B = 7, 24


def share(step: int, num_ranks: int, grad_accum: int, seed: int = 42) -> torch.Tensor:
    """The global batch of a step as the ranks together see it: (B, 2, T)."""
    rows = []
    for rank in range(num_ranks):
        batches = Batches(IDS, T, B, seed, rank, num_ranks, grad_accum)
        micro = list(batches.micro_batches(step))
        assert len(micro) == grad_accum
        for inputs, targets in micro:
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.shape == targets.shape == (B // (num_ranks * grad_accum), T)
            rows.append(torch.stack([inputs, targets], 1))
    return torch.cat(rows)


@pytest.mark.parametrize("num_ranks, grad_accum", [(1, 2), (1, 24), (2, 1), (2, 3), (3, 2), (4, 1), (8, 3), (6, 4)])
def test_any_sharing_gives_the_same_global_batch_in_the_same_order(num_ranks: int, grad_accum: int) -> None:
    for step in (1, 5, 6, 11):
        assert torch.equal(share(step, num_ranks, grad_accum), share(step, 1, 1))


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    walked = Batches(IDS, T, B)
    for step in range(1, 13):
        seen = list(walked.micro_batches(step))
    fresh = list(Batches(IDS, T, B).micro_batches(12))
    assert torch.equal(seen[0][0], fresh[0][0])


def test_targets_follow_inputs_and_an_epoch_takes_each_window_at_most_once() -> None:
    batches = Batches(IDS, T, B)
    assert batches.num_windows == 998 // T == 142
    assert batches.steps_per_epoch == 5
    firsts = []
    for step in range(1, 6):
        for inputs, targets in batches.micro_batches(step):
            assert torch.equal(targets, inputs + 1)
            firsts += inputs[:, 0].tolist()
    assert len(set(firsts)) == len(firsts) == 5 * B


def test_epochs_and_seeds_shuffle_differently() -> None:
    first, again = share(1, 1, 1), share(6, 1, 1)
    assert not torch.equal(first, again)
    assert not torch.equal(first, share(1, 1, 1, seed=43))


def test_all_windows_are_seen_over_some_epochs() -> None:
    batches = Batches(IDS, T, B)
    seen = {int(window) for step in range(1, 51) for window in batches.windows_of(step)}
    assert seen == set(range(batches.num_windows))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [2, 8, 9, 500, 999])
def test_evaluation_predicts_every_token_once_in_equally_many_calls(num_ranks: int, count: int) -> None:
    calls, predicted = set(), []
    for rank in range(num_ranks):
        batches = list(Batches(IDS[:count], T, B, 42, rank, num_ranks).eval_batches())
        calls.add(len(batches))
        for inputs, targets in batches:
            assert inputs.shape == (B // num_ranks, T) and inputs.min() >= 0
            kept = targets != IGNORED
            assert torch.equal(targets[kept], inputs[kept] + 1)
            predicted += targets[kept].tolist()
    assert len(calls) == 1
    assert sorted(predicted) == list(range(2, count + 1))


def test_refusals() -> None:
    with pytest.raises(UserError, match="24 is not divisible by --nproc 5 times --grad-accum 1"):
        Batches(IDS, T, B, num_ranks=5)
    with pytest.raises(UserError, match="too small.*100 tokens are 14 windows"):
        list(Batches(IDS[:100], T, B).micro_batches(1))
