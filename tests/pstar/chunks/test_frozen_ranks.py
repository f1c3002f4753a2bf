"""Frozen parameters on several ranks: their bytes, what is gathered and reduced, placements, and checkpoints.

Losses against one plain process: within 1e-5 relative, as in tests/pstar/test_engine_ranks.py (a sum over ranks adds in
another order). Placements of one layout at one number of ranks, and resumed runs there: bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests import toy
from tests.pstar.chunks.test_frozen import (
    PRECISIONS,
    STEPS,
    WIDTH,
    Adapted,
    Six,
    assert_clean,
    loss_of,
    numels,
)
from tests.pstar.test_engine_ranks import global_losses


def bytes_case(rank: int, num_ranks: int, keys: dict) -> dict:
    model, optimizer = toy.build(Adapted, default_chunk_size=WIDTH**2, **keys)
    toy.train(model, optimizer, STEPS, rank, num_ranks)
    assert_clean(model)
    return {"numels": numels(model), "costs": vars(model.costs), "bytes": model.model_data_bytes,
            "far": model.far.used_bytes, "moved": dict(model.ledger.step_bytes),
            "near": (model.near.peak_bytes, model.near.budget_bytes)}


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("ownership", ["whole", "sharded"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("near", ["min", "100%"])
def test_frozen_parameters_cost_exactly_their_bytes_on_every_rank(ranks, num_ranks, ownership, precision, near):
    """And only trained ones are reduced. Where near holds all, only trained ones are gathered after the first step."""
    for got in ranks(num_ranks).run(bytes_case, {"ownership": ownership, "near_budget": near} | PRECISIONS[precision]):
        frozen, trained = got["numels"]
        param, grad, states = (got["costs"][name] for name in ("param", "grad", "states"))
        assert got["bytes"] == (param * frozen + (param + states) * trained) // num_ranks
        others = grad * trained * (num_ranks - 1) // num_ranks
        assert got["moved"]["reduce"] == others and got["near"][0] <= got["near"][1]
        if near == "min":
            assert got["far"] == got["bytes"] and got["moved"]["near to far"] == grad * trained // num_ranks
            assert got["moved"]["gather"] > others
        else:
            assert got["moved"]["gather"] == param * trained * (num_ranks - 1) // num_ranks


def case(rank: int, num_ranks: int, keys: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = toy.build(Six, **keys)
    losses = global_losses(toy.train(model, optimizer, STEPS, rank, num_ranks), num_ranks)
    assert_clean(model)
    return losses, model.gather_state()[0]


def follows(ranks, keys: dict, oracle, folder: str, far: str) -> None:
    """Losses follow one process of plain PyTorch with the model `oracle`, frozen weights have its bits, and no placement
    changes a bit.

    Args:
        ranks: a pool of the fixture.
        keys: of the engine's configuration. With the chunk size `auto` and more than two ranks placements are not compared:
            `auto` depends on the near budget, and so the order of sums.
        folder, far: disk_path and far_budget of the run with a disk.
    """
    losses, weights = ranks.run(case, keys | {"near_budget": "100%"})[0]
    expected, plain = toy.plain_run(oracle, loss_of, STEPS)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(weights[name], plain[name]) for name in weights if name.rpartition(".")[2] not in ("up", "down"))
    if keys["default_chunk_size"] == "auto" and ranks.num_ranks > 2:
        return
    for other in ({"near_budget": "min"}, {"near_budget": "min", "disk_path": folder, "far_budget": far},
                  {"near_budget": "50%", "prefetch": 0, "find_unused_parameters": True}):
        again = ranks.run(case, keys | other)[0]
        assert again[0] == losses and all(torch.equal(again[1][name], value) for name, value in weights.items()), other


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("keys", [{}, {"communication": "chunk"}, {"ownership": "sharded"}], ids=str)
@pytest.mark.parametrize("chunk", ["auto", 5_000])
def test_no_placement_changes_a_bit(ranks, num_ranks, keys, chunk, tmp_path):
    follows(ranks(num_ranks), keys | {"default_chunk_size": chunk}, Six, str(tmp_path), "50%")


# ---------------------------------------------------------------- checkpoints


def save(rank: int, num_ranks: int, folder: str) -> list[float]:
    """Saves after two steps; returns the losses of the steps after that."""
    model, optimizer = toy.build(Six, near_budget="min")
    toy.train(model, optimizer, 2, rank, num_ranks)
    model.save_checkpoint(f"{folder}/saved")
    model.export_weights(f"{folder}/weights.safetensors")
    return global_losses(toy.train(model, optimizer, 3, rank, num_ranks, first=2), num_ranks)


def resume(rank: int, num_ranks: int, folder: str, keys: dict) -> list[float]:
    torch.manual_seed(1)
    model, optimizer = toy.build(Six, **keys)
    toy.train(model, optimizer, 1, rank, num_ranks)    # other weights, some of them near
    model.load_checkpoint(f"{folder}/saved")
    assert_clean(model)
    return global_losses(toy.train(model, optimizer, 3, rank, num_ranks, first=2), num_ranks)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[str, list[float]]:
    folder = str(tmp_path_factory.mktemp("frozen"))
    return folder, ranks(2).run(save, folder)[0]


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("keys", [{"default_chunk_size": 3_000}, {"ownership": "sharded", "near_budget": "min"}], ids=str)
def test_a_run_resumes_at_another_number_of_ranks_and_chunk_size(ranks, saved, num_ranks, keys):
    folder, losses = saved
    got = ranks(num_ranks).run(resume, folder, keys)[0]
    assert got == losses if num_ranks == 2 else got == pytest.approx(losses, rel=1e-6)


def test_the_exported_weights_hold_the_frozen_ones_too(saved):
    weights = load_file(f"{saved[0]}/weights.safetensors")
    torch.manual_seed(0)
    plain = Six()
    assert weights.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(weights[name], param) for name, param in plain.named_parameters() if not param.requires_grad)
    model, _ = toy.build(Six, near_budget="min", default_chunk_size=3_000)
    model.import_weights(f"{saved[0]}/weights.safetensors")
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


class Frozen(toy.Toy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


@pytest.mark.parametrize("first, then", [(toy.Toy, Frozen), (Frozen, toy.Toy)], ids=["frozen later", "thawed"])
def test_a_checkpoint_resumes_with_another_set_of_frozen_parameters(first, then, tmp_path):
    """As a plain loop whose optimizer begins with the states of the parameters that it trained before."""
    model, optimizer = toy.build(first, near_budget="min")
    toy.train(model, optimizer, 2)
    model.save_checkpoint(tmp_path / "saved")
    weights, moments = model.gather_state()
    model, optimizer = toy.build(then, near_budget="min")
    model.load_checkpoint(tmp_path / "saved")
    found, states = model.gather_state()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert all(torch.equal(states[name], moments[name]) for name in states.keys() & moments.keys())
    assert all(not states[name].any() for name in states.keys() - moments.keys())
    assert toy.train(model, optimizer, 2, first=2)[0] == toy.train(*resumed(then, weights), 1, first=2)[0]


def resumed(model_func, weights: dict[str, torch.Tensor]):
    model, optimizer = toy.build(model_func)
    model.load_state(weights)
    return model, optimizer
