"""Grades exercise 08: LoRA equals a case by hand, trains two matrices alone and merges; blocks have the nearest codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.exercises.exercise import check, same

# fp32 sums in another order: seen 1e-7
ROUNDING = 1e-6
NUM_IN, NUM_OUT, RANK, ALPHA = 6, 5, 2, 3.0


def frozen() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(NUM_IN, NUM_OUT), torch.randn(NUM_OUT)


def small_matrices(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """A (rank, in) and B (out, rank), whatever their names."""
    trained = {tuple(p.shape): p for p in layer.parameters() if p.requires_grad}
    check(set(trained) == {(RANK, NUM_IN), (NUM_OUT, RANK)}, "shapes of the parameters that require grad",
          [(RANK, NUM_IN), (NUM_OUT, RANK)], sorted(trained))  # fmt: skip
    return trained[RANK, NUM_IN], trained[NUM_OUT, RANK]


def test_lora(exercise):
    weight, bias = frozen()
    before, base_bias = weight.clone(), bias.clone()
    layer = exercise.module.LoraLinear(weight, bias, RANK, ALPHA)
    x = torch.randn(3, 4, NUM_IN)
    same("output before the first update, against the frozen layer's", x @ before + base_bias, layer(x), ROUNDING)
    a, b = small_matrices(layer)
    layer(x).square().sum().backward()
    largest = max(float(p.grad.abs().max()) for p in (a, b) if p.grad is not None)
    check(largest > 0, "the first gradient of A and B: both are 0 forever if A and B both begin as 0", "not all 0", "all 0")

    with torch.no_grad():  # by hand: A picks inputs 0 and 1, B sends them to outputs 0 and 4; s = 3 / 2
        a.copy_(torch.eye(NUM_IN)[:RANK])
        b.zero_()
        b[0, 0], b[4, 1] = 1.0, 2.0
    change = torch.zeros(NUM_IN, NUM_OUT)
    change[0, 0], change[1, 4] = 1.5, 3.0
    same(f"output with A and B by hand, rank {RANK}, alpha {ALPHA:g}", x @ (before + change) + base_bias, layer(x), ROUNDING)
    same("merged_weight() with A and B by hand", before + change, layer.merged_weight(), ROUNDING)

    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    merged = layer.merged_weight()
    same("the frozen weight after 3 steps and a merge", before, weight)
    same("x @ merged_weight() + bias after 3 steps, against the layer's output", layer(x), x @ merged + bias, ROUNDING)


BOOK = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0])  # gaps of different widths, as NF4's


def test_blocks(exercise):
    values = torch.tensor([0.5, -2.0, 1.0, 0.2, 0.03, 0.01])
    codes, scales = exercise.module.quantize(values, BOOK, 4)
    same("largest magnitudes of [0.5, -2, 1, 0.2 | 0.03, 0.01], block 4", torch.tensor([2.0, 0.03]), scales)
    same("codes of [0.25, -1, 0.5, 0.1 | 1, 0.33], book [-1, -0.5, 0, 0.25, 1]", [3, 0, 3, 2, 4, 3], codes.tolist())
    same("type of codes", torch.uint8, codes.dtype)
    expected = torch.tensor([0.5, -2.0, 0.5, 0.0, 0.03, 0.0075])
    same("dequantize of these codes", expected, exercise.module.dequantize(codes, scales, BOOK, 4), ROUNDING)

    torch.manual_seed(1)
    values = torch.randn(1000)
    values[:64] = 0.0  # a block of zeros
    values[200] = 100.0  # one large value coarsens its block only
    book = torch.linspace(-1, 1, 15)
    codes, scales = exercise.module.quantize(values, book, 64)
    back = exercise.module.dequantize(codes, scales, book, 64)
    same("dequantize of 64 zeros", values[:64], back[:64])
    limits = scales.repeat_interleave(64)[:1000] / 14  # half of a gap of 2/14, times the scale
    errors = (back - values).abs()
    worst = int((errors - limits).argmax())
    check(bool((errors <= limits * (1 + 1e-5)).all()), f"rounding error of value {worst} of 1000, 15 even codes",
          f"at most {limits[worst]:.6g}", f"{errors[worst]:.6g}")  # fmt: skip
