"""Codes of frozen weights: against a scalar formula, chapter 08's quantiser, and the bound of their error."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pstar.kernels import CODE_BLOCK, BlockCodes
from pstar.kernels.block_codes import CPU_BLOCKS, LEAST_SCALE, NF4
from pstar.layout import layout
from pstar.layout.budget import Costs
from tests.chapters.technique import technique

BITS = (8, 4)
BOOKS = {8: [code / 127 for code in range(-127, 128)], 4: list(NF4)}
HALF_GAPS = {bits: max(b - a for a, b in zip(book, book[1:], strict=False)) / 2 for bits, book in BOOKS.items()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights() -> st.SearchStrategy[torch.Tensor]:
    """Up to three blocks of one magnitude, the last perhaps shorter; a weight is at most 1e4 and perhaps zero."""
    value = st.floats(-1, 1, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0])
    return st.tuples(st.lists(value, min_size=1, max_size=3 * CODE_BLOCK), st.sampled_from([1.0, 0.02, 1e4, 3e-3])).map(
        lambda drawn: torch.tensor(drawn[0]) * drawn[1])


def decoded_by_hand(rows: torch.Tensor, bits: int) -> list[float]:
    """A row's bytes one by one. The product of value and scale is rounded to fp32 once."""
    found = []
    for row in rows.view(-1, 2 + CODE_BLOCK * bits // 8).tolist():
        scale = struct.unpack("<f", bytes([0, 0, *row[:2]]))[0]    # bf16 is the upper half of fp32
        for byte in row[2:]:
            codes = [byte >> 4, byte & 15] if bits == 4 else [(byte + 128) % 256 - 1]    # int8 -127 is the first value
            values = [torch.tensor(BOOKS[bits][code]) for code in codes]
            found += [(value * scale).item() for value in values]
    return found


@pytest.mark.parametrize("bits", BITS)
@given(values=weights())
def test_each_weight_has_the_nearest_code_and_an_error_within_the_bound(bits, values):
    """At most half the widest gap of the code book times the block's largest magnitude, and bf16's rounding of that scale,
    2^-9 of it. The nearest code is found in float64; 1e-6 covers the fp32 division."""
    codes = BlockCodes(bits)
    rows, found = codes.encode(values), codes.round(values, torch.float32)
    assert rows.numel() == codes.num_bytes(values.numel()) and found.shape == values.shape
    assert found.tolist() == decoded_by_hand(rows, bits)[: values.numel()]
    for block, own in zip(values.split(CODE_BLOCK), found.split(CODE_BLOCK), strict=True):
        most = block.abs().max().double()
        scale = most.to(torch.bfloat16).double()
        assert (block - own).abs().max() <= (HALF_GAPS[bits] + 2**-9 + 1e-6) * most
        if most > 0:
            book = torch.tensor(BOOKS[bits], dtype=torch.float64)
            distance = ((block / most)[:, None] - book).abs()
            chosen = (own.double() / scale)[:, None].sub(book).abs().argmin(1)
            assert (distance.gather(1, chosen[:, None])[:, 0] <= distance.amin(1) + 1e-6).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(values=weights())
def test_decoded_weights_have_the_same_codes_when_they_are_encoded_again(bits, dtype, values):
    """Magnitudes from 3e-3: in fp16 a scale below 2^-17 is not exact."""
    values[values.abs() < 1e-4] = 0
    codes = BlockCodes(bits)
    once = codes.round(values, dtype)
    assert torch.equal(codes.encode(once.float()), codes.encode(values))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, CPU_BLOCKS - 1, CPU_BLOCKS, 2 * CPU_BLOCKS + 3])
def test_rows_at_the_end_of_a_buffer_are_decoded_into_it(bits, dtype, blocks):
    """As into another buffer, bit for bit: no weight overwrites a row that is not decoded yet."""
    codes = BlockCodes(bits)
    rows = codes.encode(torch.randn(blocks * CODE_BLOCK, generator=torch.Generator().manual_seed(blocks)))
    buffer = torch.full((blocks * CODE_BLOCK,), float("nan"), dtype=dtype)
    codes.tail(buffer).copy_(rows)
    codes.decode_tail(buffer)
    assert torch.equal(buffer, codes.decode(rows, torch.empty_like(buffer)))
    assert codes.tail(buffer).nbytes == rows.nbytes < buffer.nbytes


def test_nf4_codes_are_those_of_chapter_08():
    """1,000 random blocks. The scales differ: the chapter keeps fp32, a row bf16, the nearest one."""
    chapter, books = (technique("08_param_efficient", f"quantize.{name}") for name in ("blockwise", "code_books"))
    assert books.nf4_book().tolist() == torch.tensor(NF4).tolist()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, CODE_BLOCK, generator=generator) * torch.rand(1000, 1, generator=generator)
    codes, scales = chapter.quantize_blocks(values, books.nf4_book(), CODE_BLOCK)
    rows = BlockCodes(4).encode(values.view(-1)).view(1000, -1)
    assert torch.equal(rows[:, 2:].reshape(-1), chapter.pack(codes))
    assert torch.equal(rows[:, :2].contiguous().view(torch.bfloat16)[:, 0], scales.to(torch.bfloat16))


@pytest.mark.parametrize("bits", BITS)
def test_extreme_blocks(bits):
    codes = BlockCodes(bits)
    zeros = torch.zeros(CODE_BLOCK)
    for values in (zeros, zeros + LEAST_SCALE / 2):
        assert not codes.round(values, torch.float32).any()
    largest = torch.finfo(torch.float32).max
    found = codes.round(torch.tensor([largest, -largest, 1.0]), torch.float32)
    assert found.isfinite().all() and found[0] == torch.finfo(torch.bfloat16).max == -found[1]
    assert codes.round(torch.full((1,), LEAST_SCALE), torch.float32).item() == LEAST_SCALE
    assert codes.encode(torch.zeros(0)).numel() == 0


def test_the_layers_agree_on_the_bytes_of_a_block():
    assert layout.CODE_BLOCK == CODE_BLOCK
    costs = [Costs(2, 2, 10, 0, bits).block_bytes for bits in BITS]
    assert costs == [BlockCodes(bits).row_bytes for bits in BITS] == [66, 34]
    assert 34 / (2 * CODE_BLOCK) == 0.265625 and 66 / (2 * CODE_BLOCK) == 0.515625    # of bf16's bytes
