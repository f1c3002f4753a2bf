"""Checkpoints: one plain format for all chapters, so that each can resume what any other saved, at any --nproc.

    checkpoints/step_000200/
        model.safetensors       float32 weights under Hugging Face's names; the tied head is left out
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step.NAME of AdamW, float32
        config.json             the model
        parts/                  instead of the first two where every rank writes its own part (sharded.py)
        state.json              step, tokens, the settings that matter, versions, and what a chapter adds under "extra"
        manifest.json           size and SHA-256 of each file above, and of that table

Complete or absent: written to a staging folder, flushed to the disk, renamed. The manifest is checked before use,
because a safetensors file with a flipped byte loads without an error. torch is imported late: naming a checkpoint must
not need it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from durable.files import flush, write_json
from gpt2_chinese.checkpoint.find import PARTS, candidates, read_state
from gpt2_chinese.checkpoint.model_state import BYTES_PER_NUMBER, check_finite, save_tensors
from gpt2_chinese.checkpoint.sealed_folder import check_space, listed, new_damage, put_in_place, seal
from gpt2_chinese.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def save(
    directory: Path, step: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: dict[str, Any]
) -> Path:
    """Writes `directory`/step_NNNNNN and returns its path. Called by one process alone.

    Args:
        directory: the folder `checkpoints`.
        step: the last step done.
        weights: NAME to tensor, any device and dtype; stored as float32.
        moments: the result of `adamw_moments`.
        state: JSON content for state.json; state["model"] becomes config.json. `step` is added.

    Raises:
        RunError: the disk is too full, found out before anything is written, or a weight or moment is not finite.
        OSError: the disk became full meanwhile, or fails; earlier checkpoints stay complete.
    """
    check_finite({**weights, **moments})
    num_bytes = BYTES_PER_NUMBER * sum(tensor.numel() for tensor in [*weights.values(), *moments.values()])
    staging = begin(directory, step, num_bytes)
    save_tensors(staging / "model.safetensors", weights)
    save_tensors(staging / "optimizer.safetensors", moments)
    return complete(staging, step, state)


def begin(directory: Path, step: int, num_bytes: int) -> Path:
    """An empty staging folder next to `directory`/step_NNNNNN, for `complete` to rename. Called by one process alone.

    Raises:
        RunError: the disk has no room for `num_bytes`.
    """
    staging = staging_folder(directory, step)
    for stale in directory.glob("step_*.tmp*"):  # left by a process that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    check_space(directory, num_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    flush(directory.parent)
    staging.mkdir()
    return staging


def staging_folder(directory: Path, step: int) -> Path:
    """The staging folder of `begin`, which every rank can name."""
    return directory / f"step_{step:06d}.tmp"


def complete(staging: Path, step: int, state: dict[str, Any]) -> Path:
    """Adds state.json and config.json to the folder of `begin`, seals it and renames it; returns its path."""
    target = staging.with_suffix("")
    write_json(staging / "config.json", state.get("model", {}))
    write_json(staging / "state.json", {"step": step, **state})
    seal(staging)
    put_in_place(staging, target)
    return target


def prune(directory: Path, written: int, keep_last: int, keep_every: int | None = None) -> None:
    """Removes all checkpoints older than the newest `keep_last` complete ones (0: keeps all), never that of step `written`.

    A damaged checkpoint is not counted, and is kept while it is not older than those. Checkpoints whose step is a multiple
    of `keep_every` count like the others, and are kept for good.
    """
    whole: list[int] = []
    just_written = directory / f"step_{written:06d}"
    for step, folder in candidates(directory):
        old = bool(keep_last) and len(whole) >= keep_last
        for_good = folder == just_written or bool(keep_every) and step % keep_every == 0
        if folder != just_written and (step in whole or (old and not for_good)):
            gone = directory / f"step_{step:06d}.tmp.gone"  # so that a kill leaves no half of a checkpoint under its name
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
        elif folder == just_written or (not old and new_damage(folder) is None):
            whole.append(step)


def read_checkpoint(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], dict[str, Any]]:
    """Weights, moments and state of a checkpoint, on the CPU; the tensors of parts/ are read on access.

    Raises:
        UserError: the checkpoint is damaged.
    """
    from safetensors.torch import load_file

    if reason := new_damage(path):
        raise UserError(f"checkpoint {path} cannot be used: {reason}")
    if any(name.startswith(f"{PARTS}/") for name in listed(path)):
        from gpt2_chinese.checkpoint.sharded import read_parts

        return *read_parts(path / PARTS), read_state(path)
    return load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"), read_state(path)
