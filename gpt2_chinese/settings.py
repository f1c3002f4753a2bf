"""The settings of a run: one field per flag, resolved and checked before torch is loaded or a process is launched.

A chapter adds flags by subclassing; one whose --nproc is 1 by default refuses more:

    @dataclass
    class Settings(BaseSettings):
        nproc: int = flag(2, "Processes on this machine, one per GPU where there are GPUs.")
        zero_stage: int = flag(3, "What is sharded: 1 moments, 2 and gradients, 3 and weights.", choices=(1, 2, 3))
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import shlex
import shutil
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2_chinese import checkpoint
from gpt2_chinese.config import ModelConfig, resolve_model_config
from gpt2_chinese.errors import LAUNCHED_VARIABLE, OneLineParser, UserError, exit_on_user_error, notice
from gpt2_chinese.files import kind, reason
from gpt2_chinese.locks import is_held
from gpt2_chinese.tokens import Tokens, load_tokens
from gpt2_chinese.vocabulary_files import PROFILE_CHOICES, VocabularyFile, read_vocabulary

ROOT = Path(__file__).resolve().parents[1]


def flag(default: Any, help: str, choices: tuple[Any, ...] | None = None, shown: str | None = None) -> Any:
    """A dataclass field that is a command-line flag.

    Args:
        default: its default value; None for what is resolved later.
        help: one sentence.
        choices: the allowed values, if they are few.
        shown: what --help gives as the default, where `default` itself says little.
    """
    shown = shown or ("by config" if default is None else str(default))
    return field(default=default, metadata={"help": help, "choices": choices, "shown": shown})


@dataclass
class Settings:
    """Every flag of a chapter, in the order of --help. After `resolve()` none of the by-config values is None."""

    nproc: int = flag(1, "Processes on this machine, one per GPU where there are GPUs.")
    model_config: str = flag("tiny", "tiny, small, medium, large, xl, or the path of a GPT-2 config.json.")
    train_data: str = flag(str(ROOT / "data/train"), "Array-JSON file or folder to train on.", shown="shipped corpus")
    valid_data: str = flag(
        str(ROOT / "data/valid"), "Array-JSON file or folder to evaluate on.", shown="shipped corpus"
    )
    vocab: str = flag(str(ROOT / "cache/vocab.txt"), "A vocab.txt or a tokenizer.json.", shown="shipped vocabulary")
    vocab_profile: str = flag(
        "auto", "How a vocab.txt is used: gpt2_chinese ([MASK] text [CLS], digits apart), uer ([CLS] text [SEP], digits "
        "whole), auto (what its folder records, else gpt2_chinese).", PROFILE_CHOICES,
    )  # fmt: skip
    seq_len: int | None = flag(None, "Tokens in a sequence.", shown="by config, tiny: 128")
    batch_size: int | None = flag(None, "Sequences in a GLOBAL batch, whatever --nproc.", shown="by config, tiny: 24")
    grad_accum: int = flag(1, "Micro-batches per step, to save memory.")
    lr: float | None = flag(None, "Peak learning rate of AdamW.", shown="by config, tiny: 0.003")
    warmup_steps: int | None = flag(None, "Steps of linear warm-up, before the cosine.", shown="by config, tiny: 50")
    weight_decay: float | None = flag(None, "Weight decay of matrices and embeddings.", shown="by config, tiny: 0.1")
    clip_grad_norm: float | None = flag(None, "Largest global gradient norm, 0 for none.", shown="by config, tiny: 1.0")
    precision: str | None = flag(
        None, "Of the matrix products; fp16 scales its loss.", ("fp32", "bf16", "fp16"), "fp32 on CPU, bf16 on GPU"
    )
    max_steps: int | None = flag(None, "Steps to train.", shown="by config, tiny: 800")
    epochs: float | None = flag(None, "Passes over the corpus; with --max-steps, what ends first.", shown="no limit")
    eval_every: int | None = flag(None, "Steps between evaluations.", shown="by config, tiny: 200")
    save_every: int | None = flag(None, "Steps between checkpoints.", shown="by config, tiny: 200")
    keep: int = flag(3, "Newest complete checkpoints that stay, 0 for all.")
    log_every: int | None = flag(None, "Steps between lines of metrics.jsonl.", shown="by config, tiny: 1")
    output_dir: str | Path | None = flag(None, "Where the run writes all it writes.", shown="runs/NN_name")
    init_from: str | None = flag(
        None,
        "Weights to begin with: a GPT-2 folder or file in Hugging Face's format, or a run. Model and vocabulary follow it.",
        shown="random weights",
    )
    resume: str = flag("auto", "auto (the newest complete checkpoint there), never, or the path of a checkpoint.")
    seed: int = flag(42, "Of the initial weights, the order of the batches and dropout.")
    device: str = flag("auto", "Where to train.", choices=("auto", "cpu", "cuda"))

    # -- not flags: filled by from_command_line and resolve -----------------------------------------------------------
    program: Path = field(default=Path(sys.argv[0]), init=False, repr=False)
    argv: list[str] = field(default_factory=list, init=False, repr=False)
    chapter: str = field(default="", init=False)
    model: ModelConfig = field(default_factory=ModelConfig, init=False)
    vocabulary: VocabularyFile = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    vocab_size: int = field(default=0, init=False)
    train_tokens: Tokens = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    valid_tokens: Tokens = field(default=None, init=False, repr=False)  # type: ignore[assignment]
    resume_from: Path | None = field(default=None, init=False)  # a checkpoint to go on from; a FILE is weights to begin with
    timeout_s: int = field(default=600, init=False)  # of a collective; a flag in ParallelSettings

    @classmethod
    def from_command_line(
        cls, program_file: str, description: str | None = None, argv: list[str] | None = None
    ) -> typing.Self:
        """Parses the command line of a chapter and resolves it; an error is one line and exit status 2.

        When the run is complete already it says so and exits with status 0.

        Args:
            program_file: `__file__` of the chapter's train.py; its folder names the chapter.
            description: its docstring, shown by --help.
            argv: the arguments, sys.argv[1:] when None.
        """
        with exit_on_user_error():
            argv = list(sys.argv[1:] if argv is None else argv)
            settings = cls(**_parse(cls, program_file, description, argv))
            settings.program, settings.argv = Path(program_file).resolve(), argv
            settings.chapter = settings.program.parent.name
            settings.resolve()
            if settings.is_complete():
                notice(f"This run is complete: {settings.max_steps} steps, in {settings.output_dir}")
                notice(settings.what_next())
                raise SystemExit(0)
        return settings

    @classmethod
    def flags(cls) -> dict[str, dataclasses.Field[Any]]:
        """The fields that are flags, by name."""
        return {f.name: f for f in dataclasses.fields(cls) if "help" in f.metadata}

    def values(self) -> dict[str, Any]:
        """All flags as resolved, JSON-ready."""
        return {name: str(v) if isinstance(v := getattr(self, name), Path) else v for name in self.flags()}

    def resolve(self) -> None:
        """Fills in what was left to the configuration, checks everything, and makes the token caches.

        Raises:
            UserError: the first thing that is wrong.
        """
        _check_launcher()
        if "WORLD_SIZE" in os.environ:  # started by a launcher: it has decided
            self.nproc = int(os.environ["WORLD_SIZE"])
        initial = self._follow_initial_weights() if self.init_from is not None else None
        self.model, defaults = resolve_model_config(self.model_config)
        if self.seq_len is None:
            self.seq_len = min(defaults.seq_len, self.model.n_positions)
        steps_given, warmup_given = self.max_steps is not None, self.warmup_steps is not None
        for name in vars(defaults):
            if getattr(self, name) is None:
                setattr(self, name, getattr(defaults, name))
        if not warmup_given:
            self.warmup_steps = 0  # decided when the number of steps is known
        self.output_dir = Path(self.output_dir) if self.output_dir else ROOT / "runs" / (self.chapter or "run")
        self.vocabulary = read_vocabulary(self.vocab, self.vocab_profile)
        self.vocab_profile, self.vocab_size = self.vocabulary.profile, len(self.vocabulary.entries)
        self.validate()
        self.model.vocab_size = self.vocab_size
        if initial:
            from gpt2_chinese.weights import check_initial  # late: it loads torch, to look into the file

            check_initial(initial, self.model)

        self.train_tokens = load_tokens(self.train_data, self.vocab, self.vocab_profile)
        self.valid_tokens = load_tokens(self.valid_data, self.vocab, self.vocab_profile)
        self._resolve_steps(steps_given)
        if not warmup_given:
            self.warmup_steps = min(defaults.warmup_steps, self.max_steps // 10)
        self.resume_from = self._find_checkpoint() or initial

    def _follow_initial_weights(self) -> Path:
        """The file that --init-from means; the model and the vocabulary are its own unless they are given."""
        from gpt2_chinese.weights import begin_from

        if self.resume not in ("auto", "never"):
            raise UserError(f"--init-from {self.init_from} and --resume {self.resume}: give one of them to begin with")
        file, vocab = begin_from(self.init_from)
        if not self._is_given("model_config"):
            self.model_config = str(file.parent.parent if file.name == ".metadata" else file.parent)
        if not self._is_given("vocab"):
            if vocab is None:
                raise UserError(f"--init-from {self.init_from} has no vocabulary beside it: give one with --vocab")
            self.vocab = str(vocab)
        return file

    def _is_given(self, name: str) -> bool:
        """True for a flag of the command line, even when it says what is the default."""
        said = any(word == dashed(name) or word.startswith(f"{dashed(name)}=") for word in self.argv)
        return said or getattr(self, name) != self.flags()[name].default

    def validate(self) -> None:
        """Checks what needs no corpus; a chapter extends it and calls super().validate() first.

        Raises:
            UserError: one line that names the flags.
        """
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (value < math.inf and value >= least):
                raise UserError(f"{dashed(name)} must be at least {least}, not {value}")
            if isinstance(value, int) and value > _MOST:
                raise UserError(f"{dashed(name)} {value} is too large: give at most {_MOST}")
        for name in ("lr", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{dashed(name)} must be above 0, not {value}: give a finite number")
        for name in self.flags():
            if isinstance(value := getattr(self, name), float) and not math.isfinite(value):
                raise UserError(f"{dashed(name)} is {value}: give a finite number")
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
        if self.batch_size % (self.num_replicas * self.grad_accum):
            who = f"--nproc {self.nproc}" if self.num_replicas == self.nproc else f"{self.num_replicas} replicas"
            raise UserError(
                f"--batch-size {self.batch_size} is not divisible by {who} times --grad-accum "
                f"{self.grad_accum} = {self.num_replicas * self.grad_accum}"
            )
        if self.warmup_steps and self.warmup_steps >= self.max_steps:
            raise UserError(f"--warmup-steps {self.warmup_steps} must be below --max-steps {self.max_steps}")
        _check_writable(self.output_dir)
        launched = "RANK" in os.environ or LAUNCHED_VARIABLE in os.environ  # then the run that holds it may be ours
        if not launched and is_held(self.output_dir / "metrics.jsonl"):
            raise UserError(in_use(self.output_dir))

    def _resolve_steps(self, steps_given: bool) -> None:
        """Sets max_steps to what ends first of --max-steps and --epochs."""
        per_epoch = max(0, len(self.train_tokens) - 1) // self.seq_len // self.batch_size
        if per_epoch < 1:
            raise UserError(
                f"the corpus {self.train_data} is too small: {len(self.train_tokens)} tokens do not fill one "
                f"--batch-size {self.batch_size} of --seq-len {self.seq_len}"
            )
        if self.epochs is not None:
            if self.epochs * per_epoch > _MOST:
                raise UserError(f"--epochs {self.epochs} is too large: {per_epoch} steps each are more than {_MOST}")
            steps = max(1, round(self.epochs * per_epoch))
            self.max_steps = min(self.max_steps, steps) if steps_given else steps
        if self.warmup_steps and self.warmup_steps >= self.max_steps:
            raise UserError(f"--warmup-steps {self.warmup_steps} must be below the {self.max_steps} steps of --epochs")

    def _find_checkpoint(self) -> Path | None:
        """The checkpoint to go on from, held against these settings."""
        if self.resume == "never":
            return None
        if self.resume == "auto":
            found = checkpoint.newest_complete(self.output_dir / "checkpoints")
        else:
            found = Path(self.resume)
            is_folder = kind(found, f"--resume {self.resume}") == "folder"
            if is_folder and (found / "checkpoints").is_dir():
                found = checkpoint.newest_complete(found / "checkpoints")
            if found is None or not is_folder:
                raise UserError(f"--resume {self.resume} is no checkpoint: give auto, never, or a folder step_NNNNNN")
            if damage := checkpoint.damage(found):
                raise UserError(f"--resume {self.resume} cannot be used: {damage}; give a whole folder step_NNNNNN")
        if found is None:
            return None
        if not (found / "state.json").is_file():
            raise UserError(
                f"--resume {self.resume} holds weights, but nothing of the optimizer: give a folder "
                f"checkpoints/step_NNNNNN, or begin with them: --init-from {self.resume}"
            )
        if (found / checkpoint.PARTS).is_dir():
            from gpt2_chinese.parts import read_parts  # late: it loads torch, to look into the metadata, which are a pickle

            read_parts(found / checkpoint.PARTS)
        state = checkpoint.read_state(found)
        if not isinstance(state, dict) or not isinstance(state.get("step"), int):
            raise UserError(f"--resume {self.resume} cannot be used: its state.json names no step")
        then = ModelConfig.from_dict(state.get("model"), f"{found}/state.json")
        for name in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "inner"):
            if getattr(then, name) != getattr(self.model, name):
                raise UserError(
                    f"checkpoint {found} has {name} {getattr(then, name)}, this run {getattr(self.model, name)}: give "
                    "its --model-config and --vocab, another --output-dir, or --resume never"
                )
        if state.get("vocabulary", self.vocabulary.facts()) != self.vocabulary.facts():
            before = state["vocabulary"]
            other = "another vocabulary" if before["profile"] == self.vocab_profile else f"profile {before['profile']}"
            raise UserError(
                f"checkpoint {found} was trained with {other}, this run has --vocab {self.vocab} with profile "
                f"{self.vocab_profile}: give its --vocab and --vocab-profile, another --output-dir, or --resume never"
            )
        for name in (
            "lr",
            "batch_size",
            "seq_len",
            "seed",
            "max_steps",
            "warmup_steps",
            "weight_decay",
            "clip_grad_norm",
        ):
            before = state.get("settings", {}).get(name, getattr(self, name))
            if before != getattr(self, name):
                notice(f"note: {dashed(name)} is {getattr(self, name)} now, and was {before} before {found.name}")
        return found

    @property
    def num_replicas(self) -> int:
        """In how many parts the ranks share a batch: all of them, where each holds or gathers the whole model."""
        return self.nproc

    @property
    def in_step(self) -> bool:
        """True when all ranks take each step together, so that they can agree in each to stop after it."""
        return True

    @property
    def resume_step(self) -> int:
        """The step that the checkpoint to go on from has done, 0 without one."""
        goes_on = self.resume_from is not None and self.resume_from.is_dir()
        return checkpoint.read_state(self.resume_from)["step"] if goes_on else 0

    def is_complete(self) -> bool:
        """True when an earlier run has taken all steps and written final/."""
        final = self.output_dir / "final"
        if self.resume != "auto" or self.resume_step < self.max_steps or checkpoint.damage(final):
            return False
        return checkpoint.read_json(final / "run.json").get("step") == self.resume_step

    def what_next(self) -> str:
        """The commands to go on with, ready to paste."""
        beside = Path(sys.executable).with_name("tensorboard")  # a .venv that is not active is not on the PATH
        tensorboard = "tensorboard" if shutil.which("tensorboard") else shlex.quote(str(display_link(beside)))
        default = self.output_dir.resolve() == ROOT / "runs" / self.chapter
        model = "" if default else f" --model {shlex.quote(str(display(self.output_dir)))}"
        script = display(self.program.with_name("generate.sh"))
        return (
            f"  curves     {tensorboard} --logdir {shlex.quote(str(display(self.output_dir / 'tensorboard')))}\n"
            f"  more text  bash {shlex.quote(str(script))}{model} --prompt 今天天气 --num 3"
        )


@dataclass
class ParallelSettings(Settings):
    """The flags that chapters of several ranks share beside the contract's: subclass it instead of Settings."""

    nproc: int = flag(2, "Processes on this machine, one per GPU where there are GPUs.")
    check_sync: int = flag(10, "Steps between checks that all ranks hold the same weights, 0 for none.")
    timeout_s: int = flag(600, "Seconds a rank waits for the others before it ends the run and says for whom.")

    def validate(self) -> None:
        super().validate()
        if self.check_sync < 0:
            raise UserError(f"--check-sync must be at least 0, not {self.check_sync}")
        if not 1 <= self.timeout_s <= 10_000_000:
            raise UserError(f"--timeout-s must be at least 1 and at most 10000000, not {self.timeout_s}")


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
    "keep": 0,
    "log_every": 1,
    "seed": 0,
}


_MOST = (1 << 63) - 1  # what torch takes as a seed, and more than any run can count to


def dashed(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def display_link(path: Path) -> Path:
    """Like display, for a path whose links must not be followed."""
    path, here = Path(os.path.abspath(path)), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def display(path: Path) -> Path:
    """A path as the user would type it: relative to the working directory when it lies below it."""
    path, here = Path(path).resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def in_use(folder: Path) -> str:
    """The line for a run that would write into what another one writes."""
    return f"--output-dir {folder} is in use by another run: give another one, or wait until that run has ended"


def _check_writable(folder: Path) -> None:
    """Raises UserError when a run could not write below `folder`; makes nothing."""
    existing = Path(folder).absolute()
    try:
        while True:
            try:
                existing.stat()
                break
            except FileNotFoundError:
                if existing.is_symlink():
                    raise UserError(f"--output-dir {folder} cannot be written: {existing} is a link to nothing") from None
                existing = existing.parent
    except (OSError, ValueError) as error:  # a file among its parents, a circle of links, too long a name
        raise UserError(f"--output-dir {folder} cannot be written: {reason(error)}") from None
    if not existing.is_dir():
        raise UserError(f"--output-dir {folder} cannot be written: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output-dir {folder} cannot be written: no permission for {existing}")


def _check_launcher() -> None:
    """Raises UserError for variables of a launcher that no launcher sets like that."""
    counts = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
    for name in (*counts, *counts.values()):
        value = os.environ.get(name, "1")
        least = 0 if name in counts else 1
        if not (value.isascii() and value.isdecimal() and least <= int(value) < 1 << 31):
            raise UserError(
                f"the environment has {name}={value!r}, which a launcher sets to a whole number of at least {least}: "
                f"unset {name}"
            )
    for name, count in counts.items():
        if name == "RANK" and name in os.environ and count not in os.environ:
            raise UserError("the environment has RANK without WORLD_SIZE: unset RANK, or use a launcher that sets both")
        if name in os.environ and count in os.environ and int(os.environ[name]) >= int(os.environ[count]):
            raise UserError(
                f"the environment has {name}={os.environ[name]}, which must be below {count}={os.environ[count]}: unset both"
            )


def _parse(cls: type[Settings], program_file: str, description: str | None, argv: list[str]) -> dict[str, Any]:
    """The flags on the command line, as arguments of `cls`."""
    parser = OneLineParser(
        prog=f"train.sh ({Path(program_file).resolve().parent.name})",
        usage="bash train.sh [FLAGS]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
        near = difflib.get_close_matches(unknown[0].split("=")[0], [dashed(name) for name in cls.flags()], 1)
        hint = f": did you mean {near[0]}?" if near else " (--help lists all flags)"
        raise UserError(f"unknown flag {unknown[0]}{hint}")
    for name, value in vars(values).items():
        if isinstance(value, str) and not value.strip():
            raise UserError(f"{dashed(name)} is empty: give a value, or leave the flag out")
    return vars(values)


_METAVAR = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _kind(hint: Any) -> type:
    """The type a flag's text is turned into: `str | Path | None` is str, `int | None` is int."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)[0]
    return hint
