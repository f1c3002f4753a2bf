"""The arithmetic of chapter 08: bytes of each method and of each --recompute, by the chapter's own formulas.

Bytes of model data in fp32: 4 for a parameter, trained or not; 4 for a gradient and 8 for AdamW's moments, only of what is
trained. With --bits 4 the weights of the blocks' linear layers have 4 bits and their share of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from docs.generate.arithmetic.arithmetic import GPT2_VOCABULARY, bytes_text
from docs.generate.pictures.data import chapter_module, tiny
from docs.generate.tables.tables import table

Words = Callable[[str], str]

CHAPTER = "08_param_efficient"
ROWS, LENGTHS = {"tiny": 24, "small": 8}, {"tiny": 128, "small": 1024}  # of a micro-batch in the table of --recompute
PLANS = ("none", "block", "every:2", "sqrt", "selective")
WEIGHT, GRADIENT, STATES = 4, 4, 8
MODULES = {"usual": None, "attention": ("c_attn", "attn.c_proj"), "all": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")}


def bits_of_nf4() -> float:
    """Bits of a weight of --bits 4: NF4 with double quantisation, scales included."""
    return chapter_module(CHAPTER, "quantize").bits_with_scales(double=True)


def configs() -> dict[str, Any]:
    """tiny with the shipped vocabulary, small with GPT-2's."""
    from gpt2_chinese.model.config import PRESETS

    return {"tiny": tiny(), "small": replace(PRESETS["small"], vocab_size=GPT2_VOCABULARY)}


def shape_of(size: str) -> tuple[Any, int, int]:
    """(configuration, sequences of a micro-batch, tokens of a sequence) in the tables of a size."""
    config = configs()[size]
    return config, ROWS[size], min(config.n_positions, LENGTHS[size])


def chapter(words: Words) -> str:
    """The fragment for the chapter's page."""
    parts = []
    for size in ROWS:
        config, rows, length = shape_of(size)
        name = words("{size}, {n} million parameters").format(size=size, n=f"{config.num_parameters() / 1e6:.1f}")
        parts += [f"**{name}**\n", methods(words, config), activations(words, config, rows, length)]
    return "\n".join(parts)


def weight_bytes(config: Any, row: Any, bits: float | None = None) -> int:
    """Bytes of a base in fp32 and of what a method adds; with `bits`, the blocks' linear weights have so many bits each."""
    norms = (4 * config.n_layer + 2) * config.n_embd  # the adapter's method trains these parameters of the base, too
    added = {"full": 0, "bitfit": 0, "adapter": row.count - norms}.get(row.method, row.count)
    inner = config.n_layer * (4 * config.n_embd**2 + 2 * config.n_embd * config.inner)
    whole = WEIGHT * (config.num_parameters() + added)
    return whole if bits is None else whole - WEIGHT * inner + math.ceil(inner * bits / 8)


def most_bytes(kept: Any, config: Any, rows: int, length: int, recompute: str) -> int:
    """Bytes of activations at their most: those kept, and one segment's during backward."""
    plan = kept.Plan.of(recompute, config.n_layer)
    again = kept.again_bytes(config, rows, length, plan) if plan.length else 0
    return kept.kept_bytes(config, rows, length, plan) + again


def calculated(job: dict[str, Any]) -> dict[str, Any]:
    """What the page's calculator shows, docs/assets/tools/adaptation.js, by the chapter's own formulas.

    Args:
        job: n_layer, n_embd, n_head, n_positions, vocab_size; rank, bottleneck, virtual_tokens; modules, one of MODULES;
            batch (sequences), seq_len, recompute.
    """
    from gpt2_chinese.model.config import ModelConfig

    spec, counts = (chapter_module(CHAPTER, f"methods.{name}") for name in ("spec", "counts"))
    config = ModelConfig(**{key: job[key] for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")})
    given = spec.MethodSpec(rank=job["rank"], modules=MODULES[job["modules"]], bottleneck=job["bottleneck"],
                            num_virtual_tokens=job["virtual_tokens"])  # fmt: skip
    found = counts.trained_rows(config, given)
    lora = next(row for row in found if row.method == "lora")
    rows = [_calculated_row(row.method, row, weight_bytes(config, row)) for row in found]
    rows.append(_calculated_row("qlora --bits 4", lora, weight_bytes(config, lora, bits_of_nf4())))
    kept, shape = chapter_module(CHAPTER, "kept_activations"), (config, job["batch"], job["seq_len"])
    bytes_kept = kept.kept_bytes(*shape, kept.Plan.of(job["recompute"], config.n_layer))
    activations = {"kept": bytes_kept, "most": most_bytes(kept, *shape, job["recompute"])}
    return {"refusal": "", "parameters": config.num_parameters(), "methods": rows, "activations": activations}


def _calculated_row(name: str, row: Any, weights: int) -> dict[str, Any]:
    rest = (GRADIENT + STATES) * row.count
    return {"name": name, "count": row.count, "share": row.share, "weights": weights, "rest": rest,
            "together": weights + rest}  # fmt: skip


def methods(words: Words, config: Any) -> str:
    """What each method trains, and the bytes of weights, gradients and states."""
    found = chapter_module(CHAPTER, "methods.counts").trained_rows(config)
    rows = [_method_row(words, row.method, row, weight_bytes(config, row)) for row in found]
    lora = next(row for row in found if row.method == "lora")
    rows.append(_method_row(words, "qlora --bits 4", lora, weight_bytes(config, lora, bits_of_nf4())))
    head = [words(name) for name in ("method", "trains", "trained parameters", "share", "weights", "gradients and states",
                                     "together")]  # fmt: skip
    return table(head, rows, right=5)


def _method_row(words: Words, name: str, row: Any, weights: int) -> list[str]:
    rest = (GRADIENT + STATES) * row.count
    return [f"`{name}`", words(row.trains), f"{row.count:,}", f"{row.share:.2%}", bytes_text(weights), bytes_text(rest),
            f"**{bytes_text(weights + rest)}**"]  # fmt: skip


def activations(words: Words, config: Any, num_rows: int, length: int) -> str:
    """What a forward keeps under each --recompute, the most during backward, and what backward computes again."""
    kept = chapter_module(CHAPTER, "kept_activations")
    shape = (config, num_rows, length)
    head_flops = 2 * num_rows * length * config.n_embd * config.vocab_size
    whole = 3 * (config.n_layer * kept.block_flops(*shape) + head_flops)  # backward computes twice as much as forward
    rows = []
    for name in PLANS:
        plan = kept.Plan.of(name, config.n_layer)
        again = kept.recomputed_flops(*shape, plan) / whole
        sizes = kept.kept_bytes(*shape, plan), most_bytes(kept, *shape, name)
        rows.append([f"`{name}`", *map(bytes_text, sizes), f"{again:.0%}"])
    title = words("{rows} sequences of {length} tokens").format(rows=num_rows, length=length)
    head = [f"`--recompute`, {title}", words("kept for backward"), words("most during backward"), words("computed again")]
    return table(head, rows, right=3)
