"""Adapters on disk in the format of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors.

    base_model.model.transformer.h.0.attn.c_attn.lora_A.weight (r, in)     .lora_B.weight (out, r)
                                               .lora_magnitude_vector (out,)      .ia3_l (out, 1) or (1, in)
    prompt_embeddings       prompt: (v, C)
                            prefix: (v, 2 L C): key and value of block 0, of block 1, ...

PEFT loads these files into a GPT2LMHeadModel of transformers, and this file loads those that PEFT writes. PEFT lacks adapter
and bitfit: they use the same two files, under names that PEFT does not know.
The file also has a checksum of the base's embedding, which no method changes, so that another base is refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from gpt2_chinese.checkpoint.huggingface import read_tensors
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind, read_json
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from methods.apply import apply_method, base_config, trained_parameters
from methods.peft_config import peft_config, spec_of
from methods.spec import MethodSpec
from methods.wrap import plain_name

CONFIG, WEIGHTS, OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."


# ---- the two files


def save_adapter(folder: Path, model: GPT2LMHeadModel, spec: MethodSpec, base: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors into `folder`, which it makes.

    Args:
        folder: of the adapter.
        model: with the method applied.
        spec: as given to apply_method.
        base: the path or name of the base, for base_model_name_or_path.

    Raises:
        ValueError: `full`, which has no adapter.
    """
    from safetensors.torch import save_file

    content = {**peft_config(spec, base_config(model)), "base_model_name_or_path": base, "inference_mode": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt", "base_embedding_sha256": embedding_checksum(model)})


def load_adapter(folder: Path, model: GPT2LMHeadModel) -> MethodSpec:
    """Applies the method of an adapter to a plain model and loads its weights.

    Args:
        folder: written by save_adapter or by PEFT's save_pretrained; links to the two files are followed.
        model: the base, without a method; not changed if the adapter is refused.

    Returns:
        the method and its numbers.

    Raises:
        UserError: no adapter; a method or an option that this chapter lacks; the adapter of another model.
    """
    folder = Path(folder)
    if kind(folder / CONFIG, f"the adapter {folder}") != "file":
        raise UserError(f"{folder} has no {CONFIG}: give the folder of an adapter, such as final/ of a run of chapter 08")
    spec = spec_of(read_json(folder / CONFIG, f"the adapter {folder / CONFIG}"), str(folder / CONFIG))
    file = next((folder / name for name in (WEIGHTS, OLD_WEIGHTS) if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder} has no {WEIGHTS}: the copy is not complete")
    found = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(file).items()}
    try:
        spec.check(model.config)
    except UserError as error:
        raise UserError(f"{folder} is the adapter of another model: {error}") from None
    _check_fit(found, model.config, spec, folder)
    _check_base(file, model, folder)
    apply_method(model, spec)
    set_adapter_tensors(model, found)
    return spec


def adapter_tensors(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """What an adapter's file holds: trained tensors, detached, under PEFT's names."""
    trained = {plain_name(name): parameter.detach() for name, parameter in trained_parameters(model).items()}
    if model.method_spec.method == "prefix":
        return {"prompt_embeddings": torch.cat([block.attn.prefix.detach() for block in model.transformer.h], dim=1)}
    if model.method_spec.method == "prompt":
        return {"prompt_embeddings": trained["transformer.prompt_embeddings"]}
    return {PREFIX + name: tensor for name, tensor in trained.items()}


@torch.no_grad()
def set_adapter_tensors(model: GPT2LMHeadModel, tensors: dict[str, Tensor]) -> None:
    """Copies tensors, under PEFT's names, with or without the prefix, into a model with the method applied."""
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if model.method_spec.method == "prefix":
        of_each = found["prompt_embeddings"].chunk(len(model.transformer.h), dim=1)
        for block, prefix in zip(model.transformer.h, of_each, strict=True):
            block.attn.prefix.copy_(prefix)
        return
    for name, parameter in trained_parameters(model).items():
        name = plain_name(name)
        parameter.copy_(found["prompt_embeddings" if model.method_spec.method == "prompt" else name])


# ---- does the adapter belong to this model?


def embedding_checksum(model: GPT2LMHeadModel) -> str:
    """SHA-256 of the embedding in bf16: the same for a base in fp32 or bf16, with quantised blocks or without."""
    weight = model.transformer.wte.weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(weight.view(torch.int16).numpy().tobytes()).hexdigest()


def _check_base(file: Path, model: GPT2LMHeadModel, folder: Path) -> None:
    """Raises UserError if the file names another base; PEFT's files name none."""
    if file.suffix != ".safetensors":
        return
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        expected = (stream.metadata() or {}).get("base_embedding_sha256")
    if expected is not None and expected != embedding_checksum(model):
        base = read_json(folder / CONFIG, f"the adapter {folder}").get("base_model_name_or_path")
        raise UserError(f"{folder} is the adapter of another model: it was trained on {base}, whose embedding differs")


def _check_fit(found: dict[str, Tensor], config: ModelConfig, spec: MethodSpec, folder: Path) -> None:
    """Raises UserError unless names and shapes are those of the method on a model of this shape."""
    with torch.device("meta"):
        probe = GPT2LMHeadModel(config)
        apply_method(probe, spec)
    wanted = {name.removeprefix(PREFIX): tuple(tensor.shape) for name, tensor in adapter_tensors(probe).items()}
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    for name in [name for name in wanted if name in found]:
        shape, dtype = tuple(found[name].shape), found[name].dtype
        if shape != wanted[name]:
            wrong.append(f"{name} is {shape} instead of {wanted[name]}")
        elif not dtype.is_floating_point:
            wrong.append(f"{name} holds {dtype}")
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{folder} is the adapter of another model: {wrong[0]}{more}")
