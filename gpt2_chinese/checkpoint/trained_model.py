"""Loads a trained model from any path that a user gives: a run, its final/, a checkpoint, a Hugging Face folder or file.

torch is imported late: finding a model must not need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from durable.cores import limit_threads
from gpt2_chinese.checkpoint.find import PARTS, newest_complete, read_state
from gpt2_chinese.checkpoint.model_state import load_weights
from gpt2_chinese.checkpoint.sealed_folder import MANIFEST, new_damage
from gpt2_chinese.checkpoint.step_folder import read_checkpoint
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import reason
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.vocabulary.profiles import vocabulary_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary


WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
ADAPTER_FILE = "adapter_model.safetensors"  # of Hugging Face PEFT; chapter 08 writes and reads it
VOCABULARY_FILES = ("vocab.txt", "tokenizer.json")


def find_weights(path: Path | str) -> Path:
    """The file of weights that a path means, next to a config.json; for a run in final/, else in its newest checkpoint.

    For a checkpoint that ranks wrote in parts it is parts/.metadata.

    Raises:
        UserError: no trained model at this path, or a path that cannot be read.
    """
    path = Path(path)
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        more = "give a run, its final/, a checkpoint or a Hugging Face folder"
        raise UserError(f"no trained model in {path}: {reason(error)}; {more}") from None
    is_file = path.is_file()
    if is_file and (path.suffix in (".safetensors", ".bin") or path.name in (*WEIGHT_FILES, ".metadata")):
        return path
    folder = path.parent if is_file else path
    names = (*WEIGHT_FILES, f"{PARTS}/.metadata")
    if not any((folder / name).is_file() for name in names):
        if (folder / "final").is_dir():
            folder = folder / "final"
        else:
            below = folder / "checkpoints"
            folder = newest_complete(below if below.is_dir() else folder) or folder
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None and (folder / ADAPTER_FILE).is_file():
        raise UserError(f"{path} holds an adapter, which is no model without its base: give merged/ of a run with --merge")
    if found is None:
        raise UserError(f"no trained model in {path}: give a run, its final/, a checkpoint or a Hugging Face "
                        "folder; or train first")
    return found


def find_model(path: Path | str) -> Path:
    """The folder of `find_weights`, which has the config.json. Raises UserError."""
    return _folder_of(find_weights(path))


def _folder_of(file: Path) -> Path:
    return file.parent.parent if file.name == ".metadata" else file.parent


def _state_of(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json; {} for a folder that is no checkpoint."""
    return read_state(folder) if (folder / "state.json").is_file() else {}


def find_vocabulary(folder: Path) -> Path | None:
    """The vocabulary in a folder with weights; for a checkpoint, the vocabulary of its run; None where neither exists."""
    if any((folder / name).is_file() for name in VOCABULARY_FILES):
        return vocabulary_file(folder)
    settings = _state_of(folder).get("settings")
    vocab = settings.get("vocab") if isinstance(settings, dict) else None
    return Path(vocab) if isinstance(vocab, str) else None


def read_weights(path: Path | str, config: ModelConfig | None = None) -> dict[str, Tensor]:
    """The weights of a folder or file under this project's names, as they are stored, on the CPU.

    Adds the prefix `transformer.` where it is missing, leaves out the mask buffers of old versions and the tied head.

    Args:
        path: any path that `find_weights` accepts.
        config: the configuration that they must fit, their folder's when None. Its vocab_size may be None.

    Raises:
        UserError: an unreadable file, a pickle with more than tensors, a head that is not the embedding, unknown or
            missing names, shapes that differ (all of them in one line).
    """
    from gpt2_chinese.checkpoint.huggingface import check_fit, read_tensors, under_our_names

    file = find_weights(path)
    if config is None:
        config = ModelConfig.from_file(_folder_of(file))
    if file.name == ".metadata":
        weights = dict(read_checkpoint(_folder_of(file))[0])
    else:
        weights = under_our_names(read_tensors(file), file)
    if config.vocab_size is None:
        embedding = weights.get("transformer.wte.weight")
        rows = embedding.shape[0] if embedding is not None and embedding.ndim == 2 else 1
        config = ModelConfig(**{**vars(config), "vocab_size": rows})
    check_fit(weights, config, file)
    return weights


def load_model(
    path: Path | str, device: torch.device | str = "cpu", vocab: Path | str | None = None
) -> tuple[GPT2LMHeadModel, Vocabulary]:
    """A model in evaluation mode with its vocabulary.

    Args:
        path: any path that `find_weights` accepts.
        device: where to put the model; it computes in float32, however the weights are stored.
        vocab: a vocabulary file, where the folder has none (for a checkpoint the default is that of its run).

    Raises:
        UserError: no model, weights that do not fit its config.json, or no vocabulary.
    """
    import torch

    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    file = find_weights(path)
    config, vocabulary = config_and_vocabulary(file, vocab)
    weights = read_weights(file, config)
    with torch.device("meta"):  # draws no initial weights, which would be overwritten at once
        model = GPT2LMHeadModel(config)
    model.to_empty(device="cpu").tie_weights()
    load_weights(model, weights)
    return model.to(device).eval(), vocabulary


def pick_device(name: str) -> torch.device:
    """The device of a command of one process: what --device auto, cpu or cuda means on this machine.

    Limits torch's threads (see `limit_threads`).

    Raises:
        UserError: --device cuda, but torch finds no GPU.
    """
    import torch

    limit_threads()
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UserError(
            "--device cuda: this machine has no GPU that torch can use; give --device cpu, or leave --device out"
        )
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def config_and_vocabulary(file: Path, vocab: Path | str | None) -> tuple[ModelConfig, Vocabulary]:
    """Configuration and vocabulary for the weights in a file, vocab_size set to the vocabulary's. Raises UserError."""
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

    folder = _folder_of(file)
    config = ModelConfig.from_file(folder)
    # a checkpoint contains no vocabulary, but its state names the vocabulary and the profile of its run
    state = _state_of(folder)
    vocab = vocab or find_vocabulary(folder)
    if vocab is None:
        raise UserError(f"{folder} has no vocabulary: give one with --vocab")
    then = state.get("vocabulary", {})
    vocabulary = Vocabulary.load(vocab, then.get("profile", "auto"))
    if vocabulary.size != (config.vocab_size or vocabulary.size):
        raise UserError(f"vocabulary {vocab} has {vocabulary.size} entries, the model in {folder} {config.vocab_size}")
    if then and then != vocabulary.file.facts():
        raise UserError(f"vocabulary {vocab} is not the one that {folder} was trained with: give that with --vocab")
    config.vocab_size = vocabulary.size
    return config, vocabulary


def begin_from(path: Path | str) -> tuple[Path, Path | None]:
    """The files that --init-from means: the weights, and the vocabulary next to them or None. Raises UserError."""
    file = find_weights(path)
    folder = _folder_of(file)
    if (folder / MANIFEST).is_file() and (reason := new_damage(folder)):
        raise UserError(f"--init-from {path}: {folder} cannot be used: {reason}")
    return file, find_vocabulary(folder)


def check_initial(file: Path, config: ModelConfig) -> None:
    """Reads the initial weights once, before ranks are started, to find errors. Raises UserError as `read_weights`."""
    try:
        read_weights(file, config)
    except UserError as error:
        raise UserError(f"--init-from {file}: {error}") from None
