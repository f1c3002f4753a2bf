"""The 8-bit codes of every code path against the scalar formula: the number of boundaries below x, counted one by one."""

from __future__ import annotations

import bisect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pstar.kernels import QUANT_BLOCK, AdamOptions, AdamUpdate, adam_steps, cpu
from pstar.kernels.quantize import code_tables

FP32 = torch.float32
PATHS = cpu.paths()
TABLES = code_tables(torch.device("cpu"))
BOUNDARIES = TABLES[1].tolist(), TABLES[3].tolist()
# Scales at which the vector paths multiply by the reciprocal, and those so extreme that they divide.
SCALES = (1.0, 0.37, 3.0e-7, 1.1e-29, 9e29, 3e-31, 2e31, 1e-38, 3e38, 1e-44)

pytestmark = pytest.mark.skipif(not PATHS, reason="no C++ compiler: the kernels run on torch operations")


def moments_and_codes(grads: torch.Tensor, path: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(fp32 moments, their codes, their scales) after an update with betas of 0: the moments are grads and their squares."""
    fields = {"step": 1, "options": AdamOptions(lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)}
    numel = grads.numel()
    full = AdamUpdate(torch.zeros(numel), grads, torch.zeros(numel), torch.zeros(numel), **fields)
    codes = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(-(-numel // QUANT_BLOCK)) for _ in range(2)]
    quantised = AdamUpdate(torch.zeros(numel), grads, *codes, **fields, scales=tuple(scales))
    adam_steps([full], "plain")
    adam_steps([quantised], path)
    return [full.exp_avg, full.exp_avg_sq], codes, scales


def expected_codes(values: torch.Tensor, boundaries: list[float]) -> tuple[list[int], list[float]]:
    """(codes, scales) by the scalar formula. bisect_left counts the boundaries below a number; a NaN has code 0."""
    codes, scales = [], []
    for block in values.split(QUANT_BLOCK):
        scale = max(map(abs, block.tolist()), key=lambda x: math.inf if math.isnan(x) else x)
        scale = math.nan if block.isnan().any() else scale
        relative = (block / torch.tensor(scale, dtype=FP32) if scale > 0 else torch.zeros_like(block)).tolist()
        codes += [0 if math.isnan(x) else bisect.bisect_left(boundaries, x) for x in relative]
        scales.append(scale)
    return codes, scales


def check(grads: torch.Tensor) -> None:
    for path in PATHS:
        for values, codes, scales, boundaries in zip(*moments_and_codes(grads, path), BOUNDARIES, strict=True):
            wanted, wanted_scales = expected_codes(values, boundaries)
            assert codes.tolist() == wanted, path
            torch.testing.assert_close(scales, torch.tensor(wanted_scales), rtol=0, atol=0, equal_nan=True)


def neighbours(values: torch.Tensor, steps: int) -> torch.Tensor:
    """The fp32 numbers at most `steps` units in the last place from each value."""
    bits = values.view(torch.int32)[:, None] + torch.arange(-steps, steps + 1, dtype=torch.int32)
    return bits.reshape(-1).view(FP32)


@pytest.mark.parametrize("scale", SCALES)
def test_codes_around_every_boundary(scale):
    """First moment: each boundary times the scale, and its neighbours. Second: squares, from the roots of the boundaries."""
    positive = TABLES[1][127:-1]
    first = neighbours(positive * scale, 3)
    check(torch.cat([torch.cat([part[: QUANT_BLOCK - 1], torch.tensor([scale])])
                     for part in torch.cat([first, -first]).split(QUANT_BLOCK - 1)]))
    if 1e-30 < scale < 1e30:    # else the roots' squares are no longer close to the boundaries
        second = neighbours((TABLES[3][:-1].double() * scale).sqrt().float(), 5)
        top = torch.tensor([scale], dtype=torch.float64).sqrt().float()
        check(torch.cat([torch.cat([part, top]) for part in second.split(QUANT_BLOCK - 1)]))


@st.composite
def blocks(draw):
    """Up to 70 numbers (four vectors and a rest): any fp32, one common magnitude, and what divides into special cases."""
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan]
    anything = st.floats(width=32) | st.sampled_from(special)
    finite = st.floats(-1, 1, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-7, -1e-7, 1e-40])
    magnitude = draw(st.sampled_from(SCALES))
    usual = finite.map(lambda x: x * magnitude)
    values = draw(st.lists(usual, max_size=70) | st.lists(usual | anything, max_size=70))
    return torch.tensor(values or [0.0], dtype=torch.float64).float()


@given(blocks())
def test_codes_of_any_numbers(grads):
    check(grads)


@pytest.mark.parametrize("numel", [QUANT_BLOCK - 1, QUANT_BLOCK, 3 * QUANT_BLOCK + 17])
def test_codes_of_random_moments(numel):
    """Of all magnitudes: one in 4,000 numbers is so close to a boundary that the vector paths search the table."""
    generator = torch.Generator().manual_seed(numel)
    check(torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator) * 4))


def test_codes_of_blocks_that_are_zero_or_not_finite():
    for values in ([0.0], [-0.0], [0.0, math.nan], [1.0, math.inf, -1.0], [math.nan], [-math.inf], [1e-45, 0.0, -1e-45]):
        check(torch.tensor(values * 33))


@pytest.mark.parametrize("path", PATHS)
def test_every_code_is_decoded_to_its_value(path):
    """The parameter after the update is that of an update with fp32 moments, taken from the table: bit for bit."""
    numel = 2 * QUANT_BLOCK - 5
    generator = torch.Generator().manual_seed(1)
    codes = [torch.arange(numel).to(torch.uint8), torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8)]
    scales = torch.tensor([0.75, 1e-3]), torch.tensor([3e-5, 1e-41])
    full = [table[each.long()] * scale.repeat_interleave(QUANT_BLOCK)[:numel]
            for table, each, scale in zip(TABLES[::2], codes, scales, strict=True)]
    fields = {"step": 3, "options": AdamOptions(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)}
    param, grad = torch.randn(numel, generator=generator), 1e-4 * torch.randn(numel, generator=generator)
    updates = [AdamUpdate(param.clone(), grad, *codes, **fields, scales=scales),
               AdamUpdate(param.clone(), grad, *full, **fields)]
    adam_steps(updates, path)
    assert torch.equal(updates[0].param, updates[1].param)
