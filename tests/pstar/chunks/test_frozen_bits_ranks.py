"""Frozen matrices in codes on several ranks: gathers move codes, which no placement, ownership or number of ranks changes.

Losses against one plain process: within 1e-5 relative, as in tests/pstar/chunks/test_frozen_ranks.py (a sum over ranks adds
in another order). Frozen weights, and placements of one layout at one number of ranks: bit for bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pstar
from pstar.layout.layout import CODE_BLOCK, ModuleSpec, make_layout
from tests import toy
from tests.pstar.chunks.test_frozen import PRECISIONS, Six, assert_clean
from tests.pstar.chunks.test_frozen_bits import BITS, rounded
from tests.pstar.chunks.test_frozen_ranks import bytes_case, follows
from tests.pstar.test_engine_ranks import global_losses

ROWS = {8: 66, 4: 34}


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("keys", [{}, {"communication": "chunk"}, {"ownership": "sharded"}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bits", BITS)
def test_ranks_hold_and_gather_the_bytes_of_codes(ranks, num_ranks, keys, precision, bits):
    """Of each rank's pieces, and of all pieces but its own in forward and backward. At the least near budget all frozen
    chunks but those in use leave."""
    moved = {}
    for each in (bits, 32):
        found = ranks(num_ranks).run(bytes_case, {"near_budget": "min", "frozen_bits": each} | keys | PRECISIONS[precision])
        for got in found:
            frozen, trained = got["numels"]
            param, states = got["costs"]["param"], got["costs"]["states"]
            codes = frozen // CODE_BLOCK * ROWS[bits] if each == bits else param * frozen
            assert got["bytes"] == (codes + (param + states) * trained) // num_ranks
            assert got["near"][0] <= got["near"][1]
        moved[each] = [[got["moved"][kind] for got in found] for kind in ("gather", "far to near")]
    # The trained part is equal; the frozen part shrinks by `saved` bytes for each block that travels.
    saved = CODE_BLOCK * param - ROWS[bits]
    for ours, whole in zip(itertools.chain(*moved[bits]), itertools.chain(*moved[32]), strict=True):
        rows, rest = divmod(whole - ours, saved)
        assert rest == 0 and rows > 0
    if keys.get("communication") != "chunk":    # there a rank receives other ranks' chunks only, here parts of all
        once = (frozen - frozen // num_ranks) // CODE_BLOCK    # 2 (n - C) gathers of n groups, C = 1 if n is 2
        for ours, whole in zip(moved[bits][0], moved[32][0], strict=True):
            assert once <= (whole - ours) // saved <= 2 * once


PLACES = [*itertools.product(BITS, ["auto", 5_000], [{}, {"communication": "chunk"}, {"ownership": "sharded"}], [2, 4])]
QUICK = ((BITS[0], 5_000, {"ownership": "sharded"}, 2), (BITS[1], "auto", {}, 2))    # the others: of test_frozen_ranks.py


@pytest.mark.parametrize("bits, chunk, keys, num_ranks", [
    pytest.param(*case, marks=[pytest.mark.deep] * (case not in QUICK)) for case in PLACES], ids=str)
def test_losses_follow_one_process_and_no_placement_changes_a_bit(ranks, num_ranks, keys, chunk, bits, tmp_path):
    keys = keys | {"default_chunk_size": chunk, "frozen_bits": bits}
    follows(ranks(num_ranks), keys, rounded(Six, bits), str(tmp_path), "70%")


# ---------------------------------------------------------------- checkpoints


def save(rank: int, num_ranks: int, folder: str, keys: dict) -> list[float]:
    """Saves after two steps; returns the losses of the steps after that."""
    model, optimizer = toy.build(Six, near_budget="min", **keys)
    toy.train(model, optimizer, 2, rank, num_ranks)
    model.save_checkpoint(f"{folder}/saved")
    return global_losses(toy.train(model, optimizer, 3, rank, num_ranks, first=2), num_ranks)


def resume(rank: int, num_ranks: int, folder: str, keys: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model, optimizer = toy.build(Six, **keys)
    toy.train(model, optimizer, 1, rank, num_ranks)    # some frozen blocks are near when they are read
    model.load_checkpoint(f"{folder}/saved")
    assert_clean(model)
    return global_losses(toy.train(model, optimizer, 3, rank, num_ranks, first=2), num_ranks), model.gather_state()[0]


@pytest.mark.parametrize("precision, num_ranks, keys", [
    ("fp32", 1, {"default_chunk_size": 3_000}), ("fp32", 2, {"ownership": "sharded", "near_budget": "min"}),
    *(pytest.param(precision, num_ranks, {"default_chunk_size": 3_000, "near_budget": "min"}, marks=pytest.mark.deep)
      for precision, num_ranks in (("fp32", 4), ("bf16", 1), ("bf16", 2), ("bf16", 4))),
])
def test_a_run_resumes_at_another_number_of_ranks_chunk_size_and_ownership(ranks, tmp_path, precision, num_ranks, keys):
    """The bits of the frozen weights are those of a start: each is saved decoded, and finds its code again."""
    bits = PRECISIONS[precision] | {"frozen_bits": 4}
    losses = ranks(2).run(save, str(tmp_path), bits)[0]
    got, weights = ranks(num_ranks).run(resume, str(tmp_path), bits | keys)[0]
    for name, value in toy.build(Six, **bits)[0].gather_state()[0].items():
        assert name.rpartition(".")[2] in ("up", "down") or torch.equal(weights[name], value)
    # bf16: gradients of other sums differ by a unit in the last place, 2^-8, of which losses show a part
    assert got == losses if num_ranks == 2 else got == pytest.approx(losses, rel=1e-6 if precision == "fp32" else 1e-3)


# ---------------------------------------------------------------- layout


@given(st.lists(st.tuples(st.integers(1, 3_000), st.integers(1, 90), st.booleans()), min_size=1, max_size=12),
       st.integers(1, 4_000), st.sampled_from([1, 2, 3, 4]), st.sampled_from(["whole", "sharded"]))
def test_blocks_begin_with_each_parameter_and_no_rank_has_a_part_of_one(sizes, chunk, num_ranks, ownership):
    modules = [ModuleSpec(str(k), ((f"{k}.w", matrix), (f"{k}.b", vector)),
                          frozenset((f"{k}.w", f"{k}.b") if frozen else ()), frozenset([f"{k}.w"]))
               for k, (matrix, vector, frozen) in enumerate(sizes)]
    layout = make_layout(modules, chunk, num_ranks, ownership, in_codes=True)
    assert layout.num_params == sum(matrix + vector for matrix, vector, _ in sizes)
    assert [group.index for group in layout.groups] == list(range(len(layout.groups)))
    assert layout.groups == layout.trained + layout.frozen
    coded = {slot.name for group in layout.groups if group.coded for slot in group.slots}
    assert coded == {f"{k}.w" for k, (_, _, frozen) in enumerate(sizes) if frozen}
    for group in layout.groups:
        if group.coded:
            assert group.frozen and group.piece_elems % CODE_BLOCK == 0
            for rank in range(num_ranks):
                offsets = [(span.piece_offset, span.param_offset) for span in group.spans(rank)]
                assert all(piece % CODE_BLOCK == whole % CODE_BLOCK == 0 for piece, whole in offsets)
    vectors = [ModuleSpec(module.name, module.parameters, module.frozen) for module in modules]
    groups = make_layout(vectors, chunk, num_ranks, ownership, in_codes=True).groups
    assert groups == make_layout(modules, chunk, num_ranks, ownership).groups, "without a matrix nothing changes"


def test_ranks_refuse_a_checkpoint_of_other_bits_together(ranks, tmp_path):
    for rank, said in enumerate(ranks(2).run(refused, str(tmp_path))):
        assert "saved with frozen_bits 4, this engine has 8" in said, rank
    assert Path(tmp_path, "saved").is_dir()


def refused(rank: int, num_ranks: int, folder: str) -> str:
    model, _ = toy.build(Six, near_budget="min", frozen_bits=4)
    model.save_checkpoint(f"{folder}/saved")
    other, _ = toy.build(Six, near_budget="min", frozen_bits=8)
    try:
        other.load_checkpoint(f"{folder}/saved")
    except pstar.CheckpointError as error:
        return str(error)
    return ""
