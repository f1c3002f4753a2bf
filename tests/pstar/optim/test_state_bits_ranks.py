"""8-bit states on several ranks: no bit depends on placement, chunk size, ownership or the number of ranks."""

from __future__ import annotations

import pytest
import torch

from pstar.layout.layout import STATE_BLOCK, ModuleSpec, make_layout
from tests import toy
from tests.pstar.optim.test_state_bits import PRECISIONS, STEPS, equal, formula, keys_of

KINDS = {"whole": {}, "chunk": {"communication": "chunk"}, "sharded": {"ownership": "sharded"}}


def case(rank: int, num_ranks: int, keys: dict, all_the_same: bool = False, path: str = "", first: int = 0):
    """Trains; with all_the_same each rank gets the whole batch, so that the mean of the gradients is each rank's own. With a
    path it begins with the checkpoint there."""
    model, optimizer = toy.build(**keys_of(**keys))
    if path:
        model.load_checkpoint(path)
    share = (0, 1) if all_the_same else (rank, num_ranks)
    losses = toy.train(model, optimizer, STEPS, *share, first=first)
    weights, moments = model.gather_state()
    return {"losses": losses, "weights": weights, "moments": moments}


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [
    {"near_budget": "100%"}, {"near_budget": "min", "far_states": "stream"}, {"near_budget": "50%", "prefetch": 0},
    {"near_budget": "min", "default_chunk_size": 3_000}, {"near_budget": "min", "default_chunk_size": 11_000}],
    ids=lambda keys: " ".join(map(str, keys.values())))
def test_equal_gradients_give_the_bits_of_one_process(ranks, num_ranks, kind, keys):
    """g/p + ... + g/p is g for p a power of two: so every rank's update is that of one process, if blocks are the same."""
    alone = ranks(1).run_once(case, {"near_budget": "100%"}, True)[0]
    keys = {"default_chunk_size": 5_000} | keys | KINDS[kind]
    for number, result in enumerate(ranks(num_ranks).run(case, keys, True)):
        assert result["losses"] == alone["losses"]
        assert number or (equal(result["weights"], alone["weights"]) and equal(result["moments"], alone["moments"]))


@pytest.mark.parametrize("kind", KINDS)
def test_placement_changes_no_bit_at_two_ranks_in_bf16(ranks, kind):
    plain = {"default_chunk_size": 5_000} | PRECISIONS["bf16"]
    first = ranks(2).run_once(case, plain | {"near_budget": "100%"})[0]
    for keys in ({"near_budget": "min"}, {"near_budget": "min", "default_chunk_size": 3_000, "eviction_policy": "lru"}):
        got = ranks(2).run(case, plain | KINDS[kind] | keys)[0]
        assert got["losses"] == first["losses"]
        assert equal(got["weights"], first["weights"]) and equal(got["moments"], first["moments"])


def bytes_case(rank: int, num_ranks: int, keys: dict):
    model, _ = toy.build(**keys_of(**keys))
    model.backward(model(*toy.share(0, rank, num_ranks)))
    return model.model_data_bytes, model.layout


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision, per_param", [("bf16", 8), ("fp32", 10)])
def test_bytes_of_each_rank_to_the_byte(ranks, num_ranks, kind, precision, per_param):
    keys = {"near_budget": "min", "default_chunk_size": 5_000} | KINDS[kind] | PRECISIONS[precision]
    for held, layout in ranks(num_ranks).run(bytes_case, keys):
        assert held == formula(layout, per_param)


def save_case(rank: int, num_ranks: int, keys: dict, path: str):
    model, optimizer = toy.build(**keys_of(**keys))
    toy.train(model, optimizer, STEPS, 0, 1)
    model.save_checkpoint(path)
    state = model.gather_state()
    return {"losses": toy.train(model, optimizer, STEPS, 0, 1, first=STEPS), "state": state}


@pytest.mark.each
@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("then", [1, 2, 4])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_checkpoint_goes_on_bitwise_at_any_number_of_ranks(ranks, tmp_path, first, then, kind):
    """Every rank has the whole batch, as above, so also the losses are the same bits."""
    path = str(tmp_path / "saved")
    saved = ranks(first).run(save_case, {"default_chunk_size": 3_000, "near_budget": "min"}, path)[0]
    keys = {"default_chunk_size": 7_000, "near_budget": "min"} | KINDS[kind]
    assert ranks(then).run(case, keys, True, path, STEPS)[0]["losses"] == saved["losses"]


@pytest.mark.parametrize("ownership", ["whole", "sharded"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [32, 700, 2_048, 5_000, 30_000])
def test_no_block_is_cut(ownership, num_ranks, chunk):
    """Each part of a parameter begins with a block; without whole_blocks some do not. No two parameters overlap."""
    generator = torch.Generator().manual_seed(chunk + num_ranks)
    sizes = torch.randint(1, 9_000, (40,), generator=generator).tolist()
    modules = [ModuleSpec(str(k), ((f"{k}.weight", size), (f"{k}.bias", 100 + k))) for k, size in enumerate(sizes)]
    layout = make_layout(modules, chunk, num_ranks, ownership, whole_blocks=True)
    assert layout.num_params == sum(sizes) + sum(range(100, 140))
    cut = 0
    for group in layout.groups:
        ends = sorted((slot.offset, slot.offset + slot.numel) for slot in group.slots)
        assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False)) and ends[-1][1] <= group.elems
        for rank in range(num_ranks):
            for span in group.spans(rank):
                assert span.param_offset % STATE_BLOCK == 0
                cut += span.param_offset > 0
    assert cut > 0 or num_ranks == 1 or (ownership == "whole" and chunk >= 9_000)
