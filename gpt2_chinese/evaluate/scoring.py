"""Scores every token of a corpus, and adds the scores up by genre, by position in the context, and by frequency.

A window of seq_len ids predicts seq_len targets; windows begin every `stride` ids, and a target counts where it first
appears. With seq_len 8, stride 4 (digits: position in the context of a target that counts, dots: seen before, not counted):

    window 0   0 1 2 3 4 5 6 7
    window 1           . . . . 4 5 6 7
    window 2                   . . . . 4 5 6 7

With a stride of seq_len these are the windows of the evaluation in training. A smaller stride gives targets more context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2_chinese.data.batches import IGNORED
from gpt2_chinese.model.gpt2 import next_token_loss
from gpt2_chinese.run.optim import autocast

LOSS, FIRST, AMONG_FIVE, COUNT = range(4)  # the columns of sums
CLASS_ENDS = (10, 100, 1000)  # ranks of frequency at which a class ends; all other ids are in the last class


@dataclass
class Windows:
    """Where windows begin and from which position on their targets count.

    Attributes:
        starts: (N,) int64, index of the first input of each window.
        first: (N,) int64, position of each window's first target that counts.
    """

    starts: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, num_ids: int, seq_len: int, stride: int) -> Windows:
        """Windows that count each of the num_ids - 1 targets once; 1 <= stride <= seq_len."""
        num = 1 + max(0, -(-(num_ids - 1 - seq_len) // stride))
        first = np.full(num, seq_len - stride, np.int64)
        first[0] = 0
        return cls(np.arange(num, dtype=np.int64) * stride, first)


def frequency_classes(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The class of each id, (vocab_size,) int64: 0 for the most frequent of `ids`, see CLASS_ENDS; ties by id."""
    counts = np.bincount(ids, minlength=vocab_size)
    ranks = np.empty(vocab_size, np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(vocab_size)
    return np.searchsorted(CLASS_ENDS, ranks, side="right")


def batches(ids: np.ndarray, windows: Windows, seq_len: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
    """Yields inputs (b, T) and targets (b, T) int64, IGNORED where they do not count, and the targets' index (b, T)."""
    columns = np.arange(seq_len)
    for begin in range(0, len(windows.starts), batch_size):
        index = windows.starts[begin : begin + batch_size, None] + columns
        inputs = np.where(index < len(ids), ids[np.minimum(index, len(ids) - 1)].astype(np.int64), 0)
        index += 1
        counted = (index < len(ids)) & (columns >= windows.first[begin : begin + batch_size, None])
        targets = np.where(counted, ids[np.minimum(index, len(ids) - 1)].astype(np.int64), IGNORED)
        yield torch.from_numpy(inputs), torch.from_numpy(targets), index


@torch.no_grad()
def score(
    model: Any, ids: np.ndarray, windows: Windows, seq_len: int, batch_size: int, genre_ends: np.ndarray,
    classes: np.ndarray, precision: str = "fp32", device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yields the terms that each batch adds to the sums of LOSS, FIRST, AMONG_FIVE and COUNT, float64 on the CPU.

    Args:
        model: in evaluation mode; logits (b, T, V) for inputs (b, T).
        ids: (N,) ids of the corpus, N at least 2.
        windows: the windows over `ids`.
        seq_len, batch_size: T and b.
        genre_ends: (G,) index in `ids` at which each genre ends.
        classes: (V,) the frequency class of each id.
        precision: of the matrix products.
        device: where the model is.

    Yields:
        (G, T, 4) by genre and position, (number of classes, 4) by frequency.
    """
    device = torch.device(device)
    for inputs, targets, index in batches(ids, windows, seq_len, batch_size):
        goal = targets.to(device)
        with autocast(device, precision):
            logits = model(inputs.to(device))
        loss = next_token_loss(logits, goal, reduction="none").view(goal.shape)
        first = logits.argmax(-1) == goal
        five = (logits.topk(min(5, logits.shape[-1]), dim=-1).indices == goal[..., None]).any(-1)
        scores = torch.stack([loss, first, five, torch.ones_like(loss)], dim=-1).cpu().double()
        row, column = (targets != IGNORED).nonzero(as_tuple=True)
        scores = scores[row, column]
        genre = torch.from_numpy(np.searchsorted(genre_ends, index[row, column], side="right"))
        by_place = torch.zeros(len(genre_ends) * seq_len, 4, dtype=torch.float64)
        by_class = torch.zeros(len(CLASS_ENDS) + 1, 4, dtype=torch.float64)
        by_place.index_add_(0, genre * seq_len + column, scores)
        by_class.index_add_(0, torch.from_numpy(classes)[targets[row, column]], scores)
        yield by_place.view(len(genre_ends), seq_len, 4), by_class
