"""Weights from files in Hugging Face's format: one or several, safetensors or pickled, of any age.

    model.safetensors                 model.safetensors.index.json + model-00001-of-00002.safetensors ...
    pytorch_model.bin                 pytorch_model.bin.index.json + pytorch_model-00001-of-00002.bin ...

Reading never runs code: pickles are read by torch.load with weights_only=True.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig

# mask buffers that older versions of transformers stored with the weights; c_attn.bias is none of them
_FILLER = re.compile(r"(^|\.)h\.\d+\.attn\.masked_bias$")
_MASK = re.compile(r"(^|\.)h\.\d+\.attn\.bias$")
_TIED = "transformer.wte.weight"
_NAMED_AT_MOST = 40  # enough for all kinds of weights, each missing in some layers and misshapen in others


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of all files that an index names, as stored, on the CPU; memory-mapped where possible.

    Raises:
        UserError: an unreadable file, a pickle that holds more than tensors, an index that names files elsewhere.
    """
    if file.suffix == ".json":
        return _read_indexed(file)
    found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found):
        raise UserError(f"{file} holds no weights by name: give the state of a GPT-2, as save_pretrained writes it")
    for name, tensor in found.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_complex() or tensor.is_quantized:
            raise UserError(f"{file}: {name} is no plain tensor: give the state of a GPT-2, as save_pretrained writes it")
    return found


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except Exception as error:  # the library raises several kinds, and some of its own
        raise UserError(f"cannot read the weights {file}: {error}") from None


def _read_pickle(file: Path) -> Any:
    for mapped in (True, False):  # files of before 2020 cannot be mapped
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except OSError as error:
            raise UserError(f"cannot read the weights {file}: {error.strerror}") from None
        except Exception as error:  # whatever a damaged or hostile file makes the reader raise
            message = str(error)
    if named := re.search(r"(?:GLOBAL|class|function) ([\w.]+\.\w+)", message):
        raise UserError(f"{file} is refused: it is a pickle that names {named[1]}: only plain tensors are read")
    raise UserError(
        f"cannot read the weights {file}: damaged, or a pickle that holds more than plain tensors, which is not read: "
        "it could run code"
    )


def _read_indexed(file: Path) -> dict[str, Tensor]:
    try:
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
        inside = all(Path(name).name == name and name.endswith((".safetensors", ".bin")) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{file} is no index of weights: it must have a weight_map from names to files") from None
    if not inside or not names:
        raise UserError(f"{file}: its weight_map must name .safetensors or .bin files of the same folder")
    found: dict[str, Tensor] = {}
    for name in names:
        if not (file.parent / name).is_file():
            raise UserError(f"{file} names {name}, which is missing: the download is not complete")
        found |= read_tensors(file.parent / name)
    missing = sorted(set(places) - set(found))
    if missing:
        raise UserError(f"{file} names {_listed(missing)}, which its files do not hold: the download is not complete")
    return found


def under_our_names(found: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Tensors of any version of transformers under this project's names, each as it is stored.

    Adds the prefix `transformer.`, leaves out the mask buffers of old versions and the head, which is the embedding.

    Raises:
        UserError: a head that is not the embedding, or a name that comes twice.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if _FILLER.search(name) or (_MASK.search(name) and tensor.ndim == 4):
            continue
        ours = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if ours in weights:
            raise UserError(f"{source} holds {name} twice, with and without the prefix transformer.")
        weights[ours] = tensor
    head, embedding = weights.pop("lm_head.weight", None), weights.get(_TIED)
    if head is not None and (embedding is None or head.shape != embedding.shape or not torch.equal(head, embedding)):
        raise UserError(f"{source}: lm_head.weight is not the embedding wte.weight: this model's head is tied to it")
    return weights


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a model, by name; allocates no storage."""
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT2LMHeadModel(config).named_parameters()}


def check_fit(weights: dict[str, Tensor], config: ModelConfig, source: Path) -> None:
    """Compares weights with a configuration.

    Raises:
        UserError: names or shapes differ, or a dtype is not floating-point; all differences in one line.
    """
    wanted = shapes_of(config)
    wrong = [f"{name} is missing" for name in wanted if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in wanted]
    for name in wanted:
        if name not in weights:
            continue
        tensor = weights[name]
        if tuple(tensor.shape) != wanted[name]:
            wrong.append(f"{name} is {tuple(tensor.shape)} instead of {wanted[name]}")
        elif not tensor.is_floating_point():
            wrong.append(f"{name} holds {tensor.dtype}")
    if wrong:
        raise UserError(f"{source} does not fit the model's configuration: {_listed(_by_kind(wrong))}")


def _by_kind(items: list[str]) -> list[str]:
    """Merges equal items of many layers into one: h.*.ln_1.weight is missing (12 layers)."""
    kinds: dict[str, list[str]] = {}
    for item in items:
        kinds.setdefault(re.sub(r"\bh\.\d+\.", "h.*.", item), []).append(item)
    return [same[0] if len(same) == 1 else f"{kind} ({len(same)} layers)" for kind, same in kinds.items()]


def _listed(items: list[str]) -> str:
    more = len(items) - _NAMED_AT_MOST
    return "; ".join(items[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
