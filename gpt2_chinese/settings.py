"""The settings of a run: one field per flag, what each means, and which of them contradict each other.

This file looks nothing up: `resolve` (run/resolve.py) fills in values from files, the launcher and the configuration.

A chapter adds flags in a subclass. A chapter whose --nproc is 1 by default refuses a larger number:

    @dataclass
    class Settings(BaseSettings):
        nproc: int = flag(2, "Processes on this machine.", shown="one per GPU, 2 without a GPU")
        zero_stage: int = flag(3, "What is sharded: 1 moments, 2 and gradients, 3 and weights.", choices=(1, 2, 3))
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.loss_tiles import read_tiles
from gpt2_chinese.model.recompute_plan import Plan
from gpt2_chinese.vocabulary.profiles import PROFILE_CHOICES, VocabularyFile

ROOT = Path(__file__).resolve().parents[1]
ONLY_FLAGS_VARIABLE = "GPT2_CHINESE_ONLY_FLAGS"  # set by scripts/pipeline.sbatch, whose corpus does not exist yet


def flag(default: Any, help: str, choices: tuple[Any, ...] | None = None, shown: str | None = None) -> Any:
    """A dataclass field that is a command-line flag.

    Args:
        default: its default value; None when `resolve` fills the value in.
        help: one sentence.
        choices: the allowed values; None for any.
        shown: the default as --help prints it; when None, `default` itself, or "by config" where that is None, too.
    """
    shown = shown or ("by config" if default is None else str(default))
    return field(default=default, metadata={"help": help, "choices": choices, "shown": shown})


@dataclass
class Settings:
    """All flags of a chapter, in the order of --help. After `resolve()` no value that the config gives is None."""

    without: typing.ClassVar[dict[str, str]] = {}  # fields that are no flag of this chapter -> its own flag for it, or ""

    nproc: int = flag(1, "Processes on this machine.")
    model_config: str = flag("tiny", "tiny, small, medium, large, xl, or the path of a GPT-2 config.json.")
    train_data: str = flag(str(ROOT / "data/train"), "Array-JSON file or folder to train on.", shown="shipped corpus")
    valid_data: str = flag(
        str(ROOT / "data/valid"), "Array-JSON file or folder to evaluate on.", shown="shipped corpus"
    )
    vocab: str = flag(str(ROOT / "cache/vocab.txt"), "A vocab.txt or a tokenizer.json.", shown="shipped vocabulary")
    vocab_profile: str = flag(
        "auto", "How a vocab.txt is used: gpt2_chinese ([MASK] text [CLS], digits split), uer ([CLS] text [SEP], digits "
        "kept), auto (what its folder records, else gpt2_chinese).", PROFILE_CHOICES,
    )  # fmt: skip
    documents: str = flag(
        "cross", "Documents in a batch: cross (windows cut through, attention crosses), mask (the same windows, attention "
        "and positions end with a document), pack (whole documents packed into windows, masked).", ("cross", "mask", "pack"),
    )  # fmt: skip
    mix: str | None = flag(
        None, "Shares of sources, as news=0.5,wiki=0.3: names of sub-folders or files of --train-data.",
        shown="the whole corpus",
    )  # fmt: skip
    mix_temperature: float | None = flag(
        None, "In place of --mix: each source's share is proportional to its tokens to the power 1/X.",
        shown="the whole corpus")  # fmt: skip
    seq_len: int | None = flag(None, "Tokens in a sequence.", shown="by config, tiny: 128")
    batch_size: int | None = flag(None, "Sequences in a GLOBAL batch, whatever --nproc.", shown="by config, tiny: 24")
    grad_accum: int = flag(1, "Micro-batches per step, to save memory.")
    recompute: str = flag("none", "What the blocks keep for backward: none (recompute nothing), block (each keeps its "
                          "input), every:K, sqrt, selective (inputs and results of matrix products).")  # fmt: skip
    loss_tiles: str = flag("none", "Tiles of tokens in which head and loss are computed, so that the logits are never "
                           "whole: none, auto, or their number.")  # fmt: skip
    lr: float | None = flag(None, "Peak learning rate of AdamW.", shown="by config, tiny: 0.003")
    warmup_steps: int | None = flag(None, "Steps of linear warm-up, before the cosine.", shown="by config, tiny: 50")
    weight_decay: float | None = flag(None, "Weight decay of matrices and embeddings.", shown="by config, tiny: 0.1")
    clip_grad_norm: float | None = flag(None, "Largest global gradient norm, 0 for none.", shown="by config, tiny: 1.0")
    precision: str | None = flag(
        None, "Precision of the matrix products; fp16 scales the loss.", ("fp32", "bf16", "fp16"), "fp32 on CPU, bf16 on GPU"
    )
    max_steps: int | None = flag(None, "Steps to train.", shown="by config, tiny: 800")
    epochs: float | None = flag(None, "Passes over the corpus; with --max-steps, whichever ends first.", shown="no limit")
    eval_every: int | None = flag(None, "Steps between evaluations.", shown="by config, tiny: 200")
    save_every: int | None = flag(None, "Steps between checkpoints.", shown="by config, tiny: 200")
    keep_last: int = flag(3, "Number of newest complete checkpoints to keep, 0 for all.")
    keep_every: int | None = flag(None, "Steps between checkpoints that are kept for good, in addition.", shown="none")
    async_save: bool = flag(False, "Write checkpoints in the background, from a copy of the state in host memory.")
    log_every: int | None = flag(None, "Steps between lines of metrics.jsonl.", shown="by config, tiny: 1")
    output_dir: str | Path | None = flag(None, "Folder for everything that the run writes.", shown="runs/NN_name")
    comment: str | None = flag(
        None, "A note about the run, for its header, config.json and TensorBoard. A resumed run keeps it; another note "
        "replaces it, and TensorBoard shows both.", shown="none")  # fmt: skip
    init_from: str | None = flag(
        None,
        "Initial weights: a GPT-2 folder or file in Hugging Face's format, or a run. It also sets model and vocabulary.",
        shown="random weights",
    )
    resume: str = flag("auto", "auto (the newest complete checkpoint of --output-dir), never, or the path of a checkpoint.")
    seed: int = flag(42, "Seed of the initial weights, the order of the batches and dropout.")
    device: str = flag("auto", "Where to train.", choices=("auto", "cpu", "cuda"))
    deterministic: bool = flag(False, "On a GPU only kernels that give the same bits in every run: slower, more memory.")

    # -- not flags: filled by from_command_line and by resolve(settings) ----------------------------------------------
    program: Path = field(default=Path(sys.argv[0]), init=False, repr=False)
    argv: list[str] = field(default_factory=list, init=False, repr=False)
    chapter: str = field(default="", init=False)
    model: ModelConfig = field(default_factory=ModelConfig, init=False)
    vocabulary: VocabularyFile = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    vocab_size: int = field(default=0, init=False)
    train_tokens: Any = field(default=None, init=False, repr=False)  # a data.token_cache.Tokens or data.mix.MixedTokens
    train_rows: Any = field(default=None, init=False, repr=False)  # a data.rows.Rows
    valid_tokens: Any = field(default=None, init=False, repr=False)  # a data.token_cache.Tokens
    resume_from: Path | None = field(default=None, init=False)  # a checkpoint folder to resume, or a FILE of initial weights
    resume_step: int = field(default=0, init=False)  # steps that this checkpoint has done, 0 without a checkpoint
    earlier_comment: str | None = field(default=None, init=False)  # that of the run that this one resumes
    timeout_s: int = field(default=600, init=False)  # limit of a collective; a flag in ParallelSettings
    hang_after: int = field(default=0, init=False)  # seconds until a hang is reported; a flag in ParallelSettings

    @classmethod
    def from_command_line(
        cls, program_file: str, description: str | None = None, argv: list[str] | None = None
    ) -> typing.Self:
        """Parses the command line of a chapter, for `resolve`; an error is one line and exit status 2.

        Args:
            program_file: `__file__` of the chapter's train.py; its folder names the chapter.
            description: the docstring of train.py, shown by --help.
            argv: the arguments, sys.argv[1:] when None.
        """
        with exit_on_user_error():
            argv = list(sys.argv[1:] if argv is None else argv)
            settings = cls(**_parse(cls, program_file, description, argv))
            settings.program, settings.argv = Path(program_file).resolve(), argv
            settings.chapter = settings.program.parent.name
        if ONLY_FLAGS_VARIABLE in os.environ:
            raise SystemExit(0)
        return settings

    @classmethod
    def flags(cls) -> dict[str, dataclasses.Field[Any]]:
        """The fields that are flags, by name."""
        return {f.name: f for f in dataclasses.fields(cls) if "help" in f.metadata and f.name not in cls.without}

    def is_given(self, name: str) -> bool:
        """True when the command line sets the flag, even to its default, or when its value is not the default."""
        typed = any(word == dashed(name) or word.startswith(f"{dashed(name)}=") for word in self.argv)
        return typed or getattr(self, name) != self.flags()[name].default

    def can_share(self, nproc: int) -> bool:
        """True when a batch can be shared among so many processes; a chapter with another rule overrides it."""
        return self.batch_size % (nproc * max(1, self.grad_accum)) == 0

    def about(self) -> list[tuple[str, str]]:
        """(name, value) rows that a chapter adds to the header of a run."""
        rows = ("activations", "recompute", self.recompute), ("loss", "tiles", self.loss_tiles)
        return [(name, f"{how} {value}") for name, how, value in rows if value != "none"]

    def values(self) -> dict[str, Any]:
        """All flags as resolved, JSON-ready."""
        return {name: str(v) if isinstance(v := getattr(self, name), Path) else v for name in self.flags()}

    def prepare(self) -> None:
        """`resolve` calls this first; a chapter overrides it to read flags from other sources, too."""

    def validate(self) -> None:
        """Checks the flags, as far as that needs no corpus; a chapter's override calls super().validate() first.

        Raises:
            UserError: one line that names the flags.
        """
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (value < math.inf and value >= least):
                raise UserError(f"{dashed(name)} must be at least {least}, not {value}")
            most = MOST_SEED if name == "seed" else MOST
            if isinstance(value, int) and value > most:
                raise UserError(f"{dashed(name)} {value} is too large: give at most {most}")
        for name in ("lr", "epochs", "mix_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{dashed(name)} must be above 0, not {value}: give a finite number")
        for name in self.flags():
            if isinstance(value := getattr(self, name), float) and not math.isfinite(value):
                raise UserError(f"{dashed(name)} is {value}: give a finite number")
            if isinstance(value, int) and abs(value) > MOST:
                raise UserError(f"{dashed(name)} {value} is too large: give at most {MOST}")
        if any("\ud800" <= character <= "\udfff" for character in self.comment or ""):
            raise UserError("--comment is not UTF-8 text: give it in UTF-8")
        if self.mix is not None and self.mix_temperature is not None:
            raise UserError(f"--mix {self.mix} and --mix-temperature {self.mix_temperature}: both set the shares, give one")
        if self.documents == "pack" and self.seq_len < 2:
            raise UserError("--documents pack needs --seq-len of at least 2: a document has two marks")
        if self.model.vocab_size not in (None, self.vocab_size):
            raise UserError(
                f"--vocab {self.vocab} has {self.vocab_size} entries, but --model-config {self.model_config} says "
                f"vocab_size {self.model.vocab_size}: they must be equal"
            )
        if self.nproc > 1 and self.flags()["nproc"].default == 1:
            raise UserError(
                f"--nproc {self.nproc}: {self.chapter or 'this'} is one process, the later chapters share the work"
            )
        if self.seq_len > self.model.n_positions:
            raise UserError(
                f"--seq-len {self.seq_len} is above the model's context, n_positions {self.model.n_positions} "
                f"of --model-config {self.model_config}"
            )
        Plan.of(self.recompute, self.model.n_layer)
        read_tiles(self.loss_tiles)
        if self.batch_size % (self.num_replicas * self.grad_accum):
            who = f"--nproc {self.nproc}" if self.num_replicas == self.nproc else f"{self.num_replicas} replicas"
            raise UserError(
                f"--batch-size {self.batch_size} is not divisible by {who} times --grad-accum "
                f"{self.grad_accum} = {self.num_replicas * self.grad_accum}"
            )
        if self.warmup_steps and self.warmup_steps >= self.max_steps:
            raise UserError(f"--warmup-steps {self.warmup_steps} must be below --max-steps {self.max_steps}")

    def check_resolved(self) -> None:
        """`resolve` calls this last; a chapter overrides it to check more. Raises UserError as `validate`."""

    @property
    def num_replicas(self) -> int:
        """Number of parts that the ranks split a batch into: nproc, where each rank holds or gathers the whole model."""
        return self.nproc

    @property
    def in_step(self) -> bool:
        """True when all ranks take each step together, so that they can agree, once a step, to stop."""
        return True

    @property
    def frozen(self) -> bool:
        """True when nearly all weights are frozen, so that backward computes no gradients of weights."""
        return False

    @property
    def reads_codes(self) -> bool:
        """True when the run can resume optimizer states in 8 bits, which only pstar can read."""
        return False


@dataclass
class ParallelSettings(Settings):
    """Settings with the flags that all chapters of several ranks share; such a chapter subclasses this class."""

    nproc: int = flag(2, "Processes on this machine.", shown="one per GPU, 2 without a GPU")
    check_sync: int = flag(10, "Steps between checks that all ranks hold the same weights, 0 for none.")
    timeout_s: int = flag(600, "Seconds a rank waits for the others before it ends the run and names the missing ranks.")
    hang_after: int = flag(
        300, "Seconds in one collective after which each rank reports where it is, and the run ends; 0 for never.")

    def validate(self) -> None:
        super().validate()
        if self.check_sync < 0:
            raise UserError(f"--check-sync must be at least 0, not {self.check_sync}")
        if not 1 <= self.timeout_s <= 10_000_000:
            raise UserError(f"--timeout-s must be at least 1 and at most 10000000, not {self.timeout_s}")
        if not 0 <= self.hang_after <= 10_000_000:
            raise UserError(f"--hang-after must be at least 0 and at most 10000000, not {self.hang_after}")


_LEAST = {
    "nproc": 1,
    "seq_len": 1,
    "batch_size": 1,
    "grad_accum": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "clip_grad_norm": 0,
    "max_steps": 1,
    "eval_every": 1,
    "save_every": 1,
    "keep_last": 0,
    "keep_every": 1,
    "log_every": 1,
    "seed": 0,
}


MOST = (1 << 63) - 1  # more than any run can count
MOST_SEED = (1 << 32) - 1  # each step multiplies the seed by 1e9, and torch takes seeds of 64 bits: run.run.seed_step


def dashed(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _parse(cls: type[Settings], program_file: str, description: str | None, argv: list[str]) -> dict[str, Any]:
    """The flags on the command line, as arguments of `cls`."""
    program = f"train.sh ({Path(program_file).resolve().parent.name})"
    parser = command_parser(program, description, "bash train.sh [FLAGS]")
    hints = typing.get_type_hints(cls)
    for name, f in cls.flags().items():
        kind, meta = _kind(hints[name]), f.metadata
        options: dict[str, Any] = {"default": f.default, "help": f"{meta['help']} (default: {meta['shown']})"}
        options["help"] = options["help"].replace("%", "%%")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {
                "type": kind,
                "choices": meta["choices"],
                "metavar": None if meta["choices"] else _METAVAR[kind],
            }
        parser.add_argument(dashed(name), **options)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        own = [flag for other, flag in cls.without.items() if flag and dashed(other) == name]
        near = own or difflib.get_close_matches(name, [dashed(name) for name in cls.flags()], 1)
        hint = f": did you mean {near[0]}?" if near else " (--help lists all flags)"
        raise UserError(f"unknown flag {unknown[0]}{hint}")
    for name, value in vars(values).items():
        if isinstance(value, str) and not value.strip():
            raise UserError(f"{dashed(name)} is empty: give a value, or leave the flag out")
    return vars(values)


_METAVAR = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _kind(hint: Any) -> type:
    """The type that a flag's text is converted to: `str | Path | None` gives str, `int | None` gives int."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)[0]
    return hint
