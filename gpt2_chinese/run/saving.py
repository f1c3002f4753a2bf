"""Saves a run: checkpoints and final/. All ranks make the same calls, and all raise when one of them could not write."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.final import begin_final, complete_final, export_final, staging_final
from gpt2_chinese.checkpoint.find import PARTS, newest_complete
from gpt2_chinese.checkpoint.model_state import BYTES_PER_NUMBER
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.errors import RunError
from gpt2_chinese.files import display
from gpt2_chinese.run.metrics import versions
from gpt2_chinese.settings import Settings


class Saving:
    """Writes below --output-dir.

    Args:
        settings: resolved.
        ranks: the processes; rank 0 alone names, completes and removes folders.
    """

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.directory = Path(settings.output_dir)
        self.checkpoints = self.directory / "checkpoints"

    def last_good(self) -> str:
        """For an error message: the checkpoint to resume."""
        found = newest_complete(self.checkpoints) if self.ranks.is_main else None
        return f"the last good checkpoint is {display(found)}" if found else "there is no checkpoint yet"

    def save(
        self, step: int, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor],
        extra: dict[str, Any] | None, before: Callable[[], None],
    ) -> None:  # fmt: skip
        """Writes the checkpoint of a step, as `Run.save`; rank 0 calls `before` first. Raises RunError on all ranks."""
        state = self._state(step, extra)

        def write() -> None:
            if self.ranks.is_main:
                before()
                step_folder.save(self.checkpoints, step, weights, moments, state)
                self._prune(step)

        self._together(f"the state after step {step}", step_folder.staging_folder(self.checkpoints, step), write)

    def save_parts(
        self, step: int, write: Callable[[Path], object], extra: dict[str, Any] | None, before: Callable[[], None]
    ) -> None:
        """As `save`, but all ranks call write(folder), with a folder that does not exist yet."""
        staging, state = step_folder.staging_folder(self.checkpoints, step), self._state(step, extra)
        num_bytes = 3 * BYTES_PER_NUMBER * self.settings.model.num_parameters()  # weights and two moments

        def begin() -> None:
            if self.ranks.is_main:
                before()
                step_folder.begin(self.checkpoints, step, num_bytes)

        def complete() -> None:
            if self.ranks.is_main:
                step_folder.complete(staging, step, state)
                self._prune(step)

        for act in (begin, lambda: write(staging / PARTS), complete):
            self._together(f"the state after step {step}", staging, act)

    def write_final(self, weights: Mapping[str, torch.Tensor] | Callable[[Path], object], about: dict[str, Any]) -> None:
        """Writes final/; `weights` as `Run.finish` takes them. Raises RunError on all ranks."""
        settings, final = self.settings, self.directory / "final"
        staging = staging_final(final)

        def begin() -> None:
            if self.ranks.is_main:
                begin_final(final, BYTES_PER_NUMBER * settings.model.num_parameters())

        def complete() -> None:
            vocabulary = settings.vocab, about, settings.vocab_profile
            if self.ranks.is_main and callable(weights):
                complete_final(staging, final, settings.model, *vocabulary)
            elif self.ranks.is_main:
                export_final(final, settings.model, weights, *vocabulary)

        for act in (begin, lambda: weights(staging / "model.safetensors"), complete) if callable(weights) else (complete,):
            self._together("final/", staging, act)

    def _together(self, what: str, staging: Path, act: Callable[[], object]) -> None:
        """Calls act() on all ranks, which then wait for each other.

        Raises:
            RunError: on all ranks, when one of them could not write; what it had written to `staging` is removed.
        """
        problem = ""
        try:
            act()
        except Exception as error:
            if not (isinstance(error, OSError | RunError) or getattr(error, "one_line", False)):
                raise
            problem = str(error)
        failed = self.ranks.max(self.ranks.num_ranks - self.ranks.rank if problem else 0)  # names the lowest failed rank
        if not failed:
            return
        if self.ranks.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        problem = problem or f"rank {self.ranks.num_ranks - int(failed)} could not write"
        raise RunError(f"{what} is not saved: {problem}; {self.last_good()}")

    def _prune(self, step: int) -> None:
        step_folder.prune(self.checkpoints, step, self.settings.keep_last, self.settings.keep_every)

    def _state(self, step: int, extra: dict[str, Any] | None) -> dict[str, Any]:
        settings = self.settings
        return {
            "chapter": settings.chapter,
            "tokens": step * settings.batch_size * settings.seq_len,
            "model": settings.model.to_dict(),
            "vocabulary": settings.vocabulary.facts(),
            "settings": settings.values(),
            "versions": versions(),
            "extra": extra or {},
        }
