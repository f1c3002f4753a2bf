"""Writes final/ of a run, and exports: weights, config.json and vocabulary in plain Hugging Face form."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from durable.files import write_json
from gpt2_chinese.checkpoint.model_state import BYTES_PER_NUMBER, check_finite, save_tensors
from gpt2_chinese.checkpoint.sealed_folder import check_space, put_in_place, seal
from gpt2_chinese.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


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
        about: the content of run.json: where the model comes from.
        profile: the vocabulary's profile: how it splits text, see vocabulary/profiles.py.
    """
    staging = begin_final(directory, BYTES_PER_NUMBER * sum(tensor.numel() for tensor in weights.values()))
    save_tensors(staging / "model.safetensors", weights)
    return complete_final(staging, directory, config, vocab, about, profile)


def begin_final(directory: Path, num_bytes: int) -> Path:
    """Makes an empty staging folder next to `directory`, for model.safetensors. Only one process may call it.

    Raises:
        RunError: the disk has no room for `num_bytes`.
    """
    staging = staging_final(directory)
    shutil.rmtree(staging, ignore_errors=True)
    check_space(directory, num_bytes)
    staging.mkdir(parents=True)
    return staging


def staging_final(directory: Path) -> Path:
    """The path of the staging folder that `begin_final` makes. Ranks that write a part of the weights call this, too."""
    return directory.with_name(f"{directory.name}.tmp")


def complete_final(
    staging: Path, directory: Path, config: ModelConfig, vocab: Path | str, about: dict[str, Any], profile: str = "auto"
) -> Path:
    """Adds config.json, vocabulary and run.json to the weights, seals the folder, renames it to `directory`, returns it.

    Raises:
        RunError: a weight is not finite.
    """
    from safetensors import safe_open

    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

    # `weights export --format bin` writes pytorch_model.bin instead: its weights come from a file, not from a run.
    for written in sorted(staging.glob("model*.safetensors")):
        with safe_open(written, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                check_finite({name: file.get_tensor(name)})
    vocabulary = Vocabulary.load(vocab, profile)
    ids = {"bos_token_id": vocabulary.begin_id, "eos_token_id": vocabulary.end_id, "pad_token_id": vocabulary.pad_id}
    write_json(staging / "config.json", {**config.to_dict(), **ids})
    vocabulary.save(staging)
    write_json(staging / "run.json", {"layout": vocabulary.layout, "vocab_profile": vocabulary.profile, **about})
    seal(staging)
    put_in_place(staging, directory)
    return directory
