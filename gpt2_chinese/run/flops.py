"""Floating-point operations of a training step, and the share of what the machine can do that a run reaches (MFU).

Chowdhery et al. 2022 (PaLM), appendix B: with N parameters in matrix products, L layers, width C = heads x head size and
sequences of T tokens, one token takes in forward and backward

    6 N + 12 L C T    floating-point operations,

2 a parameter in forward and 4 in backward (half of them for the gradients of inputs, half for those of weights), and
attention's two products, of queries with keys and of probabilities with values: 2 T C each in forward, three times that in
all. As there, the whole attention matrix counts, though it is causal, and what is computed again in backward does not count.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpt2_chinese.model.config import ModelConfig

if TYPE_CHECKING:
    from gpt2_chinese.distributed.ranks import Ranks
    from gpt2_chinese.settings import Settings

PERIOD_S = 0.1  # the measurement begins no further product after this time
REPETITIONS = 5  # of each size
SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matrix_parameters(model: ModelConfig) -> int:
    """N: the parameters in matrix products. The tied head counts, once; biases, norms and positions do not."""
    width, inner = model.n_embd, model.inner
    return (model.vocab_size or 0) * width + model.n_layer * (4 * width**2 + 2 * width * inner)


def flops_per_token(model: ModelConfig, seq_len: int, frozen: bool = False) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of seq_len.

    Args:
        model: its vocab_size is set.
        seq_len: T.
        frozen: nearly all weights are: backward then computes no gradients of weights, 4 N instead of 6 N. What an adapter
            adds is left out, less than a hundredth.
    """
    attention = 12 * model.n_layer * model.n_embd * seq_len
    return (4 if frozen else 6) * matrix_parameters(model) + attention


@dataclass(frozen=True)
class Rates:
    """Floating-point operations of one token, and those that all ranks together can do in a second."""

    per_token: int
    peak_per_s: float

    @classmethod
    def of(cls, settings: Settings, ranks: Ranks) -> Rates:
        """Counts by the settings, and measures; all ranks call it together, so that on a CPU they share its cores."""
        own = torch.tensor(matmul_flops_per_s(ranks.device, settings.precision), dtype=torch.float64)
        return cls(flops_per_token(settings.model, settings.seq_len, settings.frozen), ranks.sum(own).item())

    def at(self, tokens_per_s: float) -> dict[str, float]:
        """flops_per_s, and mfu: its share of the peak."""
        flops_per_s = tokens_per_s * self.per_token
        return {"flops_per_s": flops_per_s, "mfu": flops_per_s / self.peak_per_s}


def matmul_flops_per_s(device: torch.device, precision: str) -> float:
    """The best speed of a square matrix product on this device now, as this process can use it; measured once, 0.1 s.

    The measurement allocates 600 MiB at most on a GPU, 12 on a CPU, and gives them back. The factors are random, because a
    GPU multiplies constants faster (some per cent: it needs less power); torch's random generators stay as they are.

    Args:
        device: a CPU counts with the threads that torch uses, and shares them with what else runs.
        precision: fp32, bf16 or fp16: the dtype of the factors, as in the run's matrix products.
    """
    return _measured(device, precision, torch.get_num_threads() if device.type == "cpu" else 0)


@functools.cache
def _measured(device: torch.device, precision: str, _threads: int) -> float:
    on_gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(0)
    if on_gpu:    # starting cuBLAS takes longer than the whole measurement
        _seconds_of_a_product(torch.ones(SIZES["cuda"][0], SIZES["cuda"][0], dtype=DTYPES[precision], device=device), on_gpu)
    best, begin = 0.0, time.perf_counter()
    for size in SIZES["cuda" if on_gpu else "cpu"]:
        if best and time.perf_counter() - begin + 3 * (2 * size**3 / best) > PERIOD_S:
            break
        factor = torch.randn(size, size, generator=generator, device=device).to(DTYPES[precision])
        for _ in range(REPETITIONS):  # the first one of a size also loads its kernel, or wakes torch's threads
            best = max(best, 2 * size**3 / max(_seconds_of_a_product(factor, on_gpu), 1e-9))
            if time.perf_counter() - begin > PERIOD_S:
                break
    if on_gpu:  # the run's own peak is to be measured, and pstar asks what is free
        del factor
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _seconds_of_a_product(factor: torch.Tensor, on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    factor @ factor
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
