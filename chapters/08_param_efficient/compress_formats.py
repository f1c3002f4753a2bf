"""The formats that compress.py compares, and its table. This file does not import torch: flags are checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpt2_chinese.errors import UserError

GGUF_TYPES = ("F16", "Q8_0", "Q4_0")


def check_gguf_type(kind: str) -> None:
    """Raises UserError for a type that quantize/gguf.py does not write."""
    if kind not in GGUF_TYPES:
        raise UserError(f"--type {kind} is not a type that this exporter writes: give {', '.join(GGUF_TYPES)}")


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        says: what it is.
        bits, kind, double, by_gptq: as of quantize_model; bits 0: not by quantize_model.
        outliers: int8 with outlier columns in 16 bit.
        gguf: the type of a GGUF file whose weights the model gets, or "".
    """

    says: str
    bits: int = 0
    kind: str = ""
    double: bool = False
    by_gptq: bool = False
    outliers: bool = True
    gguf: str = ""


FORMATS = {
    "fp32": Format("as it was trained"),
    "int8": Format("LLM.int8(): inputs, too; outlier columns in 16 bit", 8, "int8"),
    "int8-plain": Format("the same without outlier columns", 8, "int8", outliers=False),
    "int4": Format("equal steps, to the nearest", 4, "int4"),
    "gptq": Format("the codes of int4, rounded by GPTQ", 4, "int4", by_gptq=True),
    "nf4": Format("steps of equal probability", 4, "nf4"),
    "nf4-double": Format("nf4, and its scales in 8 bits (QLoRA)", 4, "nf4", double=True),
    "gguf-f16": Format("a GGUF file of type F16", gguf="F16"),
    "gguf-q8_0": Format("a GGUF file of type Q8_0", gguf="Q8_0"),
    "gguf-q4_0": Format("a GGUF file of type Q4_0", gguf="Q4_0"),
}

COLUMNS = ("format", "bits a weight", "all weights, bytes", "error of weights", "error of logits", "perplexity", "")


def report(rows: list[dict[str, Any]]) -> str:
    """The table to print; rows have the keys that `compress_table.measure` names."""
    lines = [COLUMNS] + [cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for first, *numbers, says in lines:
        middle = (number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True))
        text.append("  ".join([first.ljust(widths[0]), *middle, says]).rstrip())
    return "\n".join(text)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    return (row["format"], f"{row['bits']:.3f}", f"{row['bytes']:,}", f"{row['weight_error']:.4%}",
            f"{row['logit_error']:.4%}", f"{row['perplexity']:.3f}", FORMATS[row["format"]].says)  # fmt: skip
