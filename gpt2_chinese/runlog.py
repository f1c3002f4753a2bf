"""What every chapter says and leaves behind: header, progress, metrics, checkpoints, samples, summary.

    run = Run(settings, ranks)
    for step in run.steps():
        ...
        run.log(step, loss=loss, lr=lr, grad_norm=grad_norm)
        if run.evaluate_now(step):
            run.log_evaluation(step, evaluate(model, valid, ranks))
        if run.save_now(step):
            run.save(step, weights, moments)
    run.finish(weights)

Every rank makes the same calls; rank 0 alone prints and writes. Once a step they agree, by one number, whether to go on:
a signal ends the run after the step, saved (stopping.py), and a loss that stays without a number ends it with an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import gpt2_chinese
from gpt2_chinese import checkpoint, stopping
from gpt2_chinese.decoding import generate
from gpt2_chinese.errors import RunError, fail
from gpt2_chinese.files import display
from gpt2_chinese.header import Rows, print_header, print_rows
from gpt2_chinese.locks import try_lock
from gpt2_chinese.progress import Progress
from gpt2_chinese.ranks import Ranks
from gpt2_chinese.resolve import in_use, what_next
from gpt2_chinese.sampling import Sampling, generator_of
from gpt2_chinese.settings import Settings
from gpt2_chinese.traffic import tcp_bytes
from gpt2_chinese.weights import load_model

PROMPTS = ("今天天气", "这家小店", "中国古代")
# Steps in a row without a finite loss and gradient, after which a run ends. In fp32 and bf16 the first one has spoilt the
# weights; fp16 skips such steps and halves its scale, from 2**16 down to 1 and a little further.
PATIENCE, PATIENCE_FP16 = 5, 20
GO_ON, STOP, HOPELESS = 0, 1, 2  # what ranks agree about: the largest counts


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seeds torch for one step, so that dropout after a resume is what it would have been without the stop."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_009 + rank)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {"gpt2_chinese": gpt2_chinese.__version__, "torch": torch.__version__, "python": platform.python_version()}


class Run:
    """One run of a chapter.

    Args:
        settings: resolved.
        ranks: the processes.
        about: what the chapter adds to the header, as (name, value) rows.
        first_step: where to go on, when it is not a checkpoint that says so: in memory, after the loss of a worker.

    Attributes:
        resume_from: the checkpoint to go on from, or the file with the weights to begin with; None: those of the seed.
        first_step: the first step this process will take.
    """

    def __init__(
        self, settings: Settings, ranks: Ranks, about: Rows | None = None, first_step: int | None = None
    ) -> None:
        self.settings, self.ranks = settings, ranks
        self.directory = Path(settings.output_dir)
        self.resume_from = settings.resume_from
        self.first_step = first_step or settings.resume_step + 1
        self._goes_on = self.first_step > 1
        if ranks.max(self.first_step) != -ranks.max(-self.first_step):
            ranks.close()
            fail("the ranks found different checkpoints: is --output-dir on a disk that all of them share?")
        free = not ranks.is_main or self._take_folder() or first_step is not None
        if ranks.max(not free):
            ranks.close()
            fail(in_use(self.directory))
        self.last_evaluation: dict[str, float] = {}
        self._last_step = settings.max_steps  # an earlier one once the run is told to stop
        self._lost_in_a_row = 0
        self._row: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._traffic: tuple[int, int] | None = None
        self._step_start = time.perf_counter()
        self._start = time.perf_counter()
        if ranks.is_main:
            self._prepare_folder()
            start: Rows = []
            if self._goes_on:
                source = display(self.resume_from) if self.first_step == settings.resume_step + 1 else "memory"
                start = [("resuming", f"{source}, next is step {self.first_step}")]
            elif self.resume_from:
                start = [("weights", f"begin as those of {display(self.resume_from)}")]
            print_header(settings, ranks, [*(about or []), ("output", display(self.directory)), *start])

    # -- start --------------------------------------------------------------------------------------------------------

    def _take_folder(self) -> bool:
        """Locks metrics.jsonl, as every run does to the one it writes; False when another run has it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        metrics = self.directory / "metrics.jsonl"
        self._metrics = metrics.open("a", encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            return try_lock(self._metrics.fileno()) and os.path.samestat(os.fstat(self._metrics.fileno()), metrics.stat())
        return False

    def _prepare_folder(self) -> None:
        settings = self.settings
        folder = self.directory / "checkpoints"
        if settings.resume == "never" and self.first_step == 1 and folder.exists():
            aside = next(p for n in range(1, 10**6) if not (p := self.directory / f"checkpoints.old{n}").exists())
            os.rename(folder, aside)
            print(f"--resume never: earlier checkpoints moved to {display(aside)}")
        checkpoint.write_json(
            self.directory / "config.json",
            {
                "chapter": settings.chapter,
                **settings.values(),
                "model": settings.model.to_dict(),
                "vocab_size": settings.vocab_size,
                "vocabulary": settings.vocabulary.facts(),
                "num_parameters": settings.model.num_parameters(),
                "resumed_from": str(self.resume_from) if self._goes_on else None,
                "versions": versions(),
            },
        )
        metrics = self.directory / "metrics.jsonl"
        keep = _rows_before(metrics, self.first_step) if self._goes_on else []
        self.last_evaluation = next((_evaluation(row) for row in reversed(keep) if "valid_loss" in row), {})
        beside = metrics.with_name("metrics.jsonl.tmp")
        beside.write_text("".join(json.dumps(row) + "\n" for row in keep), encoding="utf-8")
        taken, self._metrics = self._metrics, beside.open("a", encoding="utf-8", buffering=1)
        try_lock(self._metrics.fileno())
        os.replace(beside, metrics)
        taken.close()

        from torch.utils.tensorboard import SummaryWriter  # late: it takes a second to import

        self._board = SummaryWriter(str(self.directory / "tensorboard"), purge_step=self.first_step)
        if not self._goes_on:
            listed = "\n".join(f"    {name}: {value}" for name, value in settings.values().items())
            self._board.add_text("settings", listed, 0)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The steps to take, counted from 1; seeds torch before each and moves the progress bar."""
        step = self.first_step - 1
        if self.ranks.is_main:
            self._progress = Progress(step, self.settings.max_steps)
            self._traffic = tcp_bytes() if self.ranks.num_ranks > 1 else None
        try:
            while step < self._last_step:
                step += 1
                self._agree(step)
                seed_step(self.settings.seed, step, self.ranks.rank)
                self._step_start = time.perf_counter()
                yield step
        finally:
            if self._progress:
                self._flush_row()
                self._progress.close()

    def _agree(self, step: int) -> None:
        """All ranks learn whether one of them was told to stop, which makes this step the last, or sees no hope.

        Raises:
            RunError: on all ranks, after too many steps without a finite loss.
        """
        # ranks that do not go in step have met after a step that evaluated or saved, not before the next one that will
        if not (self.settings.in_step or step == self.first_step or self.evaluate_now(step - 1) or self.save_now(step - 1)):
            return
        patience = PATIENCE_FP16 if self.settings.precision == "fp16" else PATIENCE
        own = HOPELESS if self._lost_in_a_row >= patience else STOP if stopping.asked() else GO_ON
        agreed = self.ranks.max(own)
        if agreed == HOPELESS:
            raise RunError(
                f"{patience} steps in a row, up to step {step - 1}, had no finite loss and gradients; {self._last_good()}"
            )
        if agreed == STOP:
            self._last_step = step

    def _last_good(self) -> str:
        """For an error: where to go on."""
        found = checkpoint.newest_complete(self.directory / "checkpoints") if self.ranks.is_main else None
        return f"the last good checkpoint is {display(found)}" if found else "there is no checkpoint yet"

    def log(
        self, step: int, loss: float, lr: float, grad_norm: float | torch.Tensor | None = None,
        batch_share: float = 1.0, **more: float,
    ) -> None:  # fmt: skip
        """Notes one step; rank 0's numbers count.

        Args:
            step: from 1 on.
            loss: mean over the GLOBAL batch, nats per token.
            lr, grad_norm: of this step; the norm is that before clipping.
            batch_share: what part of the global batch the step has used: below 1 where it did not wait for all ranks.
            more: goes along as it is.
        """
        if not self.ranks.is_main:
            return
        settings = self.settings
        if settings.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._step_start
        tokens = settings.batch_size * settings.seq_len
        self._flush_row()
        self._row = {
            "step": step,
            "loss": float(loss),
            "lr": lr,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "tokens": step * tokens,
            "tokens_per_s": batch_share * tokens / seconds,
            "step_s": seconds,
            "peak_bytes": peak_bytes(self.ranks.device),
            **self._step_traffic(),
            **{name: float(value) if isinstance(value, torch.Tensor) else value for name, value in more.items()},
        }
        self._progress.step(step, self._row["loss"], batch_share * tokens, seconds)
        lost = not all(math.isfinite(self._row[name] or 0.0) for name in ("loss", "grad_norm"))
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        if not math.isfinite(self._row["loss"]):
            self._progress.write(f"warning: the loss of step {step} is {self._row['loss']}: a smaller --lr may help")
        if not self.evaluate_now(step):
            self._flush_row()

    def _step_traffic(self) -> dict[str, int]:
        """What rank 0 has sent and received since the last row, as the kernel counts it; nothing where it does not.

        Received bytes that are still on their way count for the next step: over many steps they are exact, over one not.
        """
        before, now = self._traffic, tcp_bytes() if self._traffic else None
        if before is None or now is None:
            return {}
        self._traffic = now
        return {"sent_bytes": max(0, now[0] - before[0]), "received_bytes": max(0, now[1] - before[1])}

    def _flush_row(self) -> None:
        """Writes the line of the last step; it waits for the evaluation that belongs to it."""
        row, self._row = self._row, {}
        if not row:
            return
        step = row["step"]
        due = step % self.settings.log_every == 0 or step in (1, self.settings.max_steps) or "valid_loss" in row
        if not due:
            return
        row = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
        try:
            self._metrics.write(json.dumps(row) + "\n")
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(("valid/" if name.startswith("valid_") else "train/") + name, value, step)
        except OSError as error:
            raise RunError(f"cannot write the metrics of step {step}: {error}; {self._last_good()}") from None

    def evaluate_now(self, step: int) -> bool:
        """True at the steps of --eval-every and at the last."""
        return step % self.settings.eval_every == 0 or step == self.settings.max_steps

    def save_now(self, step: int) -> bool:
        """True at the steps of --save-every, at the last, and at the one after which a signal has the run stop."""
        return step % self.settings.save_every == 0 or step == self._last_step

    def log_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Notes valid_loss, valid_ppl and valid_acc of a step."""
        self.last_evaluation = dict(results)
        if self.ranks.is_main:
            self._row = {**(self._row or {"step": step}), **results}
            self._flush_row()
            self._progress.write(
                f"step {step}: validation loss {results['valid_loss']:.4f}, perplexity {results['valid_ppl']:.1f}, "
                f"next token right {results['valid_acc']:.1%}"
            )

    def save(
        self,
        step: int,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Writes the checkpoint of a step (rank 0); all ranks wait until it is complete.

        Args:
            step: the step that is done.
            weights, moments: by name as checkpoint.py describes; other ranks may pass anything.
            extra: JSON content that the chapter wants back on resume.
        """
        folder, state = self.directory / "checkpoints", self._state(step, extra)

        def write() -> None:
            if self.ranks.is_main:
                self._before_saving()
                checkpoint.save(folder, step, weights, moments, state)
                checkpoint.prune(folder, self.settings.keep, step)

        self._together(f"the state after step {step}", checkpoint.beside_of(folder, step), write)

    def save_parts(self, step: int, write: Callable[[Path], object], extra: dict[str, Any] | None = None) -> None:
        """The same where every rank writes its own part: all ranks call write(folder), with a folder that is not there."""
        folder = self.directory / "checkpoints"
        beside, state = checkpoint.beside_of(folder, step), self._state(step, extra)
        num_bytes = 3 * checkpoint.BYTES_EACH * self.settings.model.num_parameters()  # weights and two moments

        def begin() -> None:
            if self.ranks.is_main:
                self._before_saving()
                checkpoint.begin(folder, step, num_bytes)

        def complete() -> None:
            if self.ranks.is_main:
                checkpoint.complete(beside, step, state)
                checkpoint.prune(folder, self.settings.keep, step)

        for act in (begin, lambda: write(beside / checkpoint.PARTS), complete):
            self._together(f"the state after step {step}", beside, act)

    def _before_saving(self) -> None:
        """What a resume takes from the curve is on the disk before the checkpoint is there.

        Raises:
            RunError: the step had no finite loss and gradients; in fp16 the next one may, and the weights are looked at.
        """
        if self._lost_in_a_row and self.settings.precision != "fp16":
            raise RunError("its loss or gradients are not finite")
        self._board.flush()
        os.fsync(self._metrics.fileno())

    def _together(self, what: str, beside: Path, act: Callable[[], object]) -> None:
        """All ranks act, and wait for each other.

        Raises:
            RunError: on all ranks, when one of them could not write; what it had written to `beside` is removed.
        """
        said = ""
        try:
            act()
        except Exception as error:
            if not (isinstance(error, OSError | RunError) or getattr(error, "one_line", False)):
                raise
            said = str(error)
        failed = self.ranks.max(self.ranks.num_ranks - self.ranks.rank if said else 0)  # the first of those that could not
        if not failed:
            return
        if self.ranks.is_main:
            shutil.rmtree(beside, ignore_errors=True)
        said = said or f"rank {self.ranks.num_ranks - int(failed)} could not write"
        raise RunError(f"{what} is not saved: {said}; {self._last_good()}")

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

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(
        self, weights: Mapping[str, torch.Tensor] | Callable[[Path], object], table: Rows | None = None
    ) -> None:
        """Writes final/, generates from it, prints the summary, and leaves the process group.

        Args:
            weights: all of them on rank 0 (other ranks may pass anything), or what all ranks call with the path of a file
                to write them to, model.safetensors.
            table: rows of the chapter's own, printed in the summary.

        After a signal it only says how to go on; what final/ an earlier run may have left stays.
        """
        if self._last_step < self.settings.max_steps:
            self._say_stopped()
            return
        own = torch.zeros(self.ranks.num_ranks, dtype=torch.int64)
        own[self.ranks.rank] = peak_bytes(self.ranks.device)
        peaks = self.ranks.sum(own).tolist()
        settings, final = self.settings, self.directory / "final"
        about = {"step": settings.max_steps, "chapter": settings.chapter, **self.last_evaluation}
        about["peak_bytes_by_rank"] = peaks
        beside = checkpoint.beside_final(final)

        def begin() -> None:
            if self.ranks.is_main:
                checkpoint.begin_final(final, checkpoint.BYTES_EACH * settings.model.num_parameters())

        def complete() -> None:
            vocabulary = settings.vocab, about, settings.vocab_profile
            if self.ranks.is_main and callable(weights):
                checkpoint.complete_final(beside, final, settings.model, *vocabulary)
            elif self.ranks.is_main:
                checkpoint.export_final(final, settings.model, weights, *vocabulary)

        for act in (begin, lambda: weights(beside / "model.safetensors"), complete) if callable(weights) else (complete,):
            self._together("final/", beside, act)
        if self.ranks.is_main:
            self._print_samples(final)
            memory = ", ".join(f"rank {rank} {peak / 2**20:.0f} MiB" for rank, peak in enumerate(peaks))
            self._print_summary([("peak memory", memory)], table or [])
            self._board.add_hparams(
                {k: v for k, v in settings.values().items() if isinstance(v, int | float | str)},
                {f"hparam/{k}": v for k, v in self.last_evaluation.items()},
                run_name=".",
            )
            self._board.close()
            self._metrics.close()
        self.ranks.barrier()
        self.ranks.close()

    def _say_stopped(self) -> None:
        if self.ranks.is_main:
            saved = display(self.directory / "checkpoints" / f"step_{self._last_step:06d}")
            by = stopping.asked() or "a signal to another rank"
            print(f"\nStopped by {by} after step {self._last_step}: the same command goes on from {saved}", flush=True)
            self._board.close()
            self._metrics.close()
        self.ranks.barrier()
        self.ranks.close()

    def _print_samples(self, final: Path) -> None:
        """Three continuations, from what was written: final/ is read back as anyone would."""
        model, vocabulary = load_model(final, self.ranks.device)
        print("\nThree continuations (the prompt in 「」):")
        prompts = [vocabulary.encode_prompt(prompt) for prompt in PROMPTS]
        generators = [generator_of(self.settings.seed, i, 0) for i in range(len(prompts))]
        rows = generate(model, prompts, 60, Sampling(temperature=0.8, top_k=40), generators, vocabulary.end_id)
        for prompt, new in zip(PROMPTS, rows, strict=True):
            text = vocabulary.decode(new)
            print(f"  「{prompt}」{text}")
            self._board.add_text(f"samples/{prompt}", f"「{prompt}」{text}", self.settings.max_steps)

    def _print_summary(self, more: Rows, table: Rows) -> None:
        rows: Rows = [("time", f"{time.perf_counter() - self._start:.0f} s, of which {self._progress.summary()}")]
        if self.last_evaluation:
            e = self.last_evaluation
            rows.append(("validation", f"loss {e['valid_loss']:.4f}, perplexity {e['valid_ppl']:.1f}"))
        rows += more
        for name in ("final", "checkpoints", "metrics.jsonl", "tensorboard"):
            rows.append((name, display(self.directory / name)))
        print("\nDone.")
        print_rows(rows)
        if table:
            print()
            print_rows(table)
        print(f"\nTo go on:\n{what_next(self.settings)}", flush=True)


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: by torch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return 1024 * int(found[1])
    import resource  # on Linux only the second choice: there its count begins with that of the process that started this one

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("valid_loss", "valid_ppl", "valid_acc")}


def _rows_before(metrics: Path, step: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl before a step; a last line cut short by a kill is left out."""
    rows = []
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("step", step) < step:
            rows.append(row)
    return rows
