"""Turns the flags of a run into complete settings, checked before torch is loaded or a process is launched.

    settings = resolve(Settings.from_command_line(__file__, __doc__))

The configuration gives missing values, a launcher or the number of GPUs decides the number of processes, and so the device
and the precision. The corpus becomes token caches.
The checkpoint to resume is found and compared with the settings.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpt2_chinese.checkpoint import verdicts
from gpt2_chinese.checkpoint.find import PARTS, newest_complete, read_json, read_state
from gpt2_chinese.checkpoint.sealed_folder import new_damage
from gpt2_chinese.checkpoint.trained_model import begin_from, check_initial
from gpt2_chinese.data.mix import Mix, MixedTokens, load_mix
from gpt2_chinese.data.rows import Packed, Rows, Windows
from gpt2_chinese.data.token_cache import Tokens, load_tokens
from gpt2_chinese.distributed import devices
from gpt2_chinese.errors import LAUNCHED_VARIABLE, UserError, exit_on_user_error, notice
from gpt2_chinese.files import check_output_folder, display, kind
from gpt2_chinese.locks import is_held
from gpt2_chinese.model.config import ModelConfig, resolve_model_config
from gpt2_chinese.run.complete import complete_steps, final_step
from gpt2_chinese.settings import MOST, ROOT, Settings, dashed
from gpt2_chinese.vocabulary.profiles import knows_chinese, read_vocabulary

AnySettings = TypeVar("AnySettings", bound=Settings)


def resolve(settings: AnySettings) -> AnySettings:
    """Fills in the settings and returns them; an error is one line and exit status 2.

    When the run is already complete it prints that and exits with status 0.
    """
    with exit_on_user_error():
        verdicts.share(_output_dir(settings))
        if steps := _steps_of_the_same_command(settings):
            _say_complete(settings, steps)
        fill_in(settings)
        if _is_complete(settings):
            _say_complete(settings, settings.max_steps)
        verdicts.hand_over()
    return settings


def _say_complete(settings: Settings, steps: int) -> NoReturn:
    notice(f"This run is complete: {steps} steps, in {settings.output_dir}")
    notice(what_next(settings))
    raise SystemExit(0)


def _steps_of_the_same_command(settings: Settings) -> int | None:
    """The number of steps of a run that the same command line has completed in --output-dir; else None, as mostly.

    It saves a second call the seconds in which torch would be loaded: no flag needs a check, all were checked then.
    """
    if settings.resume != "auto":
        return None
    settings.output_dir = _output_dir(settings)
    try:
        then = read_json(settings.output_dir / "config.json")
        if then["command"] != settings.argv or then["chapter"] != settings.chapter:
            return None
        if steps := complete_steps(settings.output_dir):
            state = read_json(settings.output_dir / "checkpoints" / f"step_{steps:06d}" / "state.json")
            return steps if state["step"] == steps else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _output_dir(settings: Settings) -> Path:
    return Path(settings.output_dir) if settings.output_dir else ROOT / "runs" / (settings.chapter or "run")


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
    settings.output_dir = _output_dir(settings)
    settings.vocabulary = read_vocabulary(settings.vocab, settings.vocab_profile)
    settings.vocab_profile, settings.vocab_size = settings.vocabulary.profile, len(settings.vocabulary.entries)
    num_gpus = devices.count_gpus()
    devices.choose_nproc(settings, num_gpus)
    settings.validate()
    devices.choose_device(settings, num_gpus)
    _check_accelerate(settings)
    _check_output(settings)
    settings.model.vocab_size = settings.vocab_size
    if initial:
        check_initial(initial, settings.model)
    _load_training(settings)
    settings.valid_tokens = load_tokens(settings.valid_data, settings.vocab, settings.vocab_profile)
    _resolve_steps(settings, steps_given)
    if not warmup_given:
        settings.warmup_steps = min(defaults.warmup_steps, settings.max_steps // 10)
    settings.resume_from = _find_checkpoint(settings) or initial
    if settings.resume_from is not None and settings.resume_from.is_dir():
        state = read_state(settings.resume_from)
        settings.resume_step, settings.earlier_comment = state["step"], _comment_in(state)
        settings.comment = settings.comment or settings.earlier_comment
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


def _check_accelerate(settings: Settings) -> None:
    """Raises UserError when Hugging Face's `accelerate launch` was asked for what a chapter does not take from it."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # all its launchers set this variable
        return
    for variable, flag in (("FSDP", "use_fsdp"), ("DEEPSPEED", "use_deepspeed"), ("MEGATRON_LM", "use_megatron_lm")):
        if os.environ.get(f"ACCELERATE_USE_{variable}", "").lower() == "true":
            raise UserError(f"accelerate launch --{flag}: a chapter shares the model itself; give --multi_gpu instead")
    asked = os.environ["ACCELERATE_MIXED_PRECISION"]
    if asked != "no" and asked != settings.precision:
        raise UserError(
            f"accelerate launch asks for mixed precision {asked}, which a chapter takes from its own flag: give "
            "--precision after train.py, and --mixed_precision no before it"
        )
    # It sets MASTER_ADDR for more than one process. Without GPUs it needs MPI for that, or starts just this one.
    if "RANK" not in os.environ and "MASTER_ADDR" in os.environ and not settings.is_given("nproc"):
        raise UserError(
            "accelerate launch has started one process, as it does without GPUs and without --multi_gpu: give it "
            "--multi_gpu, which also works on a CPU (leave out --cpu), or give the chapter --nproc"
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
    check_output_folder(settings.output_dir)
    _check_parts(settings.output_dir)
    launched = "RANK" in os.environ or LAUNCHED_VARIABLE in os.environ  # then this run may hold the lock
    if not launched and is_held(settings.output_dir / "metrics.jsonl"):
        raise UserError(in_use(settings.output_dir))


def _check_parts(folder: Path) -> None:
    """Raises UserError when something in an existing folder is not what a run writes there, or is not writable."""
    for name, is_folder in (("metrics.jsonl", False), ("config.json", False), ("checkpoints", True), ("tensorboard", True)):
        path = folder / name
        if not path.exists():
            continue
        if path.is_dir() != is_folder:
            raise UserError(f"--output-dir {folder} cannot be written: {path} is no {'folder' if is_folder else 'file'}; "
                            "give another folder")  # fmt: skip
        if not os.access(path, os.W_OK):
            raise UserError(f"--output-dir {folder} cannot be written: no permission for {path}")


def in_use(folder: Path) -> str:
    """The error message for a folder to which another run writes."""
    return f"--output-dir {folder} is in use by another run: give another one, or wait until that run has ended"


def _load_training(settings: Settings) -> None:
    """Loads the training corpus as ids and as rows, one source or several; tells the model which marks end a document."""
    vocab = settings.vocab, settings.vocab_profile
    if settings.mix is None and settings.mix_temperature is None:
        settings.train_tokens = load_tokens(settings.train_data, *vocab)
        settings.train_rows = _rows(settings, settings.train_tokens)
    else:
        sources, weights = load_mix(settings.train_data, settings.mix, settings.mix_temperature, *vocab)
        settings.train_tokens = MixedTokens(sources)
        rows = [_rows(settings, tokens) for tokens in sources.values()]
        settings.train_rows = Mix(list(sources), rows, weights)
    if settings.documents != "cross":
        settings.model.marks = _marks(settings)


def _marks(settings: Settings) -> tuple[int, int]:
    """The ids of the marks around a document. Of an entry on two lines the last one counts, as in Vocabulary."""
    ids = {token: i for i, token in enumerate(settings.vocabulary.entries)}
    return ids[settings.vocabulary.begin], ids[settings.vocabulary.end]


def _rows(settings: Settings, tokens: Tokens) -> Rows:
    if settings.documents != "pack":
        return Windows(tokens.ids, settings.seq_len)
    begin, end = _marks(settings)
    if begin == end:  # then no id in a row tells where a document follows the rest of a long one
        raise UserError(
            f"--documents pack needs two marks around a document, and {settings.vocab} has one, {settings.vocabulary.end}: "
            "give --documents mask, or another vocabulary"
        )
    return Packed(tokens.ids, settings.seq_len, end)


def _resolve_steps(settings: Settings, steps_given: bool) -> None:
    """Sets max_steps by --max-steps or --epochs, whichever ends first."""
    per_epoch = len(settings.train_rows) // settings.batch_size
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
        if wrong := new_damage(found):
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
        "documents",
        "mix",
        "mix_temperature",
    ):
        before = state.get("settings", {}).get(name, getattr(settings, name))
        if before != getattr(settings, name):
            notice(f"note: {dashed(name)} is {getattr(settings, name)} now, and was {before} before {found.name}")
    return found


def _comment_in(state: dict[str, Any]) -> str | None:
    """The --comment in a checkpoint's state; None where it has none, as those of earlier versions."""
    found = state.get("settings", {}).get("comment")
    return found if isinstance(found, str) else None


def _is_complete(settings: Settings) -> bool:
    """True when an earlier run has taken all steps and written final/."""
    if settings.resume != "auto" or settings.resume_step < settings.max_steps:
        return False
    return final_step(settings.output_dir) == settings.resume_step


def what_next(settings: Settings) -> str:
    """The commands to run next, ready to paste."""
    tensorboard = shlex.quote(str(display(ROOT / "scripts/tensorboard.sh")))  # it finds .venv
    default = settings.output_dir.resolve() == ROOT / "runs" / settings.chapter
    model = "" if default else f" --model {shlex.quote(str(display(settings.output_dir)))}"
    script = display(settings.program.with_name("generate.sh"))
    english = settings.vocabulary is not None and not knows_chinese(settings.vocabulary.entries)
    prompt = "'The weather today'" if english else "今天天气"
    return (
        f"  curves     bash {tensorboard} {shlex.quote(str(display(settings.output_dir)))}\n"
        f"  more text  bash {shlex.quote(str(script))}{model} --prompt {prompt} --num 3"
    )
