"""The decision figure of chapter 08: bytes of one GPU for each way to adapt a model, by the chapter's formulas."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate.arithmetic import adaptation
from docs.generate.arithmetic.arithmetic import bytes_text
from docs.generate.pictures.data import chapter_module
from docs.generate.pictures.pictures import MARGIN, WIDTH, Drawing, Words

SIZE = "small"
# flags, method, a function for the bits of the blocks' weights, --recompute
WAYS = (
    ("--method full", "full", None, "none"),
    ("--method full --recompute block", "full", None, "block"),
    ("--method lora", "lora", None, "none"),
    ("--method lora --recompute block", "lora", None, "block"),
    ("--method qlora --bits 4 --recompute block", "lora", adaptation.bits_of_nf4, "block"),
)
BAR = 16


def parts_of(method: str, bits: Callable[[], float] | None, recompute: str) -> dict[str, int]:
    """Bytes by kind: parameters, states (with gradients), activations (the most during backward)."""
    config, rows, length = adaptation.shape_of(SIZE)
    rows_of = chapter_module(adaptation.CHAPTER, "methods.counts").trained_rows
    row = next(row for row in rows_of(config) if row.method == method)
    kept = chapter_module(adaptation.CHAPTER, "kept_activations")
    return {"parameters": adaptation.weight_bytes(config, row, bits and bits()),
            "states": (adaptation.GRADIENT + adaptation.STATES) * row.count,
            "activations": adaptation.most_bytes(kept, config, rows, length, recompute)}  # fmt: skip


def decision(words: Words) -> str:
    """A bar for each way, the largest first."""
    drawing = Drawing(words, words("Bytes of each way to adapt a model"))
    ways = [(flags, parts_of(*rest)) for flags, *rest in WAYS]
    scale = (WIDTH - 2 * MARGIN - 76) / max(sum(parts.values()) for _, parts in ways)
    for flags, parts in ways:
        drawing.text(MARGIN, drawing.y + 10, flags)
        drawing.y += 21
        x = float(MARGIN)
        for kind, size in parts.items():
            drawing.box(x, drawing.y, scale * size, BAR, kind)
            x += scale * size
        drawing.text(x + 6, drawing.y + BAR / 2, bytes_text(sum(parts.values())))
        drawing.y += BAR + 8
    _, rows, length = adaptation.shape_of(SIZE)
    drawing.note(words(
        "GPT-2 small in fp32, {rows} sequences of {length} tokens. Green: gradients and AdamW's moments. Short by the "
        "states: train fewer parameters. Short by the activations: recompute. Short by the weights: fewer bits."
    ).format(rows=rows, length=length))  # fmt: skip
    drawing.legend()
    return drawing.svg()
