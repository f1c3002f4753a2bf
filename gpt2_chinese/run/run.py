"""What every chapter prints and writes: header, progress, metrics, checkpoints, samples, summary.

    run = Run(settings, ranks)
    run.resume(model, optimizer, scaler)
    for step in run.steps():
        ...
        run.log(step, loss=loss, lr=lr, grad_norm=grad_norm, in_sync=model)
        if run.evaluate_now(step):
            run.log_evaluation(step, evaluate_model(model, valid, ranks))
        if run.save_now(step):
            run.save(step, weights, moments)
    run.finish(weights)

Every rank makes the same calls; rank 0 alone prints and writes. Before each step the ranks agree, by one number, whether to
go on. A signal ends the run after this step, which is saved (stop_signal.py). A loss that stays NaN or infinite ends it
with an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from durable.files import write_json
from gpt2_chinese import background
from gpt2_chinese.checkpoint import verdicts
from gpt2_chinese.checkpoint.host_copy import HostCopy
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.checkpoint.model_state import load_adamw_moments, load_weights
from gpt2_chinese.checkpoint.trained_model import load_model
from gpt2_chinese.data.mix import Mix
from gpt2_chinese.distributed import stop_signal
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.distributed.socket_bytes import Counts, between, tcp_bytes
from gpt2_chinese.distributed.weights_check import check_in_sync
from gpt2_chinese.errors import RunError, fail
from gpt2_chinese.files import display
from gpt2_chinese.generate.decoding import generate
from gpt2_chinese.generate.sampling import Sampling, generator_of
from gpt2_chinese.progress import Progress
from gpt2_chinese.run.flops import Rates
from gpt2_chinese.run.header import Rows, print_header, print_rows
from gpt2_chinese.run.metrics import Metrics, evaluation_of, peak_bytes, versions
from gpt2_chinese.run.resolve import in_use, what_next
from gpt2_chinese.run.saving import Saving, Write
from gpt2_chinese.settings import Settings
from gpt2_chinese.vocabulary.profiles import knows_chinese

PROMPTS = ("今天天气", "这家小店", "中国古代")
ENGLISH_PROMPTS = ("The weather today", "This small shop", "In ancient China")  # of a vocabulary without Chinese characters
# Steps in a row without a finite loss and gradient, after which a run ends. In fp32 and bf16 the first one has already
# damaged the weights. fp16 skips such steps and halves its scale: 16 halvings lead from 2**16 to 1.
PATIENCE, PATIENCE_FP16 = 5, 20
GO_ON, STOP, HOPELESS, UNSAVED = 0, 1, 2, 3  # each rank's vote before a step; the largest wins


Load = Callable[[Path, torch.device], tuple[Any, Any]]  # (a folder, where to) -> (model, vocabulary)


def prompts_for(vocabulary: Any) -> tuple[str, ...]:
    """PROMPTS, or ENGLISH_PROMPTS for a vocabulary that no Chinese text made."""
    return PROMPTS if knows_chinese(vocabulary.file.entries) else ENGLISH_PROMPTS


def continuations(model: Any, vocabulary: Any, seed: int) -> dict[str, str]:
    """What a model in evaluation mode writes after each prompt of prompts_for."""
    texts = prompts_for(vocabulary)
    prompts = [vocabulary.encode_prompt(prompt) for prompt in texts]
    generators = [generator_of(seed, i, 0) for i in range(len(prompts))]
    rows = generate(model, prompts, 60, Sampling(temperature=0.8, top_k=40), generators, vocabulary.end_id)
    return dict(zip(texts, map(vocabulary.decode, rows), strict=True))


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seeds torch for one step, so that dropout after a resume draws the same numbers as without the stop."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_009 + rank)


class Run:
    """One run of a chapter.

    Args:
        settings: resolved.
        ranks: the processes.
        first_step: the first step to take, where no checkpoint tells it: after the loss of a worker the state is in memory.
        header: print it now. If False, the chapter calls print_header once it has a model, which adds rows.

    Attributes:
        resume_from: the checkpoint to resume from, or the file with the first weights; None: the seed decides them.
        first_step: the first step this process will take.
    """

    def __init__(
        self, settings: Settings, ranks: Ranks, first_step: int | None = None, header: bool = True
    ) -> None:
        self.settings, self.ranks = settings, ranks
        self.directory = Path(settings.output_dir)
        self._metrics = Metrics(self.directory, Rates.of(settings, ranks))
        self._saving = Saving(settings, ranks, self._metrics.sync, self._say)
        self.resume_from = settings.resume_from
        self.first_step = first_step or settings.resume_step + 1
        if ranks.max(self.first_step) != -ranks.max(-self.first_step):
            ranks.close()
            fail("the ranks found different checkpoints: is --output-dir on a disk that all of them share?")
        if ranks.is_main:
            verdicts.forget()
        free = not ranks.is_main or self._metrics.take() or first_step is not None
        if ranks.max(not free):
            ranks.close()
            fail(in_use(self.directory))
        self.last_evaluation: dict[str, float] = {}
        self._last_step = settings.max_steps  # an earlier one once the run is told to stop
        self._lost_in_a_row = 0
        self._row: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._traffic: Counts | None = None
        self._step_start = time.perf_counter()
        self._start = time.perf_counter()
        if ranks.is_main:
            self._prepare_folder()
        if header:
            self.print_header()

    # -- start --------------------------------------------------------------------------------------------------------

    def print_header(self, more: Rows | None = None) -> None:
        """Prints what will run (rank 0): all that settings say, and `more` rows."""
        if not self.ranks.is_main:
            return
        start: Rows = []
        if self._goes_on:
            source = display(self.resume_from) if self.first_step == self.settings.resume_step + 1 else "memory"
            start = [("resuming", f"{source}, next is step {self.first_step}")]
        elif self.resume_from:
            start = [("weights", f"begin as those of {display(self.resume_from)}")]
        rows = [*self.settings.about(), *(more or []), ("output", display(self.directory)), *start]
        print_header(self.settings, self.ranks, rows)

    @property
    def _goes_on(self) -> bool:
        """True when earlier steps have been taken, by another process or before a worker was lost."""
        return self.first_step > 1

    def _prepare_folder(self) -> None:
        settings = self.settings
        folder = self.directory / "checkpoints"
        if settings.resume == "never" and self.first_step == 1 and folder.exists():
            aside = next(p for n in range(1, 10**6) if not (p := self.directory / f"checkpoints.old{n}").exists())
            os.rename(folder, aside)
            print(f"--resume never: earlier checkpoints moved to {display(aside)}")
        write_json(
            self.directory / "config.json",
            {
                "chapter": settings.chapter,
                "command": settings.argv,
                **settings.values(),
                "model": settings.model.to_dict(),
                "vocab_size": settings.vocab_size,
                "vocabulary": settings.vocabulary.facts(),
                "num_parameters": settings.model.num_parameters(),
                "resumed_from": str(self.resume_from) if self._goes_on else None,
                "versions": versions(),
            },
        )
        kept = self._metrics.begin(self.first_step, settings.values())
        if settings.comment and settings.comment != settings.earlier_comment:
            self._metrics.text("comment", settings.comment, self.first_step - 1)
        self.last_evaluation = next((evaluation_of(row) for row in reversed(kept) if "valid_loss" in row), {})

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: Any) -> None:
        """Loads weights, moments and loss scale from `resume_from`; does nothing if that is None. Every rank calls it.

        Args:
            model: a plain one: each rank holds all weights.
            optimizer: AdamW of its parameters; None on a rank that does not step, which needs no moments.
            scaler: torch.amp.GradScaler, or a chapter's own.
        """

        def load_plain(weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
            load_weights(model, weights)
            if optimizer is not None:
                load_adamw_moments(model, optimizer, moments)

        self.resume_parts(load_plain, scaler)

    def resume_parts(
        self,
        load_part: Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], object],
        scaler: Any = None,
    ) -> None:
        """The same for ranks that each hold a part: load_part(weights, moments) gets all, and picks this rank's part."""
        if self.resume_from is None:
            return
        weights, moments, state = load(self.resume_from)
        load_part(weights, moments)
        if scaler is not None and scaler.is_enabled() and state["extra"].get("scaler"):
            scaler.load_state_dict(state["extra"]["scaler"])

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
        """Ends the run after this step if any rank got a signal, and at once if any counted too many bad losses.

        Raises:
            RunError: on all ranks, after too many steps without a finite loss, or a save in the background that failed.
        """
        # Asynchronous ranks meet only after steps that evaluate or save.
        if not (self.settings.in_step or step == self.first_step or self.evaluate_now(step - 1) or self.save_now(step - 1)):
            return
        patience = PATIENCE_FP16 if self.settings.precision == "fp16" else PATIENCE
        own = HOPELESS if self._lost_in_a_row >= patience else STOP if stop_signal.asked() else GO_ON
        agreed = self.ranks.max(UNSAVED if background.has_failed() else own)
        if agreed == UNSAVED:
            self._saving.settle()
        if agreed == HOPELESS:
            raise RunError(
                f"{patience} steps in a row, up to step {step - 1}, had no finite loss and gradients; "
                f"{self._saving.last_good()}"
            )
        if agreed == STOP:
            self._last_step = step

    def log(
        self, step: int, loss: float, lr: float, grad_norm: float | torch.Tensor | None = None,
        in_sync: nn.Module | None = None, among: Ranks | None = None, batch_share: float = 1.0, **more: float,
    ) -> None:  # fmt: skip
        """Logs one step: the numbers of rank 0.

        Args:
            step: from 1 on.
            loss: mean over the GLOBAL batch, nats per token.
            lr, grad_norm: of this step; the norm is that before clipping.
            in_sync: a model that ranks replicate: every --check-sync steps all of them compare its weights.
            among: the ranks that replicate it; None: all.
            batch_share: share of the global batch that the step used; below 1 if it did not wait for all ranks.
            more: further numbers, written unchanged.

        Raises:
            RunError: on all ranks, when their weights differ.
        """
        if self.ranks.is_main:
            self._log_row(step, loss, lr, grad_norm, batch_share, more)
        if in_sync is not None:
            check_in_sync(in_sync, among or self.ranks, step, self.settings.check_sync)

    def _log_row(
        self, step: int, loss: float, lr: float, grad_norm: float | torch.Tensor | None, batch_share: float,
        more: Mapping[str, float],
    ) -> None:  # fmt: skip
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
            **self._metrics.rates.at(batch_share * tokens / seconds),
            "peak_bytes": peak_bytes(self.ranks.device),
            **self._epochs(step),
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

    def _epochs(self, step: int) -> dict[str, float]:
        """How often the run has gone through each source so far, by epochs/NAME; empty for one source."""
        mix, settings = self.settings.train_rows, self.settings
        if not isinstance(mix, Mix):
            return {}
        found = mix.epochs(settings.seed, step * settings.batch_size)
        return {f"epochs/{name}": round(passes, 6) for name, passes in found.items()}

    def _step_traffic(self) -> dict[str, int]:
        """Bytes that rank 0 sent and received since the last row, as the kernel counts them; empty without such counts.

        Bytes that have not arrived yet count for the next step, so sums over many steps are exact and one step is not.
        """
        before, now = self._traffic, tcp_bytes() if self._traffic is not None else None
        if before is None or now is None:
            return {}
        self._traffic = now
        return dict(zip(("sent_bytes", "received_bytes"), between(before, now), strict=True))

    def _flush_row(self) -> None:
        """Writes the row of the last step. Rows wait here until the step's evaluation is done."""
        row, self._row = self._row, {}
        if not row:
            return
        step = row["step"]
        due = step % self.settings.log_every == 0 or step in (1, self.settings.max_steps) or "valid_loss" in row
        if not due:
            return
        try:
            self._metrics.write(row)
        except OSError as error:
            raise RunError(f"cannot write the metrics of step {step}: {error}; {self._saving.last_good()}") from None

    def evaluate_now(self, step: int) -> bool:
        """True at the steps of --eval-every and at the last."""
        return step % self.settings.eval_every == 0 or step == self.settings.max_steps

    def save_now(self, step: int) -> bool:
        """True at the steps of --save-every and --keep-every, at the last, and at the step after which a signal stops it."""
        settings = self.settings
        kept = settings.keep_every is not None and step % settings.keep_every == 0
        return kept or step % settings.save_every == 0 or step == self._last_step

    def log_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Logs valid_loss, valid_ppl and valid_acc of a step."""
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
            weights, moments: by name as checkpoint/step_folder.py describes; other ranks may pass anything.
            extra: JSON content that the chapter needs on resume.
        """
        self._saving.save(step, weights, moments, extra, self._check_loss)

    def save_parts(
        self, step: int, parts: Mapping[str, Any], steps: Mapping[str, int], extra: dict[str, Any] | None = None
    ) -> None:
        """The same for ranks that each hold a part.

        Args:
            step, extra: as in `save`.
            parts, steps: as in checkpoint/sharded.py, `write_parts`.
        """
        from gpt2_chinese.checkpoint.sharded import copied, write_parts  # late: most chapters do without

        def prepare(copy: HostCopy | None) -> Write:
            mine, counts = copied(parts, copy) if copy is not None else parts, dict(steps)
            return lambda folder, ranks: write_parts(folder, mine, counts, ranks)

        self._saving.save_parts(step, prepare, extra, self._check_loss)

    def save_by(
        self, step: int, write: Callable[[Path], object], copy: Callable[[], Callable[[Path, Any], object]]
    ) -> None:
        """The same for an engine with a format of its own: all ranks call write(folder), which does not exist yet.

        With --async-save they call copy(), and what it returns, with folder and process group, in the background.
        """

        def prepare(held: HostCopy | None) -> Write:
            if held is None:
                return lambda folder, _: write(folder)
            write_copy = copy()
            return lambda folder, ranks: write_copy(folder, ranks.group)

        self._saving.save_parts(step, prepare, None, self._check_loss)

    def _say(self, line: str) -> None:
        if self._progress:
            self._progress.write(line)

    def _check_loss(self) -> None:
        """Checks that a state may be saved.

        Raises:
            RunError: the step had no finite loss and gradients. In fp16 a later step may have them; there the weights are
                checked.
        """
        if self._lost_in_a_row and self.settings.precision != "fp16":
            raise RunError("its loss or gradients are not finite")

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(
        self, weights: Mapping[str, torch.Tensor] | Callable[[Path], object], table: Rows | None = None,
        about: Mapping[str, Any] | None = None, load: Load = load_model, before: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Waits for the last save, writes final/, generates from it, prints the summary, and leaves the process group.

        Args:
            weights: all of them on rank 0 (other ranks may pass anything), or a function that all ranks call with a path,
                to which it writes model.safetensors.
            table: the chapter's rows of the summary.
            about: more content for run.json; the numbers in it go to TensorBoard's table as well.
            load: reads final/ back; needed if final/ is no plain model.
            before: earlier continuations of PROMPTS, printed together with the new ones.

        After a signal it only prints how to resume, and leaves final/ of an earlier run as it is.
        """
        self._saving.settle()
        self._saving.close()
        if self._last_step < self.settings.max_steps:
            self._say_stopped()
            return
        own = torch.zeros(self.ranks.num_ranks, dtype=torch.int64)
        own[self.ranks.rank] = peak_bytes(self.ranks.device)
        peaks = self.ranks.sum(own).tolist()
        settings, final = self.settings, self.directory / "final"
        numbers = {name: value for name, value in (about or {}).items() if isinstance(value, int | float)}
        about = {"step": settings.max_steps, "chapter": settings.chapter, **self.last_evaluation, **(about or {})}
        about["peak_bytes_by_rank"] = peaks
        self._saving.write_final(weights, about)
        if self.ranks.is_main:
            self._print_samples(final, load, before or {})
            memory = ", ".join(f"rank {rank} {peak / 2**20:.0f} MiB" for rank, peak in enumerate(peaks))
            self._print_summary([("peak memory", memory)], table or [])
            self._metrics.compare(settings.values(), {**self.last_evaluation, **numbers})
            self._metrics.close()
        self.ranks.barrier()
        self.ranks.close()

    def _say_stopped(self) -> None:
        if self.ranks.is_main:
            saved = display(self.directory / "checkpoints" / f"step_{self._last_step:06d}")
            by = stop_signal.asked() or "a signal to another rank"
            stop_signal.note_stopped(self._last_step)
            print(f"\nStopped by {by} after step {self._last_step}: the same command goes on from {saved}", flush=True)
            self._metrics.close()
        self.ranks.barrier()
        self.ranks.close()

    def _print_samples(self, final: Path, load: Load, before: Mapping[str, str]) -> None:
        """Prints three continuations by the model in final/, read from the disk as a user would."""
        model, vocabulary = load(final, self.ranks.device)
        print("\nThree continuations (the prompt in 「」):")
        for prompt, text in continuations(model, vocabulary, self.settings.seed).items():
            if prompt in before:
                print(f"  「{prompt}」{before[prompt]}   (before)")
            print(f"  「{prompt}」{text}")
            self._metrics.text(f"samples/{prompt}", f"「{prompt}」{text}", self.settings.max_steps)

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
