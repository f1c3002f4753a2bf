"""Saves a run: checkpoints and final/. All ranks make the same calls, and all raise when one of them could not write.

With --async-save a save copies the state into host memory, and a thread (background.py) writes it like any other save. The
next save, the end of the run and every error wait for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpt2_chinese import background
from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.final import begin_final, complete_final, export_final, staging_final
from gpt2_chinese.checkpoint.find import PARTS, newest_complete
from gpt2_chinese.checkpoint.host_copy import HostCopy
from gpt2_chinese.checkpoint.model_state import BYTES_PER_NUMBER
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.errors import RunError
from gpt2_chinese.files import display
from gpt2_chinese.run.metrics import versions
from gpt2_chinese.settings import Settings

Write = Callable[[Path, Ranks], object]  # all ranks call it, with a folder that does not exist yet


class Saving:
    """Writes below --output-dir.

    Args:
        settings: resolved.
        ranks: the processes; rank 0 alone names, completes and removes folders.
        sync: called by rank 0 before it writes: a resume needs the metrics, too.
        say: prints a line.
    """

    def __init__(
        self, settings: Settings, ranks: Ranks, sync: Callable[[], object], say: Callable[[str], object]
    ) -> None:
        self.settings, self.ranks, self.sync, self.say = settings, ranks, sync, say
        self.directory = Path(settings.output_dir)
        self.checkpoints = self.directory / "checkpoints"
        self._copy = HostCopy()
        self._apart: Ranks | None = None  # for what ranks tell each other while they write in the background

    def last_good(self) -> str:
        """For an error message: the checkpoint to resume, after the save under way has ended."""
        background.wait()
        found = newest_complete(self.checkpoints) if self.ranks.is_main else None
        return f"the last good checkpoint is {display(found)}" if found else "there is no checkpoint yet"

    def settle(self, step: int | None = None) -> None:
        """Returns when no save is under way; says so if that of `step` has to wait. All ranks call it together.

        Raises:
            RunError: on all ranks, if the save has failed.
        """
        if step is not None and self.ranks.is_main and background.is_running():
            self.say(f"the save of step {step} waits until the one before it is written")
        background.wait()
        if self.settings.async_save and self.ranks.max(background.has_failed()):
            raise background.take_error() or RunError("another rank could not save")

    def save(
        self, step: int, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor],
        extra: dict[str, Any] | None, check: Callable[[], None],
    ) -> None:  # fmt: skip
        """Writes the checkpoint of a step, as `Run.save`; rank 0 calls `check` first. Raises RunError on all ranks."""
        state = self._state(step, extra)

        def write(weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
            self.sync()
            step_folder.save(self.checkpoints, step, weights, moments, state)
            self._prune(step)

        def act() -> None:
            if not self.ranks.is_main:
                return
            check()
            if not self.settings.async_save:
                return write(weights, moments)
            held = self._copy.take({**{f"model {name}": t for name, t in weights.items()}, **moments})
            plain = {name: held[f"model {name}"] for name in weights}, {name: held[name] for name in moments}
            background.start(lambda: self._together(step, Ranks(), lambda: write(*plain)))

        self.settle(step)
        self._together(step, self.ranks, act)

    def save_parts(
        self, step: int, prepare: Callable[[HostCopy | None], Write], extra: dict[str, Any] | None,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        """As `save`, but all ranks write, by the function that prepare() returns.

        With --async-save prepare() gets a HostCopy, and the ranks write in the background, in a separate process group.
        """
        staging, state = step_folder.staging_folder(self.checkpoints, step), self._state(step, extra)
        num_bytes = 3 * BYTES_PER_NUMBER * self.settings.model.num_parameters()  # weights and two moments

        def begin() -> None:
            if self.ranks.is_main:
                self.sync()
                step_folder.begin(self.checkpoints, step, num_bytes)

        def complete() -> None:
            if self.ranks.is_main:
                step_folder.complete(staging, step, state)
                self._prune(step)

        def act(ranks: Ranks) -> None:
            for each in (begin, lambda: write(staging / PARTS, ranks), complete):
                self._together(step, ranks, each)

        self.settle(step)
        self._together(step, self.ranks, lambda: check() if self.ranks.is_main else None)
        write = prepare(self._copy if self.settings.async_save else None)
        if not self.settings.async_save:
            return act(self.ranks)
        self._apart = apart = self._apart or self.ranks.apart()
        background.start(lambda: act(apart))

    def close(self) -> None:
        """Leaves the process group of saves in the background; `settle` comes before."""
        if self._apart is not None:
            self._apart.close()

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
            self._together(None, self.ranks, act)

    def _together(self, step: int | None, ranks: Ranks, act: Callable[[], object]) -> None:
        """Calls act() on all ranks, which then wait for each other. It saves a step, or final/ (None).

        Raises:
            RunError: on all ranks, when one of them could not write; what it had written to the staging folder is removed.
        """
        problem = ""
        try:
            act()
        except Exception as error:
            if not (isinstance(error, OSError | RunError) or getattr(error, "one_line", False)):
                raise
            problem = str(error)
        failed = ranks.max(ranks.num_ranks - ranks.rank if problem else 0)  # names the lowest failed rank
        if not failed:
            return
        what, staging = "final/", staging_final(self.directory / "final")
        if step is not None:
            what, staging = f"the state after step {step}", step_folder.staging_folder(self.checkpoints, step)
        if ranks.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        problem = problem or f"rank {ranks.num_ranks - int(failed)} could not write"
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
