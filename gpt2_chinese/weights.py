"""Writes a trained model for others to read.

bash scripts/python.sh -m gpt2_chinese.weights export runs/00_single --output exported
bash scripts/python.sh -m gpt2_chinese.weights export runs/00_single --output exported --format bin --dtype float16
bash scripts/python.sh -m gpt2_chinese.weights export runs/07_patrickstar --output exported --max-shard-size 5GB

The export is a folder that transformers reads: weights, config.json, vocabulary, the ids of the begin and end tokens.
The weights keep their stored dtype unless --dtype names another. With --max-shard-size they are divided into files
model-00001-of-0000N.safetensors and an index.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_chinese.checkpoint.final import begin_final, complete_final
from gpt2_chinese.checkpoint.shards import parse_size, save_shards
from gpt2_chinese.checkpoint.trained_model import config_and_vocabulary, find_weights, read_weights
from gpt2_chinese.errors import OneLineParser, RunError, UserError, exit_on_user_error
from gpt2_chinese.files import check_output_folder
from gpt2_chinese.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")


def export(
    path: Path | str, output: Path | str, form: str = "safetensors", dtype: str | None = None,
    vocab: Path | str | None = None, max_shard_size: str | None = None,
) -> Path:  # fmt: skip
    """Writes a folder that transformers reads, complete or not at all, and returns its path.

    The weights keep their bits unless dtype is given. The configuration keeps keys that this project does not use. The ids
    of begin, end and padding come from the vocabulary: the model's own may be outside of it (50256 of 21128 entries).

    Args:
        path: any path that `find_weights` accepts.
        output: a new or empty folder.
        form: "safetensors", or "bin" for programs that read nothing else.
        dtype: one of DTYPES; as stored when None.
        vocab: a vocabulary file, where there is none next to the weights.
        max_shard_size: the most bytes of weights a file, such as "5GB"; one file when None.

    Raises:
        UserError: no model, a size that is none, an output that is not empty or has no room, numbers that are not finite
            or that the dtype cannot hold.
    """
    output = Path(output)
    check_output_folder(output, "--output")
    import torch

    if max_shard_size is not None and form == "bin":
        raise UserError("--max-shard-size is for --format safetensors: leave one of them out")
    most = None if max_shard_size is None else parse_size(max_shard_size)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output {output} exists already: give a new folder")
    file = find_weights(path)
    config, vocabulary = config_and_vocabulary(file, vocab)
    weights = read_weights(file, config)
    if dtype is not None:
        for name, tensor in weights.items():
            weights[name] = tensor.to(getattr(torch, dtype))
            if bool(tensor.isfinite().all()) and not bool(weights[name].isfinite().all()):
                raise UserError(f"--dtype {dtype} cannot hold the numbers of {name}: use bfloat16 or float32")
        keys = [key for key in ("dtype", "torch_dtype") if key in config.extra] or ["torch_dtype"]
        config.extra |= dict.fromkeys(keys, dtype)
    try:
        staging = begin_final(output, sum(tensor.nbytes for tensor in weights.values()))
        _save(weights, staging, form, most)
        about = {"exported_from": str(path)}
        return complete_final(staging, output, config, vocabulary.file.path, about, vocabulary.profile)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    except RunError as error:  # no room on the disk, or a weight that is not finite
        raise UserError(f"{path} is not exported: {error}") from None


def _save(weights: dict[str, Tensor], folder: Path, form: str, most: int | None) -> None:
    import torch

    def plain(tensor: Tensor) -> Tensor:
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)  # a view would save its base

    if form == "bin":
        tensors = {name: plain(tensor) for name, tensor in weights.items()}
        torch.save({**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}, folder / "pytorch_model.bin")
    else:
        save_shards(weights, folder, most or sum(tensor.nbytes for tensor in weights.values()), plain)


def main(argv: list[str] | None = None) -> None:
    """Runs the command `export`."""
    parser = OneLineParser(
        prog="bash scripts/python.sh -m gpt2_chinese.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command = parser.add_subparsers(required=True, dest="command").add_parser("export", help="write a Hugging Face folder")
    command.add_argument("model", help="a run, its final/, a checkpoint, or a Hugging Face folder or file")
    command.add_argument("--output", required=True, help="the folder to write, new or empty")
    command.add_argument("--format", default="safetensors", choices=("safetensors", "bin"),
                         help="file format of the weights (default: safetensors)")  # fmt: skip
    command.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as they are stored)")
    command.add_argument("--max-shard-size", metavar="SIZE",
                         help="most bytes of weights in one file, such as 5GB or 512MiB (default: one file)")  # fmt: skip
    command.add_argument("--vocab", help="vocab.txt or tokenizer.json (default: that of the model's folder)")
    with exit_on_user_error():
        a = parser.parse_args(argv)
        written = export(a.model, a.output, a.format, a.dtype, a.vocab, a.max_shard_size)
        config = ModelConfig.from_file(written)
        print(f"{written}: {config.num_parameters():,} parameters, vocabulary of {config.vocab_size:,}")


if __name__ == "__main__":
    main()
