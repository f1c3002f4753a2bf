"""The formula for floating-point operations against torch's own counter, and the measured peak."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gpt2_chinese.model.config import ModelConfig, resolve_model_config
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel, next_token_loss
from gpt2_chinese.run import flops


def counted(config: ModelConfig, batch: int, seq_len: int, frozen: bool = False) -> int:
    """Operations of forward and backward as torch counts them, attention by plain matrix products."""
    model = GPT2LMHeadModel(config)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("wpe" in name)  # gradients must reach the first layer, through all weights
    ids = torch.zeros(batch, seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(model(ids), ids).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("changes, seq_len", [({}, 128), ({"n_inner": 96, "n_head": 2}, 7), ({"n_layer": 1}, 1)])
def test_the_formula_counts_what_torch_counts(changes: dict, seq_len: int) -> None:
    config, _ = resolve_model_config("tiny")
    config = ModelConfig(**{**vars(config), "vocab_size": 3980, **changes})
    assert counted(config, 2, seq_len) == 2 * seq_len * flops.flops_per_token(config, seq_len)
    assert counted(config, 2, seq_len, True) == 2 * seq_len * flops.flops_per_token(config, seq_len, frozen=True)


def test_all_parameters_but_biases_norms_and_positions_are_in_matrix_products() -> None:
    config = ModelConfig(vocab_size=100, n_layer=3, n_embd=24, n_head=2, n_inner=40)
    named = GPT2LMHeadModel(config).named_parameters()
    assert flops.matrix_parameters(config) == sum(p.numel() for name, p in named if p.ndim == 2 and "wpe" not in name)


def test_the_peak_is_the_best_of_all_products_measured_once_without_a_random_number(monkeypatch) -> None:
    sizes = []

    def seconds(factor: torch.Tensor, on_gpu: bool) -> float:
        sizes.append(len(factor))
        return 2e-4 if len(sizes) in (3, 8) else 10.0  # one good one among five of 128, and one of 256

    monkeypatch.setattr(flops, "_seconds_of_a_product", seconds)
    monkeypatch.setattr(flops, "PERIOD_S", 0.02)  # at 1.7e11 a second three products of 512 take 5 ms, three of 1024 38 ms
    monkeypatch.setattr(flops.time, "perf_counter", lambda: 0.0)
    flops._measured.cache_clear()
    state = torch.get_rng_state()
    for _ in range(2):
        assert flops.matmul_flops_per_s(torch.device("cpu"), "fp32") == 2 * 256**3 / 2e-4
    assert sizes[:10] == [128] * 5 + [256] * 5 and len(sizes) == 15
    assert torch.equal(torch.get_rng_state(), state)
    flops._measured.cache_clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_has_a_peak(precision: str) -> None:
    assert flops.matmul_flops_per_s(torch.device("cpu"), precision) > 0
