"""Quantises a whole GPT-2 in place: the four Conv1D layers of each block. Embeddings, norms and biases stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from gpt2_chinese.errors import UserError
from gpt2_chinese.model.gpt2 import Conv1D, GPT2LMHeadModel
from quantize.blockwise import BLOCK, BlockWeight
from quantize.calibration import InputStatistics, input_statistics
from quantize.gptq import gptq
from quantize.int8 import THRESHOLD, Int8Weight, outlier_features
from quantize.quantized_linear import QuantizedConv1D

BITS = {"int8": 8, "int4": 4, "nf4": 4}
DEFAULT_KIND = {8: "int8", 4: "nf4"}


def block_layers(model: nn.Module) -> dict[str, Conv1D | QuantizedConv1D]:
    """The Conv1D layers of a model by name, whole and quantised, in the order of the forward pass."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Conv1D | QuantizedConv1D)}


def quantize_model(
    model: GPT2LMHeadModel, bits: int, kind: str | None = None, *, block: int = BLOCK, double: bool = True,
    threshold: float = THRESHOLD, calibration: Sequence[Tensor] = (), by_gptq: bool = False,
) -> None:  # fmt: skip
    """Replaces every Conv1D of the blocks by a QuantizedConv1D.

    Args:
        model: on any device; layers that are quantised already stay as they are.
        bits: 8 or 4.
        kind: int8, int4 or nf4 (default: int8 for 8 bits, nf4 for 4).
        block: weights that share a scale, in 4 bits.
        double: in 4 bits, quantise the scales to 8 bits.
        threshold: for int8, magnitude from which an input column is multiplied in 16 bit; inf: none is.
        calibration: batches of ids (B, T) int64. GPTQ needs some; int8 keeps in 16 bit the weights of the features that are
            outliers in them.
        by_gptq: in 4 bits, round with GPTQ instead of to the nearest.

    Raises:
        UserError: bits and kind that do not fit, weights that are not finite, GPTQ without calibration or with blocks that
            do not divide a width.
    """
    kind = kind or DEFAULT_KIND.get(bits, "")
    check(model, bits, kind, block, by_gptq, bool(calibration))
    for layer in block_layers(model).values():
        if isinstance(layer, Conv1D) and not layer.weight.isfinite().all():
            raise UserError("a weight is not finite: a model whose training failed cannot be quantised")
    if not by_gptq:
        statistics = _statistics(model, block_layers(model), calibration) if kind == "int8" and calibration else {}
        for name, layer in block_layers(model).items():
            if isinstance(layer, Conv1D):
                put(model, name, _rounded(layer.weight.t(), kind, block, double, threshold, statistics.get(name)))
        return
    for number in range(len(model.transformer.h)):  # a block's inputs come from blocks that are quantised already
        prefix = f"transformer.h.{number}."
        layers = {name: layer for name, layer in block_layers(model).items()
                  if name.startswith(prefix) and isinstance(layer, Conv1D)}  # fmt: skip
        for name, found in _statistics(model, layers, calibration).items():
            put(model, name, gptq(layers[name].weight.t(), found.hessian(), kind, block, double))


def check(model: nn.Module, bits: int, kind: str, block: int, by_gptq: bool, calibrated: bool) -> None:
    """Raises UserError as `quantize_model` says."""
    if BITS.get(kind) != bits:
        fitting = ", ".join(f"{name} ({number} bits)" for name, number in BITS.items())
        raise UserError(f"--bits {bits} and kind {kind or 'none'} do not fit: give {fitting}")
    if not by_gptq:
        return
    if bits != 4 or not calibrated:
        raise UserError("GPTQ rounds to 4 bits and needs calibration text: give int4 or nf4, and some text")
    for name, layer in block_layers(model).items():
        if isinstance(layer, Conv1D) and layer.weight.shape[0] % block:
            raise UserError(f"GPTQ gives each row whole blocks: --block {block} does not divide the "
                            f"{layer.weight.shape[0]} inputs of {name}; give a divisor")


def _rounded(weight: Tensor, kind: str, block: int, double: bool, threshold: float,
             found: InputStatistics | None) -> Int8Weight | BlockWeight:
    """A weight (out, in), each value rounded on its own."""
    if kind == "int8":
        return Int8Weight(weight, threshold, outlier_features(found.largest, threshold) if found else None)
    return BlockWeight.of(weight, kind, block, double)


def _statistics(model: nn.Module, layers: dict[str, nn.Module], batches: Iterable[Tensor]) -> dict[str, InputStatistics]:
    return input_statistics(model, layers, {name: layer.weight.shape[0] for name, layer in layers.items()}, batches)


def put(model: nn.Module, name: str, quantized: Int8Weight | BlockWeight) -> None:
    """Replaces the Conv1D of this name, keeping its bias."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, child, QuantizedConv1D(quantized, getattr(owner, child).bias))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of codes, scales and plain weights; a tied weight counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bits_per_weight(model: nn.Module) -> float:
    """Bits of the blocks' weights, scales included and biases not, divided by the number of these weights."""
    num_bytes, num_weights = 0, 0
    for layer in block_layers(model).values():
        if isinstance(layer, QuantizedConv1D):
            num_bytes += weight_bytes(layer.quantized)
            num_weights += layer.num_in * layer.num_out
        else:
            num_bytes += layer.weight.numel() * layer.weight.element_size()
            num_weights += layer.weight.numel()
    return 8 * num_bytes / num_weights
