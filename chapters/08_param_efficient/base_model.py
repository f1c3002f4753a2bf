"""The base of the story: a model that has read three of the four shipped kinds of text, and not the fourth.

Chapter 00 trains it, as a program, the first time that it is needed: 400 steps. It goes to a folder below --base-dir whose
name has a hash of everything that decides its weights, so that another model, seed or corpus never uses it. A base that was
interrupted goes on from its newest checkpoint.

    runs/08_param_efficient_base/without_comments-1a2b3c4d/
        data/{train,valid}/{news,webtext,wiki}.json   checkpoints/   final/

Imports no torch: the base is made before the first process starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from durable.folders import digest
from gpt2_chinese.checkpoint.find import read_json
from gpt2_chinese.checkpoint.sealed_folder import new_damage
from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.errors import UserError, notice
from gpt2_chinese.files import check_output_folder, display, kind

PROGRAM = Path(__file__).resolve().parents[1] / "00_single" / "train.py"


def kinds_of(corpus: Path | str) -> dict[str, Path]:
    """The kinds of text in a corpus: file name without suffix -> file. A single file is one kind. Raises UserError."""
    return {file.stem: file for file in corpus_files(corpus)}


def file_of(corpus: Path | str, name: str, flag: str) -> Path:
    """The file of one kind of text; a corpus of a single file is that kind, whatever its name.

    Raises:
        UserError: the corpus has no such kind.
    """
    if kind(corpus, f"corpus {corpus}") == "file":
        return Path(corpus)
    found = kinds_of(corpus)
    if name not in found:
        raise UserError(f"--kind {name}: {flag} {corpus} has {', '.join(found)}; give one of them, or all")
    return found[name]


def base_folder(settings: Any, train: Path, valid: Path) -> Path:
    """The folder of the base that fits these settings, whether it exists or not.

    Args:
        settings: those of the chapter, checked; model, vocabulary, seed, --kind and --base-steps decide the base.
        train, valid: the corpora with all kinds of text.
    """
    others = [digest(file)["sha256"] for corpus in (train, valid) for file in _others(corpus, settings.kind)]
    facts = [others, settings.model.to_dict(), settings.vocabulary.digest, settings.seed, settings.base_steps]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return Path(settings.base_dir) / f"without_{settings.kind}-{key}"


def make_base(settings: Any, train: Path, valid: Path) -> Path:
    """Returns the weights file of the base, which is trained now if it is not complete.

    Raises:
        UserError: its training failed, or a launcher has started this process, so that all ranks would train it.
    """
    kind(settings.base_dir, f"--base-dir {settings.base_dir}")
    folder = base_folder(settings, train, valid)
    final = folder / "final"
    if not _is_complete(final, settings.base_steps):
        if "RANK" in os.environ:
            raise UserError(f"there is no base in {folder} yet: run the command once without a launcher, or give "
                            "--init-from")  # fmt: skip
        check_output_folder(settings.base_dir, "--base-dir")
        _train(settings, train, valid, folder)
    return final / "model.safetensors"


def _others(corpus: Path, left_out: str) -> list[Path]:
    """The files of the other kinds; a corpus of a single file is the new kind itself. Raises UserError if there is none."""
    files = [file for name, file in kinds_of(corpus).items() if name != left_out and not corpus.is_file()]
    if not files:
        raise UserError(f"--kind {left_out}: {corpus} has no other kind to train a base on; give --init-from a trained "
                        "model, or --init-from random")  # fmt: skip
    return files


def _is_complete(final: Path, steps: int) -> bool:
    return new_damage(final) is None and read_json(final / "run.json").get("step") == steps


def _train(settings: Any, train: Path, valid: Path, folder: Path) -> None:
    """Runs chapter 00 on all kinds but one."""
    names = [file.stem for file in _others(train, settings.kind)]
    for part, corpus in (("train", train), ("valid", valid)):
        (folder / "data" / part).mkdir(parents=True, exist_ok=True)
        for file in _others(corpus, settings.kind):
            shutil.copyfile(file, folder / "data" / part / file.name)
    given: dict[str, Any] = {
        "model-config": settings.model_config, "vocab": settings.vocab, "vocab-profile": settings.vocab_profile,
        "train-data": folder / "data" / "train", "valid-data": folder / "data" / "valid", "output-dir": folder,
        "max-steps": settings.base_steps, "eval-every": settings.base_steps, "save-every": max(1, settings.base_steps // 2),
        "seed": settings.seed, "device": settings.device,
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    notice(f"There is no base yet. Chapter 00 trains one, once: {', '.join(names)}, {settings.base_steps} steps.\n")
    process = subprocess.Popen([sys.executable, str(PROGRAM), *flags], stdin=subprocess.DEVNULL)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # chapter 00 saves, and ends
    try:
        status = process.wait()
    except KeyboardInterrupt:  # it reached chapter 00 as well, which says how to go on
        process.wait()
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if status or not _is_complete(folder / "final", settings.base_steps):
        raise UserError(f"the base in {display(folder)} is not complete: chapter 00 ended with status {status}; the same "
                        "command goes on from its newest checkpoint")  # fmt: skip
    notice(f"\nThe base is complete: {display(folder)}. Now it is adapted to: {settings.kind}.\n")
