"""The tables of the basics, computed with formulas.py or read from torch."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate.arithmetic import formulas, speed
from docs.generate.arithmetic.arithmetic import Row, bytes_text, job_of
from docs.generate.tables.tables import table

Words = Callable[[str], str]

SIZES = ("tiny", "small")
# A recipe -> (strategy, precision) of formulas.py.
RECIPES = {
    "fp32": ("ddp", "fp32"), "O1, autocast": ("ddp", "O1"), "O2, ZeRO: 16 bit with an fp32 master": ("ddp", "O2"),
    "pstar in bf16: the master is split": ("pstar", "bf16"), "O3, all in 16 bit": ("ddp", "O3"),
}  # fmt: skip
# The activations that a block keeps for backward in fp32, in channels of 4 bytes. docs/programs/saved.py counts the same.
KEPT = {
    "input of ln_1": 1, "input of the attention's first product": 1, "q, k and v": 3, "output of the attention": 1,
    "input of ln_2": 1, "input of the MLP's first product": 1, "input of GELU": 4, "output of GELU": 4,
}  # fmt: skip


def costs(words: Words) -> str:
    """Bytes per parameter for each recipe, and bytes of all parameters for two models."""
    rows = []
    for label, (strategy, precision) in RECIPES.items():
        cost = formulas.parameter_costs(strategy, precision)
        jobs = [job_of(Row("", "single"), size, 1) for size in SIZES]
        whole = [bytes_text(sum(cost.values()) * formulas.num_parameters(job)) for job in jobs]
        rows.append((words(label), *cost.values(), sum(cost.values()), *whole))
    head = ["recipe", "parameter", "gradient", "master", "moments of Adam", "bytes in all", "tiny", "124M"]
    return table([words(word) for word in head], rows, right=7)


def kept(words: Words) -> str:
    """The activations that a block keeps, item by item."""
    rows = [(words(what), number, 4 * number) for what, number in KEPT.items()]
    rows.append((words("in all"), sum(KEPT.values()), 4 * sum(KEPT.values())))
    return table([words(word) for word in ("kept for backward", "values", "bytes in fp32")], rows, right=2)


def activations(words: Words) -> str:
    """Activations of one process in a step, compared with the states, with and without checkpointing."""
    rows = []
    for size, name in zip(SIZES, ("tiny", "124M"), strict=True):
        for changes, how in (({}, "all kept"), ({"checkpointing": True}, "checkpointing")):
            job = job_of(Row("", "single", "fp32", changes=changes), size, 1)
            logits = job["batch"] * job["seq_len"] * job["vocab_size"] * 16
            rows.append((name, f"{job['batch']} × {job['seq_len']}", words(how), bytes_text(logits),
                         bytes_text(formulas.activations(job)), bytes_text(16 * formulas.num_parameters(job))))  # fmt: skip
    head = ["model", "batch × length", "blocks", "at the loss", "activations, in all", "states, in all"]
    return table([words(word) for word in head], rows, right=3)


def traffic(words: Words) -> str:
    """Bytes that a rank sends for a tensor of n bytes, and the same worked for the gradients of tiny at four ranks."""
    n = 4 * formulas.num_parameters(job_of(Row("", "single"), "tiny", 1))
    rows = [
        ("broadcast", "n, or 0 at the end of the chain", n), ("reduce", "n, or 0 at the root", n),
        ("all-reduce", "2n (p − 1) / p", formulas.ring_bytes(n, 4)),
        ("gather", "n / p; the root receives n (p − 1) / p", n // 4), ("all-gather", "n (p − 1) / p", n * 3 // 4),
        ("scatter", "the root n (p − 1) / p, the others 0", n * 3 // 4), ("reduce-scatter", "n (p − 1) / p", n * 3 // 4),
        ("all-to-all", "n (p − 1) / p", n * 3 // 4), ("send", "n", n), ("barrier", "no data", 0),
    ]  # fmt: skip
    head = [words(word) for word in ("operation", "bytes a rank sends, at most", "gradients of tiny, p = 4")]
    return table(head, [(f"[{name}](#{'send-recv' if name == 'send' else name})", words(formula), bytes_text(size))
                        for name, formula, size in rows], right=1)  # fmt: skip


def floats(words: Words) -> str:
    """The number formats, from torch.finfo."""
    import torch

    rows = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        info = torch.finfo(dtype)
        fraction = round(-torch.log2(torch.tensor(info.eps, dtype=torch.float64)).item())
        rows.append((name, info.bits // 8, info.bits - 1 - fraction, fraction, f"{info.max:.5g}", f"{info.tiny:.2g}",
                     f"{info.eps:.2g}"))  # fmt: skip
    head = ["format", "bytes", "bits of exponent", "bits of fraction", "largest", "least normal", "step after 1"]
    return table([words(word) for word in head], rows, right=6)


TABLES = {"costs": costs, "kept": kept, "activations": activations, "traffic": traffic, "floats": floats} | speed.TABLES
