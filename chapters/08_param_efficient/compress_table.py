"""Measures what each format leaves of a model: bits, error of weights and of logits, perplexity on held-out text."""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import torch
from compress_formats import FORMATS, Format
from quantize import QuantizedConv1D, bits_per_weight, block_layers, quantize_model, weight_bytes
from quantize.gguf import check_type, entries, load_exported
from quantize.planted_outliers import plant_outliers
from quantize.whole_model import check
from torch import Tensor, nn

from gpt2_chinese import Batches, GPT2LMHeadModel, Ranks, evaluate_model
from gpt2_chinese.checkpoint.trained_model import find_model, load_model, pick_device
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.evaluate.perplexity import trained_seq_len


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each of a.formats.

    Returns:
        rows with format, bits (a weight of the blocks), bytes (of all weights), weight_error and logit_error (relative, of
        the blocks' weights and of the first batch's logits), perplexity, loss.

    Raises:
        UserError: a model or a corpus that cannot be used, or a format that does not fit the model's widths.
    """
    device = pick_device(a.device)
    model, vocabulary = load_model(a.model, device, a.vocab)
    context = model.config.n_positions
    seq_len = a.seq_len or min(trained_seq_len(find_model(a.model)) or context, context)
    if seq_len > context:
        raise UserError(f"--seq-len {seq_len} is above the context of the model in {a.model}, n_positions {context}")
    for how in map(FORMATS.__getitem__, a.formats):  # before minutes of work
        if how.gguf:
            check_type(how.gguf, model.config, a.model)
        elif how.bits:
            check(model, how.bits, how.kind, a.block, how.by_gptq, calibrated=True)
    texts = [load_tokens(path, vocabulary.file.path, vocabulary.profile) for path in (a.train_data, a.valid_data)]
    train, valid = (Batches(text, seq_len, a.batch_size, device=device) for text in texts)
    calibration = calibration_batches(train, a.calibration)
    if a.plant_outliers:
        if a.plant_outliers > model.config.n_embd:
            raise UserError(f"--plant-outliers {a.plant_outliers} is above the width of the model, n_embd "
                            f"{model.config.n_embd}")  # fmt: skip
        plant_outliers(model, a.plant_outliers)
    first = next(iter(valid.eval_batches()))[0]
    with torch.no_grad():
        logits = model(first)
    rows = []
    for name in a.formats:
        small = copy.deepcopy(model)
        convert(small, FORMATS[name], a, calibration)
        found = evaluate_model(small, valid, Ranks(device=device))
        with torch.no_grad():
            error = relative(small(first), logits)
        gguf = FORMATS[name].gguf
        rows.append({
            "format": name, **size(small, gguf), "weight_error": weight_error(small, model), "logit_error": error,
            "loss": found["valid_loss"], "perplexity": found["valid_ppl"],
        })  # fmt: skip
    return rows


def calibration_batches(train: Batches, num_windows: int) -> list[Tensor]:
    """Ids (B, T) of the first windows in the order of training. Raises UserError for a corpus without a batch."""
    steps = range(1, 1 + math.ceil(num_windows / train.batch_size))
    return [ids for step in steps for ids, _ in train.micro_batches(step)]


def convert(model: GPT2LMHeadModel, how: Format, a: argparse.Namespace, calibration: list[Tensor]) -> None:
    """Gives a model the weights of a format, in place."""
    if how.gguf:
        load_exported(model, how.gguf)
    elif how.bits:
        threshold = a.threshold if how.outliers else math.inf
        quantize_model(model, how.bits, how.kind, block=a.block, double=how.double, threshold=threshold,
                       calibration=calibration, by_gptq=how.by_gptq)  # fmt: skip


def size(model: GPT2LMHeadModel, gguf: str) -> dict[str, float]:
    """Bits a weight of the blocks, and bytes of all weights; of a GGUF file without its keys and padding."""
    if not gguf:
        return {"bits": bits_per_weight(model), "bytes": weight_bytes(model)}
    tensors = entries(model, gguf)
    matrices = [each for each in tensors if each.name.startswith("blk.") and each.weight.ndim == 2]
    bits = 8 * sum(each.num_bytes for each in matrices) / sum(each.weight.numel() for each in matrices)
    return {"bits": bits, "bytes": sum(each.num_bytes for each in tensors)}


@torch.no_grad()
def weight_error(model: nn.Module, whole: nn.Module) -> float:
    """Relative error of all weights of the blocks together."""
    weights = [layer.dequantize() if isinstance(layer, QuantizedConv1D) else layer.weight
               for layer in block_layers(model).values()]  # fmt: skip
    exact = [layer.weight for layer in block_layers(whole).values()]
    return relative(torch.cat([each.flatten() for each in weights]), torch.cat([each.flatten() for each in exact]))


def relative(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|, of Euclidean norms."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())
