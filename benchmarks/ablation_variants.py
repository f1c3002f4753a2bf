"""The rows of the ablation: chapters with flags, the bytes that each must send, and one finished run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pstar.planner.shares import ring_bytes, tensor_traffic

WARM_UP_STEPS = 3  # left out of the times
ELEMENT = 4  # bytes of an fp32 number in a message


class Formula(NamedTuple):
    """Bytes that rank 0 sends in a step, and as many that it receives."""

    text: str
    num_bytes: Callable[[int, dict[str, Any], int], float]  # of processes, a run's config, bytes of an element


def _width(config: dict[str, Any]) -> int:
    return config["model"]["n_embd"]


def _tokens(config: dict[str, Any]) -> int:
    return config["batch_size"] * config["seq_len"]


def _outside(config: dict[str, Any]) -> int:
    """Parameters outside the blocks, which stage 3 gathers once a step."""
    return (config["vocab_size"] + config["model"]["n_positions"] + 2) * _width(config)


def _zero3(p: int, config: dict[str, Any], size: int) -> float:
    return size * (3 * config["num_parameters"] - _outside(config)) * (p - 1) / p


def _pipeline(p: int, config: dict[str, Any], size: int) -> float:
    return size * (_tokens(config) + config["vocab_size"]) * _width(config)


def _tensor(p: int, config: dict[str, Any], size: int) -> float:
    micros = config["grad_accum"]
    return micros * tensor_traffic(size, _tokens(config) // micros, _width(config), config["model"]["n_layer"], p, False)


NONE = Formula("none", lambda p, config, size: 0)
RING = Formula("2 (p-1)/p of the gradients each way", lambda p, config, size: ring_bytes(size * config["num_parameters"], p))
SERVER = Formula("(p-1) times the gradients each way", lambda p, config, size: (p - 1) * size * config["num_parameters"])
CHUNKS = Formula("3 (p-1)/p of the parameters each way, and the chunks' padding",
                 lambda p, config, size: 3 * (p - 1) / p * size * config["num_parameters"])  # fmt: skip
ZERO3 = Formula("3 (p-1)/p of the blocks and 2 (p-1)/p of the rest each way", _zero3)
PIPELINE = Formula("a step's activations B T C and the tied embedding each way", _pipeline)
TENSOR = Formula("4 all-reduces of B T C a layer, and those of embedding, head and loss", _tensor)


@dataclass
class Variant:
    """One line of the ablation: a chapter with flags, in which {p} is the number of processes."""

    chapter: str
    name: str
    flags: tuple[str, ...] = ()
    formula: Formula = RING
    precision: str = "fp32"
    sent_bits: int = 32  # bits of one element of a gradient in messages
    one_process: bool = False
    same_curve: bool = True  # False: its loss curve may differ from chapter 00's
    runs: list[Result] = field(default_factory=list)

    @property
    def program(self) -> str:
        """"02_ddp, DDP ring"."""
        return f"{self.chapter}, {self.name}"


MICRO = ("--grad-accum", "4")  # a pipeline needs micro-batches, and a speed-up the same work
VARIANTS = (
    Variant("00_single", "one process", formula=NONE, one_process=True),
    Variant("00_single", "one process, 4 micro-batches", MICRO, NONE, one_process=True),
    Variant("00_single", "one process, bf16", formula=NONE, precision="bf16", one_process=True, same_curve=False),
    Variant("01_parameter_server", "server", formula=SERVER),
    Variant("01_parameter_server", "server, async", ("--mode", "async"), SERVER, same_curve=False),
    Variant("02_ddp", "DDP naive", ("--variant", "naive")),
    Variant("02_ddp", "DDP buckets", ("--variant", "bucket")),
    Variant("02_ddp", "DDP buckets, weights never compared", ("--variant", "bucket", "--check-sync", "0")),
    Variant("02_ddp", "DDP ring", ("--variant", "ring")),
    Variant("02_ddp", "DDP of torch", ("--backend", "torch")),
    Variant("03_horovod", "Horovod"),
    Variant("03_horovod", "Horovod, fp16 on the way", ("--compression", "fp16"), sent_bits=16, same_curve=False),
    Variant("04_apex", "DDP + mixed precision", ("--opt-level", "O1"), precision="bf16", same_curve=False),
    Variant("04_apex", "Horovod + mixed precision", ("--opt-level", "O1", "--comm", "horovod"), precision="bf16",
            same_curve=False),
    Variant("05_model_parallel", "pipeline, 1F1B", (*MICRO, "--pp", "{p}"), PIPELINE),
    Variant("05_model_parallel", "tensor parallel", ("--tp", "{p}"), TENSOR),
    Variant("06_zero", "ZeRO stage 1", ("--zero-stage", "1")),
    Variant("06_zero", "ZeRO stage 2", ("--zero-stage", "2")),
    Variant("06_zero", "ZeRO stage 3", ("--zero-stage", "3"), ZERO3),
    Variant("07_patrickstar", "PatrickStar", ("--near-budget", "100%"), CHUNKS),
)  # fmt: skip


@dataclass
class Result:
    """One finished run, read from its output folder."""

    nproc: int
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    peaks: list[int]

    @property
    def step_s(self) -> float:
        """Median seconds of a step, without the first ones."""
        return statistics.median(row["step_s"] for row in self.rows[min(WARM_UP_STEPS, len(self.rows) - 1) :])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a global batch over the median step; an asynchronous step uses only the gradients that have arrived."""
        share = (self.mean("num_gradients") or self.nproc) / self.nproc
        return share * self.config["batch_size"] * self.config["seq_len"] / self.step_s

    def mean(self, key: str) -> float | None:
        """Mean over the steps after the first ones; None if it was not measured."""
        values = [row[key] for row in self.rows[min(WARM_UP_STEPS, len(self.rows) - 1) :] if row.get(key) is not None]
        return statistics.fmean(values) if values else None
