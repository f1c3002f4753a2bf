"""The global norm of pieces on several ranks: the bits of the norm of the whole, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch

from pstar.comm.collectives import Collectives
from pstar.kernels import NORM_BLOCK, cpu
from pstar.layout.layout import ModuleSpec, make_layout
from pstar.memory.tier import Ledger
from pstar.numerics.grad_norm import ParameterNorms, clip_grad_norm_, global_norm, parameter_norms
from tests.elsewhere import Elsewhere, elsewhere

SIZES = {"a": 3 * NORM_BLOCK + 5, "b": 7, "c": 40_000, "d": 2 * NORM_BLOCK, "e": 130_001, "unused": 50}


def grads(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(numel, generator=generator).to(dtype) for name, numel in SIZES.items()}


def layouts(num_ranks: int):
    modules = [ModuleSpec(name, ((name, numel),)) for name, numel in SIZES.items()]
    for ownership in ("whole", "sharded"):
        for chunk in (64, 5_000, 40_032, 140_000):
            yield make_layout(modules, chunk, num_ranks, ownership)


def norms_of(norms: ParameterNorms, pieces: dict[int, torch.Tensor], arrived):
    """Groups are complete in any order; a piece whose norms are taken is not read again, so it may change."""
    for group in reversed(pieces):
        assert not norms.taken(group)
        norms.take(group, piece := pieces[group].clone(), arrived)
        piece.fill_(math.nan)
    return norms(arrived)


def norms_case(rank: int, num_ranks: int, dtype: torch.dtype, drop_rows: bool = False, device: str = "cpu"):
    """The norms of each layout. device: of the pieces: "cpu", "other" (a made-up one), or "both" in turns."""
    collectives, results = Collectives(None, Ledger()), []
    for layout in layouts(num_ranks):
        pieces = {}
        for group in layout.groups:
            piece = torch.zeros(group.piece_elems, dtype=dtype)
            for span in group.spans(rank):
                if span.name != "unused":
                    whole = grads(dtype)[span.name]
                    piece[span.piece_offset : span.piece_offset + span.numel] = whole[span.param_offset :][: span.numel]
            pieces[group.index] = piece
        norms = ParameterNorms(layout, list(SIZES), collectives, torch.device("cpu"))
        # "b" has a gradient on rank 0 only: then the others' share of its mean is 0
        if drop_rows:
            norms._shared.clear()
        on_other = [index for index in pieces if device == "other" or (device == "both" and index % 2)]
        pieces |= {index: elsewhere(pieces[index]) for index in on_other}
        before = Elsewhere.to_host
        results.append(norms_of(norms, pieces, lambda name: name != "unused" and (name != "b" or rank == 0)))
        assert Elsewhere.to_host - before == bool(on_other), "one transfer a step, however many groups"
    return results


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_layout_changes_a_bit(ranks, num_ranks, dtype):
    expected = parameter_norms(grad for name, grad in grads(dtype).items() if name != "unused")
    for results in ranks(num_ranks).run(norms_case, dtype):
        for norms, used in results:
            assert torch.equal(norms, expected)
            assert used == set(SIZES) - {"unused"}


@pytest.mark.parametrize("device", ["other", "both"])
def test_norms_on_a_device_are_transferred_once_a_step(ranks, device):
    """Each transfer waits for the device: one for each group, or for each block between ranks, would empty its queue."""
    expected = parameter_norms(grad for name, grad in grads().items() if name != "unused")
    for results in ranks(2).run(norms_case, torch.float32, False, device):
        assert all(torch.equal(norms, expected) for norms, _ in results)


def test_without_the_blocks_on_two_ranks_the_norm_is_another(ranks):
    expected = parameter_norms(grad for name, grad in grads().items() if name != "unused")
    assert any(not torch.equal(norms, expected) for norms, _ in ranks(2).run(norms_case, torch.float32, True)[0])


def test_on_one_rank_it_is_the_oracle():
    norms = ParameterNorms(layout := make_layout([ModuleSpec("m", tuple(SIZES.items()))], 10**6), list(SIZES),
                           Collectives(None, Ledger()), torch.device("cpu"))
    piece = torch.full((layout.groups[0].piece_elems,), math.nan)    # places without a gradient are not read
    for name, grad in grads().items():
        slot = layout.slots[name]
        piece[slot.offset : slot.offset + slot.numel] = grad
    got, used = norms_of(norms, {0: piece}, lambda name: name in ("a", "e"))
    assert torch.equal(got, parameter_norms([grads()["a"], grads()["e"]])) and used == {"a", "e"}


def test_it_is_the_norm_of_torch_up_to_rounding():
    params, theirs = ([torch.nn.Parameter(torch.zeros(numel)) for numel in SIZES.values()] for _ in range(2))
    for ours, other, grad in zip(params, theirs, grads().values(), strict=True):
        ours.grad, other.grad = grad.clone(), grad.clone()
    total = clip_grad_norm_(params, 0.5)
    assert total == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 0.5).item(), rel=1e-6)
    assert total == pytest.approx(math.sqrt(sum(grad.double().square().sum().item() for grad in grads().values())), rel=1e-7)
    for ours, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(ours.grad, other.grad)
    assert global_norm([params[0].grad, torch.tensor([math.inf])]) == math.inf


@pytest.mark.skipif(not cpu.paths(), reason="no C++ compiler: torch operations read the gradients again")
def test_norms_summed_when_gradients_were_stored_equal_the_oracle_and_read_nothing_again():
    layout = make_layout([ModuleSpec("m", tuple(SIZES.items()))], 10**6)
    norms = ParameterNorms(layout, list(SIZES), Collectives(None, Ledger()), torch.device("cpu"))
    piece, given = torch.full((layout.groups[0].piece_elems,), math.nan), grads()

    def place(name: str) -> torch.Tensor:
        slot = layout.slots[name]
        return piece[slot.offset : slot.offset + slot.numel]

    for name, grad in given.items():
        norms.store(name, place(name), grad, False)
    norms.store("b", place("b"), given["b"], True)                            # a second micro-step
    norms.store("c", place("c"), given["c"].double(), True)                   # no kernel adds that: it must be read
    expected = {name: grad.clone() for name, grad in given.items()}
    expected["b"] += given["b"]
    expected["c"] += given["c"]
    taken = piece.clone()
    place_of_a = layout.slots["a"]
    taken[place_of_a.offset : place_of_a.offset + 3] = math.nan               # nobody looks
    norms.take(0, taken, lambda name: name != "unused")
    found, used = norms(lambda name: name != "unused")
    assert used == set(SIZES) - {"unused"}
    assert torch.equal(found, parameter_norms(grad for name, grad in expected.items() if name != "unused"))

    norms.take(0, piece, lambda name: True)                                   # forgotten: all of it is read anew
    assert torch.equal(norms(lambda name: True)[0], parameter_norms(place(name) for name in SIZES))
