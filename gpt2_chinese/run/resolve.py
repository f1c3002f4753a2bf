"""Turns the flags of a run into complete settings, checked before torch is loaded or a process is launched.

    settings = resolve(Settings.from_command_line(__file__, __doc__))

The configuration gives missing values, a launcher or the number of GPUs decides the number of processes, and so the device
and the precision. The corpus becomes token caches.
The checkpoint to resume is found and compared with the settings.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TypeVar

from gpt2_chinese.checkpoint.find import PARTS, newest_complete, read_json, read_state
from gpt2_chinese.checkpoint.sealed_folder import damage
from gpt2_chinese.checkpoint.trained_model import begin_from, check_initial
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.distributed import devices
from gpt2_chinese.errors import LAUNCHED_VARIABLE, UserError, exit_on_user_error, notice
from gpt2_chinese.files import display, display_link, kind, reason
from gpt2_chinese.locks import is_held
from gpt2_chinese.model.config import ModelConfig, resolve_model_config
from gpt2_chinese.settings import MOST, ROOT, Settings, dashed
from gpt2_chinese.vocabulary.profiles import read_vocabulary

AnySettings = TypeVar("AnySettings", bound=Settings)


def resolve(settings: AnySettings) -> AnySettings:
    """Fills in the settings and returns them; an error is one line and exit status 2.

    When the run is already complete it prints that and exits with status 0.
    """
    with exit_on_user_error():
        fill_in(settings)
        if _is_complete(settings):
            notice(f"This run is complete: {settings.max_steps} steps, in {settings.output_dir}")
            notice(what_next(settings))
            raise SystemExit(0)
    return settings


def fill_in(settings: Settings) -> None:
    """Fills in the settings that the user left out, checks all settings, and makes the token caches.

    Raises:
        UserError: for the first error.
    """
    settings.prepare()
    _check_launcher()
    if "WORLD_SIZE" in os.environ:  # a launcher has decided the number of processes
        settings.nproc = int(os.environ["WORLD_SIZE"])
    initial = _follow_initial_weights(settings) if settings.init_from is not None else None
    settings.model, defaults = resolve_model_config(settings.model_config)
    if settings.seq_len is None:
        settings.seq_len = min(defaults.seq_len, settings.model.n_positions)
    steps_given, warmup_given = settings.max_steps is not None, settings.warmup_steps is not None
    for name in vars(defaults):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(defaults, name))
    if not warmup_given:
        settings.warmup_steps = 0  # decided when the number of steps is known
    settings.output_dir = Path(settings.output_dir) if settings.output_dir else ROOT / "runs" / (settings.chapter or "run")
    settings.vocabulary = read_vocabulary(settings.vocab, settings.vocab_profile)
    settings.vocab_profile, settings.vocab_size = settings.vocabulary.profile, len(settings.vocabulary.entries)
    num_gpus = devices.count_gpus()
    devices.choose_nproc(settings, num_gpus)
    settings.validate()
    devices.choose_device(settings, num_gpus)
    _check_output(settings)
    settings.model.vocab_size = settings.vocab_size
    if initial:
        check_initial(initial, settings.model)
    settings.train_tokens = load_tokens(settings.train_data, settings.vocab, settings.vocab_profile)
    settings.valid_tokens = load_tokens(settings.valid_data, settings.vocab, settings.vocab_profile)
    _resolve_steps(settings, steps_given)
    if not warmup_given:
        settings.warmup_steps = min(defaults.warmup_steps, settings.max_steps // 10)
    settings.resume_from = _find_checkpoint(settings) or initial
    if settings.resume_from is not None and settings.resume_from.is_dir():
        settings.resume_step = read_state(settings.resume_from)["step"]
    settings.check_resolved()


def _check_launcher() -> None:
    """Raises UserError for a launcher's variables with values that no launcher sets."""
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


def _follow_initial_weights(settings: Settings) -> Path:
    """The weights file of --init-from; sets --model-config and --vocab from its folder unless they are given."""
    if settings.resume not in ("auto", "never"):
        raise UserError(f"--init-from {settings.init_from} and --resume {settings.resume}: give one of them to begin with")
    file, vocab = begin_from(settings.init_from)
    if not settings.is_given("model_config"):
        settings.model_config = str(file.parent.parent if file.name == ".metadata" else file.parent)
    if not settings.is_given("vocab"):
        if vocab is None:
            raise UserError(f"--init-from {settings.init_from} has no vocabulary next to it: give one with --vocab")
        settings.vocab = str(vocab)
    return file


def _check_output(settings: Settings) -> None:
    """Raises UserError when the run cannot write, or another run writes to the same folder."""
    _check_writable(settings.output_dir)
    launched = "RANK" in os.environ or LAUNCHED_VARIABLE in os.environ  # then this run may hold the lock
    if not launched and is_held(settings.output_dir / "metrics.jsonl"):
        raise UserError(in_use(settings.output_dir))


def _check_writable(folder: Path) -> None:
    """Raises UserError when a run could not write below `folder`; creates nothing."""
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


def in_use(folder: Path) -> str:
    """The error message for a folder to which another run writes."""
    return f"--output-dir {folder} is in use by another run: give another one, or wait until that run has ended"


def _resolve_steps(settings: Settings, steps_given: bool) -> None:
    """Sets max_steps by --max-steps or --epochs, whichever ends first."""
    per_epoch = max(0, len(settings.train_tokens) - 1) // settings.seq_len // settings.batch_size
    if per_epoch < 1:
        raise UserError(
            f"the corpus {settings.train_data} is too small: {len(settings.train_tokens)} tokens do not fill one "
            f"--batch-size {settings.batch_size} of --seq-len {settings.seq_len}"
        )
    if settings.epochs is not None:
        if settings.epochs * per_epoch > MOST:
            raise UserError(f"--epochs {settings.epochs} is too large: {per_epoch} steps each are more than {MOST}")
        steps = max(1, round(settings.epochs * per_epoch))
        settings.max_steps = min(settings.max_steps, steps) if steps_given else steps
    if settings.warmup_steps and settings.warmup_steps >= settings.max_steps:
        raise UserError(f"--warmup-steps {settings.warmup_steps} must be below the {settings.max_steps} steps of --epochs")


def _named_checkpoint(settings: Settings) -> Path | None:
    """The checkpoint that --resume names, or None. Raises UserError for a folder that is none, and for a damaged one."""
    if settings.resume == "never":
        return None
    if settings.resume == "auto":
        found = newest_complete(settings.output_dir / "checkpoints")
    else:
        found = Path(settings.resume)
        is_folder = kind(found, f"--resume {settings.resume}") == "folder"
        if is_folder and (found / "checkpoints").is_dir():
            found = newest_complete(found / "checkpoints")
        if found is None or not is_folder:
            raise UserError(f"--resume {settings.resume} is no checkpoint: give auto, never, or a folder step_NNNNNN")
        if wrong := damage(found):
            raise UserError(f"--resume {settings.resume} cannot be used: {wrong}; give a whole folder step_NNNNNN")
    return found


def _find_checkpoint(settings: Settings) -> Path | None:
    """The checkpoint to resume, or None; raises UserError when it does not fit these settings."""
    found = _named_checkpoint(settings)
    if found is None:
        return None
    if not (found / "state.json").is_file():
        raise UserError(
            f"--resume {settings.resume} holds weights, but no optimizer state: give a folder "
            f"checkpoints/step_NNNNNN, or begin with them: --init-from {settings.resume}"
        )
    if (found / PARTS).is_dir():
        from gpt2_chinese.checkpoint.sharded import read_parts  # late: it loads torch, to read the metadata, a pickle

        _, moments = read_parts(found / PARTS)
        if moments.in_codes and not settings.reads_codes:
            raise UserError(
                f"checkpoint {found} has optimizer states in 8 bits, which only chapter 07 with --backend pstar reads: "
                f"resume it there, or begin with its weights: --resume never --init-from {found}"
            )
    state = read_state(found)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"--resume {settings.resume} cannot be used: its state.json names no step")
    then = ModelConfig.from_dict(state.get("model"), f"{found}/state.json")
    for name in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "inner"):
        if getattr(then, name) != getattr(settings.model, name):
            raise UserError(
                f"checkpoint {found} has {name} {getattr(then, name)}, this run {getattr(settings.model, name)}: give "
                "its --model-config and --vocab, another --output-dir, or --resume never"
            )
    if state.get("vocabulary", settings.vocabulary.facts()) != settings.vocabulary.facts():
        before = state["vocabulary"]
        other = "another vocabulary" if before["profile"] == settings.vocab_profile else f"profile {before['profile']}"
        raise UserError(
            f"checkpoint {found} was trained with {other}, this run has --vocab {settings.vocab} with profile "
            f"{settings.vocab_profile}: give its --vocab and --vocab-profile, another --output-dir, or --resume never"
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
        before = state.get("settings", {}).get(name, getattr(settings, name))
        if before != getattr(settings, name):
            notice(f"note: {dashed(name)} is {getattr(settings, name)} now, and was {before} before {found.name}")
    return found


def _is_complete(settings: Settings) -> bool:
    """True when an earlier run has taken all steps and written final/."""
    final = settings.output_dir / "final"
    if settings.resume != "auto" or settings.resume_step < settings.max_steps or damage(final):
        return False
    return read_json(final / "run.json").get("step") == settings.resume_step


def what_next(settings: Settings) -> str:
    """The commands to run next, ready to paste."""
    program = Path(sys.executable).with_name("tensorboard")  # a .venv that is not active is not on the PATH
    tensorboard = "tensorboard" if shutil.which("tensorboard") else shlex.quote(str(display_link(program)))
    default = settings.output_dir.resolve() == ROOT / "runs" / settings.chapter
    model = "" if default else f" --model {shlex.quote(str(display(settings.output_dir)))}"
    script = display(settings.program.with_name("generate.sh"))
    return (
        f"  curves     {tensorboard} --logdir {shlex.quote(str(display(settings.output_dir / 'tensorboard')))}\n"
        f"  more text  bash {shlex.quote(str(script))}{model} --prompt 今天天气 --num 3"
    )
