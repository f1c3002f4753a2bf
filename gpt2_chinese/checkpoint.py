"""Checkpoints: one plain format for all chapters, so that each can go on from what any other saved, at any --nproc.

    checkpoints/step_000200/
        model.safetensors       float32 weights under Hugging Face's names; the tied head is left out
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step.NAME of AdamW, float32
        config.json             the model
        parts/                  instead of the first two where every rank writes its own part (parts.py)
        state.json              step, tokens, the settings that matter, versions, and what a chapter adds under "extra"
        manifest.json           size and SHA-256 of each file above, and of that table

Complete or absent: written to a folder beside, flushed to the disk, renamed. The manifest is checked before use,
because a flipped byte in a safetensors file loads without a word. torch is imported late: finding a checkpoint must not
need it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_chinese.config import ModelConfig
from gpt2_chinese.errors import RunError, UserError, notice
from gpt2_chinese.sealed_folder import check_space, damage, flush, is_whole, listed, put_in_place, seal, write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PARTS = "parts"
BYTES_EACH = 4  # of a stored number: all are float32


def save(
    directory: Path, step: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: dict[str, Any]
) -> Path:
    """Writes `directory`/step_NNNNNN and returns its path. Called by one process alone.

    Args:
        directory: the folder `checkpoints`.
        step: the step that is done.
        weights: NAME to tensor, any device and dtype; stored as float32.
        moments: as `adamw_moments` gives them.
        state: JSON content for state.json; state["model"] becomes config.json. `step` is added.

    Raises:
        RunError: the disk is too full, found out before anything is written, or a weight or moment is not finite.
        OSError: the disk became full meanwhile, or is broken; what was complete before is so still.
    """
    check_finite({**weights, **moments})
    num_bytes = BYTES_EACH * sum(tensor.numel() for tensor in [*weights.values(), *moments.values()])
    beside = begin(directory, step, num_bytes)
    _save_tensors(beside / "model.safetensors", weights)
    _save_tensors(beside / "optimizer.safetensors", moments)
    return complete(beside, step, state)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises RunError, naming the first, when a number is not finite: such a model learns nothing more, and is not kept."""
    import torch

    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.detach()).all():
            raise RunError(f"{name} holds numbers that are not finite: it is not saved")


def begin(directory: Path, step: int, num_bytes: int) -> Path:
    """An empty folder beside `directory`/step_NNNNNN, for `complete` to rename. Called by one process alone.

    Raises:
        RunError: the disk has no room for `num_bytes`.
    """
    beside = beside_of(directory, step)
    for stale in directory.glob("step_*.tmp*"):  # left by a process that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    check_space(directory, num_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    flush(directory.parent)
    beside.mkdir()
    return beside


def beside_of(directory: Path, step: int) -> Path:
    """Where `begin` makes that folder: known to all ranks."""
    return directory / f"step_{step:06d}.tmp"


def complete(beside: Path, step: int, state: dict[str, Any]) -> Path:
    """Adds state.json and config.json to the folder of `begin`, seals it and renames it; returns its path."""
    target = beside.with_suffix("")
    write_json(beside / "config.json", state.get("model", {}))
    write_json(beside / "state.json", {"step": step, **state})
    seal(beside)
    put_in_place(beside, target)
    return target


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:  # which is no OSError
        raise OSError(f"{path.name}: {error}") from None
    umask = os.umask(0)  # there is no other way to read it
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner may read


def candidates(directory: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints there, newest first; step_N.old, left by a kill while step_N was replaced, last."""
    found = []
    for folder in directory.glob("step_*") if directory.is_dir() else ():
        number = folder.name.removeprefix("step_").removesuffix(".old")
        if folder.is_dir() and number.isdigit():
            found.append((int(number), folder))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def newest_complete(directory: Path) -> Path | None:
    """The checkpoint of the highest step whose files all match their checksums; damaged ones are passed over, aloud."""
    for _, folder in candidates(directory):
        reason = damage(folder)
        if reason is None:
            return folder
        notice(f"passing over the damaged checkpoint {folder}: {reason}")
    return None


def prune(directory: Path, keep: int, written: int) -> None:
    """Removes all checkpoints older than the newest `keep` complete ones (0: none is too old), never that of step `written`.

    A damaged one does not count; it stays while it is not older than those.
    """
    whole: list[int] = []
    just_written = directory / f"step_{written:06d}"
    for step, folder in candidates(directory):
        old = bool(keep) and len(whole) >= keep
        if folder != just_written and (old or step in whole):
            gone = directory / f"step_{step:06d}.tmp.gone"  # never half of a checkpoint under its name
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
        elif folder == just_written or is_whole(folder):
            whole.append(step)


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises UserError when it cannot be read."""
    try:
        return read_json(path / "state.json")
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path} cannot be used: state.json: {error}") from None


def read(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], dict[str, Any]]:
    """Weights, moments and state of a checkpoint, on the CPU; those of parts/ are read when they are asked for.

    Raises:
        UserError: the checkpoint is damaged.
    """
    from safetensors.torch import load_file

    if reason := damage(path):
        raise UserError(f"checkpoint {path} cannot be used: {reason}")
    if any(name.startswith(f"{PARTS}/") for name in listed(path)):
        from gpt2_chinese.parts import read_parts

        return *read_parts(path / PARTS), read_state(path)
    return load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"), read_state(path)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a plain model by name, a tied one once: what `save` and `export_final` take."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a plain model, in place.

    Raises:
        UserError: names or shapes differ; all differences in one line.
    """
    import torch

    own = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in own]
    wrong += [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if wrong:
        raise UserError(f"the weights do not fit the model: {'; '.join(wrong)}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def adamw_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of torch.optim.AdamW by parameter name: exp_avg.NAME, exp_avg_sq.NAME, step.NAME."""
    import torch

    moments = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            moments[f"{key}.{name}"] = torch.as_tensor(value, dtype=torch.float32)
    return moments


def load_adamw_moments(model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Gives torch.optim.AdamW the state that `adamw_moments` took."""
    for name, parameter in model.named_parameters():
        if f"step.{name}" not in moments:
            continue  # a parameter that had never been stepped
        optimizer.state[parameter] = {
            "step": moments[f"step.{name}"].clone(),
            "exp_avg": moments[f"exp_avg.{name}"].to(parameter, copy=True),
            "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(parameter, copy=True),
        }


def export_final(
    directory: Path, config: ModelConfig, weights: Mapping[str, Tensor], vocab: Path | str, about: dict[str, Any],
    profile: str = "auto",
) -> Path:  # fmt: skip
    """Writes `directory`: weights, config.json and vocabulary in plain Hugging Face form, and returns its path.

    Args:
        directory: usually final/ of a run; replaced as a whole.
        config: of the model.
        weights: NAME to tensor; stored as float32.
        vocab: the vocabulary file.
        about: what goes into run.json: where the model comes from.
        profile: of the vocabulary.
    """
    beside = begin_final(directory, BYTES_EACH * sum(tensor.numel() for tensor in weights.values()))
    _save_tensors(beside / "model.safetensors", weights)
    return complete_final(beside, directory, config, vocab, about, profile)


def begin_final(directory: Path, num_bytes: int) -> Path:
    """An empty folder beside `directory`, for model.safetensors. Called by one process alone.

    Raises:
        RunError: the disk has no room for `num_bytes`.
    """
    beside = beside_final(directory)
    shutil.rmtree(beside, ignore_errors=True)
    check_space(directory, num_bytes)
    beside.mkdir(parents=True)
    return beside


def beside_final(directory: Path) -> Path:
    """Where `begin_final` makes that folder: known to all ranks."""
    return directory.with_name(f"{directory.name}.tmp")


def complete_final(
    beside: Path, directory: Path, config: ModelConfig, vocab: Path | str, about: dict[str, Any], profile: str = "auto"
) -> Path:
    """Adds what belongs to the weights, seals the folder and renames it to `directory`; returns that.

    Raises:
        RunError: a weight is not finite.
    """
    from safetensors import safe_open

    from gpt2_chinese.vocabulary import Vocabulary

    if (beside / "model.safetensors").is_file():  # an export may be a pickle for older programs: its weights were read
        with safe_open(beside / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                check_finite({name: file.get_tensor(name)})
    vocabulary = Vocabulary.load(vocab, profile)
    ids = {"bos_token_id": vocabulary.begin_id, "eos_token_id": vocabulary.end_id, "pad_token_id": vocabulary.pad_id}
    write_json(beside / "config.json", {**config.to_dict(), **ids})
    vocabulary.save(beside)
    write_json(beside / "run.json", {"layout": vocabulary.layout, "vocab_profile": vocabulary.profile, **about})
    seal(beside)
    put_in_place(beside, directory)
    return directory
