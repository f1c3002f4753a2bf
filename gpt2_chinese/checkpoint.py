"""Checkpoints: one plain format for all chapters, so that each can go on from what any other saved, at any --nproc.

    checkpoints/step_000200/
        model.safetensors       float32 weights under Hugging Face's names; the tied head is left out
        optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step.NAME of AdamW, float32
        config.json             the model
        parts/                  instead of the first two where every rank writes its own part (parts.py)
        state.json              step, tokens, the settings that matter, versions, and what a chapter adds under "extra"
        manifest.json           size and SHA-256 of each file above

Complete or absent: written to a folder beside, flushed to the disk, renamed. The manifest is checked before use,
because a flipped byte in a safetensors file loads without a word. torch is imported late: finding a checkpoint must not
need it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_chinese.config import ModelConfig
from gpt2_chinese.errors import UserError, notice

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MANIFEST, PARTS = "manifest.json", "parts"


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
    """
    beside = begin(directory, step)
    _save_tensors(beside / "model.safetensors", weights)
    _save_tensors(beside / "optimizer.safetensors", moments)
    return complete(beside, step, state)


def begin(directory: Path, step: int) -> Path:
    """An empty folder beside `directory`/step_NNNNNN, for `complete` to rename. Called by one process alone."""
    beside = beside_of(directory, step)
    for stale in directory.glob("step_*.tmp*"):  # left by a process that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def beside_of(directory: Path, step: int) -> Path:
    """Where `begin` makes that folder: known to all ranks."""
    return directory / f"step_{step:06d}.tmp"


def complete(beside: Path, step: int, state: dict[str, Any]) -> Path:
    """Adds state.json and config.json to the folder of `begin`, seals it and renames it; returns its path."""
    target = beside.with_suffix("")
    write_json(beside / "config.json", state.get("model", {}))
    write_json(beside / "state.json", {"step": step, **state})
    _seal(beside)
    _replace_folder(beside, target)
    return target


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    import torch
    from safetensors.torch import save_file

    plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
    umask = os.umask(0)  # there is no other way to read it
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner may read


def write_json(path: Path, content: Any) -> None:
    """Writes readable JSON, beside and renamed."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _seal(folder: Path) -> None:
    """Writes the manifest of a folder and flushes all of it to the disk."""
    below = sorted(path for path in folder.rglob("*") if path != folder / MANIFEST)
    files = [path for path in below if path.is_file()]
    entries = {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": _digest(f)} for f in files}
    write_json(folder / MANIFEST, entries)
    for path in [*below, folder / MANIFEST, folder]:
        _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_folder(beside: Path, target: Path) -> None:
    """Renames a finished folder into its place; what stood there is moved away first, then removed."""
    old = beside.with_name(f"{beside.name}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(beside, target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint or a final/ folder; None when every file is as the manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (path / name).stat().st_size != entry["bytes"] or _digest(path / name) != entry["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    return None


def newest_complete(directory: Path) -> Path | None:
    """The checkpoint of the highest step whose files all match their checksums; damaged ones are passed over, aloud."""
    numbers = {}
    for folder in directory.glob("step_*") if directory.is_dir() else ():
        if folder.is_dir() and folder.name.removeprefix("step_").isdigit():
            numbers[int(folder.name.removeprefix("step_"))] = folder
    for step in sorted(numbers, reverse=True):
        reason = damage(numbers[step])
        if reason is None:
            return numbers[step]
        notice(f"passing over the damaged checkpoint {numbers[step]}: {reason}")
    return None


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    return read_json(path / "state.json")


def load(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], dict[str, Any]]:
    """Weights, moments and state of a checkpoint, on the CPU; those of parts/ are read when they are asked for.

    A file instead of a folder holds weights to begin with (--init-from): no moments, and a state of step 0.

    Raises:
        UserError: the checkpoint is damaged.
    """
    from safetensors.torch import load_file

    if path.is_file():
        from gpt2_chinese.weights import initial_state

        return initial_state(path)
    if reason := damage(path):
        raise UserError(f"checkpoint {path} cannot be used: {reason}")
    if (path / PARTS).is_dir():
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
    beside = begin_final(directory)
    _save_tensors(beside / "model.safetensors", weights)
    return complete_final(beside, directory, config, vocab, about, profile)


def begin_final(directory: Path) -> Path:
    """An empty folder beside `directory`, for model.safetensors. Called by one process alone."""
    beside = beside_final(directory)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def beside_final(directory: Path) -> Path:
    """Where `begin_final` makes that folder: known to all ranks."""
    return directory.with_name(f"{directory.name}.tmp")


def complete_final(
    beside: Path, directory: Path, config: ModelConfig, vocab: Path | str, about: dict[str, Any], profile: str = "auto"
) -> Path:
    """Adds what belongs to the weights, seals the folder and renames it to `directory`; returns that."""
    from gpt2_chinese.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(vocab, profile)
    ids = {"bos_token_id": vocabulary.begin_id, "eos_token_id": vocabulary.end_id, "pad_token_id": vocabulary.pad_id}
    write_json(beside / "config.json", {**config.to_dict(), **ids})
    vocabulary.save(beside)
    write_json(beside / "run.json", {"layout": vocabulary.layout, "vocab_profile": vocabulary.profile, **about})
    _seal(beside)
    _replace_folder(beside, directory)
    return directory
