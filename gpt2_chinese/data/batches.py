"""Batches as a pure function of (seed, step, global batch size), whatever the number of processes.

The corpus is cut into rows (rows.py): windows of seq_len, or packed documents. The targets of a window are its ids shifted
by one. Every epoch shuffles all windows anew; with several sources, each source in its own epochs (mix.py). The global
batch of a step is the next `batch_size` windows in that order, split like this (2 ranks, 2 micro-batches each):

    windows of the step    | 17   3 | 42  11 |  8  29 |  5  36 |
                             rank 0   rank 0   rank 1   rank 1
                             micro 0  micro 1  micro 0  micro 1

An epoch drops its last windows where they do not fill a batch; the next epoch shuffles them in again.

Ranks average the means of micro-batches. That is the mean over the global batch where each has the same number of targets.
Packed rows have not, so train.py multiplies each mean by `weight`: its number of targets, relative to the step's average.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpt2_chinese.data.mix import Mix
from gpt2_chinese.data.rows import IGNORED, Rows, Windows
from gpt2_chinese.data.token_cache import Tokens
from gpt2_chinese.errors import UserError

if TYPE_CHECKING:
    from gpt2_chinese.distributed.ranks import Ranks
    from gpt2_chinese.settings import Settings


class Batches:
    """The batches of one rank.

    Args:
        tokens: the corpus, Tokens or any one-dimensional array of ids, cut into windows; or rows of it.
        seq_len: T, ids in a row.
        batch_size: windows in a GLOBAL batch.
        seed: of the shuffling.
        rank, num_ranks: which part of a global batch this rank gets.
        grad_accum: micro-batches that a rank splits its part into.
        device: the device of the tensors.

    Raises:
        UserError: the corpus is too small for one batch, or the batch size is not divisible.
    """

    def __init__(
        self,
        tokens: Tokens | np.ndarray | Rows,
        seq_len: int,
        batch_size: int,
        seed: int = 42,
        rank: int = 0,
        num_ranks: int = 1,
        grad_accum: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size % (num_ranks * grad_accum):
            raise UserError(
                f"--batch-size {batch_size} is not divisible by --nproc {num_ranks} times --grad-accum {grad_accum}"
            )
        self.rows = tokens if hasattr(tokens, "cut") else Windows(getattr(tokens, "ids", tokens), seq_len)
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.rank, self.num_ranks, self.grad_accum, self.device = rank, num_ranks, grad_accum, torch.device(device)
        self.micro_size = batch_size // (num_ranks * grad_accum)
        self.num_windows = len(self.rows)
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._counted: tuple[int, int | None] = -1, None  # a step, and how many of its targets count

    @classmethod
    def of(cls, settings: Settings, ranks: Ranks) -> tuple[Batches, Batches]:
        """The training and the validation batches of one rank of a run."""
        rest = settings.seed, ranks.rank, ranks.num_ranks, settings.grad_accum, ranks.device
        return (
            cls(settings.train_rows, settings.seq_len, settings.batch_size, *rest),
            cls(settings.valid_tokens, settings.seq_len, settings.batch_size, *rest),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch."""
        return self.num_windows // self.batch_size

    def windows_of(self, step: int) -> np.ndarray:
        """The global batch of a step (counted from 1): (batch_size,) int64 numbers of windows, in global order."""
        if self.steps_per_epoch < 1:
            raise UserError(too_small("the training corpus", self.rows, self.batch_size))
        if isinstance(self.rows, Mix):
            return self.rows.draw(self.seed, (step - 1) * self.batch_size, self.batch_size)
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]

    def micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the (inputs, targets) of this rank at a step (counted from 1), int64 (b, T) on the device.

        b = batch_size / (num_ranks * grad_accum), and there are grad_accum of them.
        """
        windows = self.windows_of(step)
        for micro in range(self.grad_accum):
            start = (self.rank * self.grad_accum + micro) * self.micro_size
            yield self._cut(windows[start : start + self.micro_size])

    def weight(self, step: int, targets: torch.Tensor) -> torch.Tensor | float:
        """Weight of a micro-batch's mean loss over these targets, so that the mean of all is that of the global batch.

        Targets that count in the micro-batch, over the mean of that number in the step; 1.0 where all targets count. Every
        rank knows the windows of the whole step, so nothing is sent.
        """
        if step != self._counted[0]:
            self._counted = step, self.rows.num_targets(self.windows_of(step))
        counted = self._counted[1]
        if counted is None:
            return 1.0
        return (targets != IGNORED).sum() * (self.num_ranks * self.grad_accum / counted)

    def eval_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (inputs, targets) that together, over all ranks, predict every id of the corpus after the first once.

        Every rank gets the same number of batches, so that collectives inside the model match. Missing rows at the end
        are filled up with rows whose targets are all IGNORED. In the last window some targets may be. The rows are windows.
        """
        total = -(-(self.rows.num_ids - 1) // self.seq_len)
        at_once = self.micro_size * self.num_ranks
        for first in range(0, total, at_once):
            start = first + self.rank * self.micro_size
            yield self._cut(np.arange(start, start + self.micro_size))

    def _cut(self, windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (b, T) int64 on the device."""
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in self.rows.cut(windows))
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def too_small(what: str, rows: Rows, batch_size: int) -> str:
    """The error message for a corpus that does not fill one global batch."""
    return (
        f"{what} is too small: {rows.num_ids} tokens are {len(rows)} windows of --seq-len "
        f"{rows.seq_len}, fewer than one --batch-size {batch_size}: give more text, or lower one of the two"
    )
