"""Reads a trained model from what a user points at: a run, its final/, a checkpoint, a Hugging Face folder or file."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from gpt2_chinese import checkpoint
from gpt2_chinese.config import ModelConfig
from gpt2_chinese.errors import UserError
from gpt2_chinese.model import GPT2LMHeadModel
from gpt2_chinese.vocabulary import Vocabulary

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# buffers that older versions of transformers kept in the state: the causal mask and its filler
_OLD_BUFFER = re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$")


def find_model(path: Path | str) -> Path:
    """The folder with weights that a path means: a run gives its final/, else its newest checkpoint.

    Raises:
        UserError: there is nothing of the kind.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    if any((folder / name).is_file() for name in WEIGHT_FILES):
        return folder
    if (folder / "final").is_dir():
        return folder / "final"
    newest = checkpoint.newest_complete(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)
    if newest is None:
        raise UserError(f"no trained model in {path}: give a run, its final/, a checkpoint or a Hugging Face folder")
    return newest


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder under this project's names, on the CPU.

    Adds the prefix `transformer.` where it is missing, leaves out the mask buffers of old versions and the tied head.

    Raises:
        UserError: an unreadable file, or a head that is not the embedding.
    """
    file = next(folder / name for name in WEIGHT_FILES if (folder / name).is_file())
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"cannot read the weights {file}: {error}") from None
    weights = {}
    for name, tensor in found.items():
        if _OLD_BUFFER.search(name):
            continue
        weights[name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"] = tensor
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights.get("transformer.wte.weight", head)):
        raise UserError(f"{file}: lm_head.weight is not the embedding: this model's head is tied to it")
    return weights


def load_model(
    path: Path | str, device: torch.device | str = "cpu", vocab: Path | str | None = None
) -> tuple[GPT2LMHeadModel, Vocabulary]:
    """A model in evaluation mode with its vocabulary.

    Args:
        path: as `find_model` takes it.
        device: where to put it.
        vocab: a vocabulary file, where the folder has none (a checkpoint takes that of its run).

    Raises:
        UserError: no model, weights that do not fit its config.json, or no vocabulary.
    """
    folder = find_model(path)
    config = ModelConfig.from_file(folder)
    # a checkpoint holds no vocabulary, but knows which one its run had and how it was used
    state = checkpoint.read_state(folder) if (folder / "state.json").is_file() else {}
    if vocab is None:
        has_one = any((folder / name).is_file() for name in ("vocab.txt", "tokenizer.json"))
        vocab = folder if has_one else state.get("settings", {}).get("vocab")
    if vocab is None:
        raise UserError(f"{folder} has no vocabulary: give one with --vocab")
    then = state.get("vocabulary", {})
    vocabulary = Vocabulary.load(vocab, then.get("profile", "auto"))
    if vocabulary.size != (config.vocab_size or vocabulary.size):
        raise UserError(f"vocabulary {vocab} has {vocabulary.size} entries, the model in {folder} {config.vocab_size}")
    if then and then != vocabulary.file.facts():
        raise UserError(f"vocabulary {vocab} is not the one that {folder} was trained with: give that with --vocab")
    config.vocab_size = vocabulary.size
    model = GPT2LMHeadModel(config)
    checkpoint.load_weights(model, read_weights(folder))
    return model.to(device).eval(), vocabulary
