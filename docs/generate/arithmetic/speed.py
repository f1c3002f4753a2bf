"""What bounds a step: links and memory, arithmetic intensity, the operations of a step, and the bytes of attention.

A roofline has two lines: the peak of a machine, and its memory bandwidth times the intensity. The intensity of an operation
is its floating-point operations divided by the bytes that it must read from memory and write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from docs.generate.arithmetic import formulas
from docs.generate.arithmetic.arithmetic import Row, bytes_text, job_of
from docs.generate.lessons.links import LINKS, time_text
from docs.generate.tables.tables import table
from gpt2_chinese.model.config import PRESETS
from gpt2_chinese.run.flops import flops_per_token, matrix_parameters
from pstar.planner.gpus import GPUS, cluster_of

Words = Callable[[str], str]

MACHINE = "h100"
SHOWN = ("v100-32", "a100-80", "h100", "b200")
LENGTHS = (128, 512, 1024)
SEQUENCES = 16  # of the table of attention, the batch of small
NAMES = {"tiny": "tiny", "small": "124M"}
# Floating-point operations of one element; tests/docs/test_speed.py counts those of torch's AdamW and of a norm in steps.
NORM_FLOPS = 7  # sum, subtract the mean, square, sum, times 1/std, times the gain, add the bias
ADAM_FLOPS = 14  # decay 1, first mean 3, second mean 4, root, correction and epsilon 3, update 3
ADAM_BYTES = 28  # fp32: reads parameter, gradient and two moments; writes parameter and moments


class Operation(NamedTuple):
    """An operation of a step: its name in English, its model ('' for any), and what it computes and moves."""

    name: str
    model: str
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte."""
        return self.flops / self.bytes

    def reaches(self, gpu: str) -> float:
        """Operations a second under the roof of a GPU."""
        return min(GPUS[gpu].tflops * 1e12, self.intensity * GPUS[gpu].memory_gb_s * 1e9)


def ridge(gpu: str) -> float:
    """The intensity from which on the peak is the bound, not memory."""
    return GPUS[gpu].tflops * 1e12 / (GPUS[gpu].memory_gb_s * 1e9)


def linear(tokens: int, num_in: int, num_out: int, value_bytes: int = 2) -> tuple[int, int]:
    """A linear layer's operations in forward, and its bytes: the input, the weight and the output, each once."""
    values = tokens * num_in + num_in * num_out + tokens * num_out
    return 2 * tokens * num_in * num_out, value_bytes * values


def operations() -> list[Operation]:
    """The first layer of an MLP for both models at their default batch; a norm and Adam's update, of any size."""
    found = []
    for model in NAMES:
        job = job_of(Row("", "single"), model, 1)
        work = linear(job["batch"] * job["seq_len"], job["n_embd"], 4 * job["n_embd"])
        found.append(Operation("linear layer, C to 4 C", model, *work))
    norm = Operation("layer norm", "", NORM_FLOPS, 2 * 2)  # of one element in 16 bit: read and written
    return [Operation("update of Adam", "", ADAM_FLOPS, ADAM_BYTES), norm, *found]


def machine(words: Words) -> str:
    """Memories and links: bytes a second, latency, and how long the gradients of 124M take."""
    size = 4 * formulas.num_parameters(job_of(Row("", "single"), "small", 1))
    host = cluster_of(MACHINE, 8).host_speed / 1e9
    rows = [(words("memory of an H100"), f"{GPUS[MACHINE].memory_gb_s:,}", "—", size / GPUS[MACHINE].memory_gb_s),
            (words("memory of a host, all its GPUs together"), f"{host:,.0f}", "—", size / host)]  # fmt: skip
    rows += [(link.name, f"{link.gb_per_s:g}", f"{link.latency_us:g} µs", size / link.gb_per_s) for link in LINKS]
    head = [words("memory or link"), words("GB/s, one direction"), words("a turn of a ring"),
            words("{bytes} take").format(bytes=bytes_text(size))]  # fmt: skip
    return table(head, [(*row, time_text(seconds / 1e9)) for *row, seconds in rows], right=3)


def ridges(words: Words) -> str:
    """Peak, bandwidth and ridge of GPUs."""
    rows = [(f"`{name}`", f"{GPUS[name].tflops:,}", f"{GPUS[name].memory_gb_s:,}", f"{ridge(name):.0f}") for name in SHOWN]
    head = ["GPU", words("peak, TFLOP/s"), words("memory, GB/s"), words("ridge, FLOP for each byte")]
    return table(head, rows, right=3)


def intensity(words: Words) -> str:
    """Operations with their intensity, and the share of an H100's peak that memory permits."""
    rows = []
    for one in operations():
        share = one.reaches(MACHINE) / (GPUS[MACHINE].tflops * 1e12)
        bound = "memory" if one.intensity < ridge(MACHINE) else "peak"
        rows.append((words(one.name), NAMES[one.model] if one.model else words("any"), f"{one.intensity:.3g}", words(bound),
                     f"{share:.1%}" if share < 1 else "100%"))  # fmt: skip
    head = ["operation", "model", "FLOP for each byte", "bound by", "of the peak, at most"]
    return table([words(word) for word in head], rows, right=1)


def step(words: Words) -> str:
    """The operations of a step of both models, and its time at the peak of an H100 and at half of it."""
    rows = []
    for model, name in NAMES.items():
        job = job_of(Row("", "single"), model, 1)
        config = replace(PRESETS[model], vocab_size=job["vocab_size"])
        n, length, tokens = matrix_parameters(config), job["seq_len"], job["batch"] * job["seq_len"]
        each = flops_per_token(config, length)
        seconds = tokens * each / (GPUS[MACHINE].tflops * 1e12)
        rows.append((name, f"{6 * n:,}", f"{each - 6 * n:,}", f"{tokens:,}", f"{tokens * each / 1e12:.3g}",
                     time_text(seconds), time_text(2 * seconds)))  # fmt: skip
    head = ["model", "6 N", "12 L C T", "tokens a step", "TFLOP a step", "H100, MFU 100%", "H100, MFU 50%"]
    return table([words(word) for word in head], rows, right=6)


def kept_by_attention(batch: int, length: int, width: int, heads: int, whole: bool, value_bytes: int = 4) -> int:
    """Bytes that attention keeps for backward: q, k and v, and the matrix of probabilities or the output and its sums.

    Args:
        whole: True: plain matrix products keep the T x T probabilities of every head. False: flash attention keeps its
            output, and for each row the logarithm of the sum of its exponentials, in fp32.
    """
    values = batch * length * width
    rows = batch * heads * length
    return value_bytes * (3 * values + rows * length) if whole else value_bytes * 4 * values + 4 * rows


def attention(words: Words) -> str:
    """Bytes that the attention of 124M keeps, with and without the matrix."""
    job, rows = job_of(Row("", "single"), "small", 1), []
    for length in LENGTHS:
        plain, flash = (kept_by_attention(SEQUENCES, length, job["n_embd"], job["n_head"], whole, 2)
                        for whole in (True, False))  # fmt: skip
        rows.append((f"{length:,}", bytes_text(plain), bytes_text(flash), bytes_text(job["n_layer"] * plain),
                     bytes_text(job["n_layer"] * flash), f"{plain / flash:.1f}"))  # fmt: skip
    head = ["T", "a layer, matrix kept", "a layer, flash", "all layers, matrix kept", "all layers, flash", "times"]
    return table([words(word) for word in head], rows, right=5)


TABLES = {"machine": machine, "ridges": ridges, "intensity": intensity, "step": step, "attention": attention}
