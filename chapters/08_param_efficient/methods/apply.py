"""The common shape of all methods: freeze, insert, train what requires grad, merge, export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpt2_chinese.checkpoint.huggingface import shapes_of
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from methods import adapter, bitfit, dora, ia3, lora, prefix, prompt
from methods.spec import MERGED_METHODS, MethodSpec
from methods.wrap import MergeableWrapper, freeze, plain_name, plain_weight

_INSERT = {"lora": lora.insert, "dora": dora.insert, "ia3": ia3.insert, "bitfit": bitfit.insert,
           "adapter": adapter.insert, "prefix": prefix.insert, "prompt": prompt.insert}  # fmt: skip


def apply_method(model: GPT2LMHeadModel, spec: MethodSpec) -> None:
    """Freezes the model and inserts a method, in place. `full` changes nothing.

    New numbers come from torch's generator, on the CPU, so that a seed gives the same ones on every device.

    Args:
        model: without a method; its Conv1D layers may be quantised.
        spec: the method and its numbers.

    Raises:
        UserError: numbers that do not fit the model (MethodSpec.check).
        ValueError: the model already has a method.
    """
    if getattr(model, "method_spec", None) is not None:
        raise ValueError(f"the model already has the method {model.method_spec.method}: apply one to a plain model")
    spec.check(model.config)
    if spec.method != "full":
        freeze(model)
        _INSERT[spec.method](model, spec)
    model.method_spec = spec


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What requires grad, by name: what an optimizer gets."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the model had before a method was inserted, under their old names; a tied one is listed once.

    A quantised layer has no weight among them.
    """
    shapes = shapes_of(base_config(model))
    return {plain_name(n): p for n, p in model.named_parameters() if plain_name(n) in shapes}


def merge(model: GPT2LMHeadModel) -> None:
    """Writes the method's effect into the weights of the base, in place; the wrappers stay, and call the base alone.

    `full` and `bitfit` have trained the weights themselves, so there is nothing to do.

    Raises:
        UserError: a method whose effect no weight can hold, or a quantised base, which cannot be written.
    """
    wrappers = list(_mergeable(model))
    if any(hasattr(wrapper.base_layer, "dequantize") for wrapper in wrappers):
        raise UserError("--merge in place needs a base without --bits: a quantised weight has no room for the change")
    for wrapper in wrappers:
        wrapper.merge()


def unmerge(model: GPT2LMHeadModel) -> None:
    """Undoes `merge`, up to one rounding of each weight.

    Raises:
        UserError: as `merge`.
        ValueError: a factor of (IA)^3 is 0.
    """
    for wrapper in _mergeable(model):
        wrapper.unmerge()


def merged_weights(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """The weights of a plain GPT-2 that computes the same, under this project's names, without the tied head.

    The model is not changed. A quantised layer comes dequantised, float32. Weights without a change are the model's own
    memory, detached.

    Raises:
        UserError: a method whose effect no weight can hold.
    """
    _refuse_without_merge(model)
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for path, module in model.named_modules():  # a wrapper comes before what it wraps
            name = plain_name(path)
            if isinstance(module, MergeableWrapper) and not module.merged:
                weight, bias = module.merged_tensors()
                found |= {f"{name}.weight": weight, f"{name}.bias": bias}
            elif hasattr(module, "dequantize"):
                found.setdefault(f"{name}.weight", plain_weight(module))
                found.setdefault(f"{name}.bias", module.bias.detach())
            else:
                for own, parameter in module.named_parameters(recurse=False):
                    found.setdefault(f"{name}.{own}", parameter.detach())
    return {name: found[name].contiguous() for name in shapes_of(model.config)}


def _mergeable(model: nn.Module) -> Iterator[MergeableWrapper]:
    _refuse_without_merge(model)
    return (module for module in model.modules() if isinstance(module, MergeableWrapper))


def _refuse_without_merge(model: nn.Module) -> None:
    spec = getattr(model, "method_spec", None)
    if spec is not None and spec.method not in MERGED_METHODS:
        raise UserError(f"--merge: no weight of a plain GPT-2 can hold what {spec.method} adds: keep the adapter instead")


def base_config(model: GPT2LMHeadModel) -> ModelConfig:
    """The configuration of the base: with all its positions."""
    return replace(model.config, n_positions=model.transformer.wpe.num_embeddings)
