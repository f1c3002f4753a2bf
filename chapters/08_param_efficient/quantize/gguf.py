"""Writes a GPT-2 as GGUF, the file format of ggml and llama.cpp (specification: docs/gguf.md of ggml, version 3).

    "GGUF" | version | number of tensors | number of keys
    keys:     name, type, value                                gpt2.block_count = 12, tokenizer.ggml.tokens = [...]
    tensors:  name, dimensions, type, offset                   blk.0.attn_qkv.weight, [768, 2304], Q8_0, 0
    padding, then the tensors' bytes, each from a multiple of 32 on

All numbers are little-endian. Dimensions are listed from the fastest to the slowest, the reverse of torch's order. ggml's
matrices have a row per output, and its blocks run along a row; Conv1D stores (in, out), so its weights are transposed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from compress_formats import check_gguf_type
from torch import Tensor

from durable.files import replacing
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from quantize.ggml_blocks import BLOCK, ROW_BYTES, TYPE_NUMBERS, decode, encode
from quantize.gguf_vocabulary import vocabulary_keys

FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}  # enum llama_ftype: the type of most matrices
ALIGNMENT = 32
_VERSION, _QUANTISATION_VERSION = 3, 2
_VALUE_TYPES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?")}
_STRING, _ARRAY = 8, 9

_NAMES = {  # of a block's parameters: ours -> GGUF's
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_OUTER = {"transformer.wte.weight": "token_embd.weight", "transformer.wpe.weight": "position_embd.weight",
          "transformer.ln_f.weight": "output_norm.weight", "transformer.ln_f.bias": "output_norm.bias"}  # fmt: skip


@dataclass
class Entry:
    """A tensor of the file.

    Attributes:
        name: GGUF's.
        weight: (out, in) or (n,), in GGUF's order of rows.
        kind: F32, F16, Q8_0 or Q4_0.
        offset: of its bytes, from the first tensor's.
    """

    name: str
    weight: Tensor
    kind: str
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """In the file, without padding."""
        return self.weight.numel() * ROW_BYTES[self.kind] // BLOCK


def check_type(kind: str, config: ModelConfig, source: str) -> None:
    """Raises UserError for an unknown type, or widths that its blocks of 32 do not divide."""
    check_gguf_type(kind)
    for name, width in (("n_embd", config.n_embd), ("n_inner", config.inner)):
        if kind != "F16" and width % BLOCK:
            raise UserError(f"--type {kind} has blocks of {BLOCK} weights, and {name} {width} of {source} is not divisible "
                            f"by {BLOCK}: give --type F16")  # fmt: skip


def entries(model: GPT2LMHeadModel, kind: str) -> list[Entry]:
    """The tensors of a file of this type. The head is the embedding, which GGUF stores once, as this model does.

    Vectors and positions stay in F32, as llama.cpp's converter leaves them. The embedding of a Q4_0 file is Q8_0: it is the
    head, too, whose errors reach the logits directly. (llama.cpp's own tool takes Q6_K, for the same reason.)
    """
    found, offset = [], 0
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and not name.endswith("wpe.weight")
        ours = "Q8_0" if kind == "Q4_0" and name.endswith("wte.weight") else kind
        weight = parameter.detach().t() if matrix and name not in _OUTER else parameter.detach()
        entry = Entry(gguf_name(name), weight, ours if matrix else "F32", offset)
        found.append(entry)
        offset += _padded(entry.num_bytes)
    return found


def gguf_name(name: str) -> str:
    """transformer.h.3.attn.c_attn.weight -> blk.3.attn_qkv.weight. Raises KeyError for a name that GPT-2 lacks."""
    if name in _OUTER:
        return _OUTER[name]
    _, _, number, *middle, last = name.split(".")
    return f"blk.{number}.{_NAMES['.'.join(middle)]}.{last}"


def metadata(config: ModelConfig, kind: str, name: str, vocabulary: Vocabulary) -> dict[str, tuple[str, Any]]:
    """The keys of the file: key -> (type, value)."""
    found: dict[str, tuple[str, Any]] = {
        "general.architecture": ("str", "gpt2"),
        "general.type": ("str", "model"),
        "general.name": ("str", name),
        "general.file_type": ("u32", FILE_TYPES[kind]),
        "gpt2.vocab_size": ("u32", vocabulary.size),
        "gpt2.context_length": ("u32", config.n_positions),
        "gpt2.embedding_length": ("u32", config.n_embd),
        "gpt2.feed_forward_length": ("u32", config.inner),
        "gpt2.block_count": ("u32", config.n_layer),
        "gpt2.attention.head_count": ("u32", config.n_head),
        "gpt2.attention.layer_norm_epsilon": ("f32", config.layer_norm_epsilon),
    }
    if kind != "F16":
        found["general.quantization_version"] = ("u32", _QUANTISATION_VERSION)
    return found | vocabulary_keys(vocabulary)


def write_gguf(path: Path, model: GPT2LMHeadModel, vocabulary: Vocabulary, kind: str, name: str) -> int:
    """Writes the file, complete or not at all; returns its bytes.

    Args:
        path: of the file.
        model: in float32, not quantised.
        vocabulary: the model's.
        kind: F16, Q8_0 or Q4_0.
        name: general.name in the file, for its readers; the model's path, for example.

    Raises:
        UserError: a type that does not fit the widths, or a file that cannot be written.
    """
    check_type(kind, model.config, name)
    keys, tensors = metadata(model.config, kind, name, vocabulary), entries(model, kind)
    try:
        with replacing(path) as staging, staging.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(keys)))
            for key, (value_type, value) in keys.items():
                file.write(_string(key) + _value(value_type, value))
            for entry in tensors:
                sizes = tuple(reversed(entry.weight.shape))
                file.write(_string(entry.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
                file.write(struct.pack("<IQ", TYPE_NUMBERS[entry.kind], entry.offset))
            _pad(file)
            for entry in tensors:
                rows = entry.weight.reshape(-1, entry.weight.shape[-1])
                file.write(encode(rows, entry.kind).numpy().tobytes())
                _pad(file)
            return file.tell()
    except OSError as error:
        raise UserError(f"--gguf {path} cannot be written: {error.strerror}") from None


def exported_weights(model: GPT2LMHeadModel, kind: str) -> Iterator[tuple[str, Tensor]]:
    """(our name, weight) of what a reader of the file computes with, in float32 and this model's layout."""
    for (name, parameter), entry in zip(model.named_parameters(), entries(model, kind), strict=True):
        rows = entry.weight.reshape(-1, entry.weight.shape[-1])
        weight = decode(encode(rows, entry.kind), entry.kind).view(entry.weight.shape)
        yield name, weight if weight.shape == parameter.shape and name in _OUTER or weight.ndim == 1 else weight.t()


def load_exported(model: GPT2LMHeadModel, kind: str) -> None:
    """Replaces a model's weights by those of its GGUF file of this type."""
    with torch.no_grad():
        for (_, weight), parameter in zip(list(exported_weights(model, kind)), model.parameters(), strict=True):
            parameter.copy_(weight)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_padded(file.tell()) - file.tell()))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value_type: str, value: Any) -> bytes:
    """The type of a key's value, and the value; `[str]` and `[i32]` are arrays."""
    if value_type == "str":
        return struct.pack("<I", _STRING) + _string(value)
    if value_type == "[str]":
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    if value_type == "[i32]":
        number, _ = _VALUE_TYPES["i32"]
        return struct.pack(f"<IIQ{len(value)}i", _ARRAY, number, len(value), *value)
    number, form = _VALUE_TYPES[value_type]
    return struct.pack("<I", number) + struct.pack(form, value)
