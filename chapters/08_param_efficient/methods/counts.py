"""Which parameters each method trains, and how many: a table of formulas. Imports no torch.

    V ids, P positions, L blocks, C width, I inner width of the MLP            of the model
    r rank, m bottleneck, v virtual tokens                                     of the method
    S = sum of num_in + num_out, O = sum of num_out, A = sum of activations    over the layers that `modules` names
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpt2_chinese.model.config import ModelConfig
from methods.spec import METHODS, MethodSpec, layer_sizes

Symbols = dict[str, int]


@dataclass(frozen=True)
class TrainedRow:
    """One line of the table."""

    method: str
    trains: str  # in words
    formula: str  # of symbols, in Python's notation
    count: int  # its value
    share: float  # of the parameters of the base


_LOW_RANK = "two matrices of rank r for each chosen layer"
# method: (what it trains, formula, the same as a function)
_FORMULAS: dict[str, tuple[str, str, Callable[[Symbols], int]]] = {
    "full": ("all", "(V + P) * C + L * (4 * C * C + 2 * C * I + 9 * C + I) + 2 * C",
             lambda s: (s["V"] + s["P"]) * s["C"] + 2 * s["C"]
             + s["L"] * (4 * s["C"] ** 2 + 2 * s["C"] * s["I"] + 9 * s["C"] + s["I"])),
    "lora": (_LOW_RANK, "L * r * S", lambda s: s["L"] * s["r"] * s["S"]),
    "dora": (f"{_LOW_RANK}, a magnitude for each of its outputs", "L * (r * S + O)",
             lambda s: s["L"] * (s["r"] * s["S"] + s["O"])),
    "adapter": ("two layers of width m after attention and after the MLP; all layer norms",
                "L * (2 * (2 * C * m + m + C) + 4 * C) + 2 * C",
                lambda s: s["L"] * (2 * (2 * s["C"] * s["m"] + s["m"] + s["C"]) + 4 * s["C"]) + 2 * s["C"]),
    "prefix": ("v keys and v values in each block", "2 * L * C * v", lambda s: 2 * s["L"] * s["C"] * s["v"]),
    "prompt": ("v embeddings before the text", "C * v", lambda s: s["C"] * s["v"]),
    "ia3": ("a factor for each activation of a chosen layer", "L * A", lambda s: s["L"] * s["A"]),
    "bitfit": ("all biases", "L * (7 * C + I) + C", lambda s: s["L"] * (7 * s["C"] + s["I"]) + s["C"]),
}  # fmt: skip


def symbols(config: ModelConfig, spec: MethodSpec) -> Symbols:
    """The value of each symbol of the formulas."""
    sizes = {name: layer_sizes(config)[name] for name in spec.targets}
    return {
        "V": config.vocab_size or 0, "P": config.n_positions, "L": config.n_layer, "C": config.n_embd, "I": config.inner,
        "r": spec.rank, "m": spec.bottleneck, "v": spec.num_virtual_tokens,
        "S": sum(num_in + num_out for num_in, num_out in sizes.values()),
        "O": sum(num_out for _, num_out in sizes.values()),
        "A": sum(num_in if name == "mlp.c_proj" else num_out for name, (num_in, num_out) in sizes.items()),
    }  # fmt: skip


def trained_row(config: ModelConfig, spec: MethodSpec) -> TrainedRow:
    """What one method trains in a model, and how many numbers that is."""
    words, formula, value = _FORMULAS[spec.method]
    count = value(symbols(config, spec))
    return TrainedRow(spec.method, words, formula, count, count / config.num_parameters())


def trained_rows(config: ModelConfig, spec: MethodSpec | None = None) -> list[TrainedRow]:
    """The table: a row for each of METHODS, with the numbers of `spec` (by default those of MethodSpec)."""
    spec = spec or MethodSpec()
    return [trained_row(config, replace(spec, method=method)) for method in METHODS]
