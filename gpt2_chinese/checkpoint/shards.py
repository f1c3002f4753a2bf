"""Weights in several safetensors files with an index, as Hugging Face's save_pretrained divides a large model.

    model-00001-of-00003.safetensors ...   tensors in the model's order, at most so many bytes of them a file
    model.safetensors.index.json           {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}

What fits into one file is model.safetensors, without an index. Only one file's tensors are in memory at a time, where the
source is mapped (read_tensors).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from durable.files import write_json
from gpt2_chinese.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes of "5GB" (decimal, as Hugging Face counts), "512MiB" or a plain number. Raises UserError."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", text.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size < 1:
        raise UserError(f"--max-shard-size {text!r} is no size: give a number with a unit, such as 5GB or 512MiB")
    return size


def divide(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names of each file: in their order, at most `most` bytes a file. A larger tensor has a file of its own."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    return files


def save_shards(weights: Mapping[str, Tensor], folder: Path, most: int, prepare: Callable[[Tensor], Tensor]) -> list[Path]:
    """Writes the weights into an existing folder and returns the files with tensors. Raises OSError.

    Args:
        weights: NAME to tensor.
        folder: a staging folder; a reader never sees half of it.
        most: bytes of tensors a file.
        prepare: called with each tensor, shortly before it is written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files = divide({name: tensor.nbytes for name, tensor in weights.items()}, most)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for file, part in zip(names, files, strict=True):
        try:
            save_file({name: prepare(weights[name]) for name in part}, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # which is no OSError
            raise OSError(0, f"{file}: {error}") from None
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read its files
    if len(files) > 1:
        places = {name: file for file, part in zip(names, files, strict=True) for name in part}
        total = sum(tensor.nbytes for tensor in weights.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return [folder / file for file in names]
