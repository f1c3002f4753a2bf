"""Ownership node: the ranks of each node share all chunks. The bits are those of sharded chunks on the same nodes, because
both add up node by node; the bytes between nodes are those of gradients alone."""

from __future__ import annotations

import platform
from pathlib import Path
from unittest import mock

import pytest
import torch

import pstar
from pstar.checkpoint.state import read_piece
from pstar.comm import shared_memory
from pstar.comm.replicas import Replicas
from pstar.layout.nodes import sent_by_replicas
from tests import toy
from tests.pstar.checkpoint.test_checkpoint_ranks import mean, resume, save
from tests.pstar.test_engine_ranks import STEPS, assert_follows, case

EIGHT_BITS = {"optimizer": {"type": "AdamW", "params": {"lr": toy.LR, "state_bits": 8}}}
SETTINGS = {
    "little room": {"near_budget": "min"},
    "some room": {"near_budget": "60%", "gradient_accumulation_steps": 3},
    "fp16, 8-bit states": {"fp16": {"enabled": True, "initial_scale_power": 9}} | EIGHT_BITS,
    "bf16, late": {"bf16": {"enabled": True}, "find_unused_parameters": True, "near_budget": "100%"},
    "early": {"near_budget": "min", "speculative_update": True, "gradient_clipping": 0.5},
    "disk": {"near_budget": "min", "far_budget": "40%"},
}
SHARDED, NODE = {"ownership": "sharded"}, {"ownership": "node"}


@pytest.fixture(autouse=True)
def memory():
    if not shared_memory.available():
        pytest.skip("no shared memory with ordered writes on this machine")


def on_two_nodes(rank: int, num_ranks: int, call, *args):
    with mock.patch.object(platform, "node", lambda: "ab"[rank // 2]):
        return call(rank, num_ranks, *args)


def train_case(rank: int, num_ranks: int, settings: list[dict], folder: str):
    """For each of the settings: (losses, norm, gathered weights and moments, the pieces of this rank, bytes)."""
    found = []
    for number, keys in enumerate(settings):
        if "far_budget" in keys:
            keys = keys | {"disk_path": str(Path(folder, str(number)))}
            Path(folder, str(number)).mkdir(exist_ok=True)
        model, optimizer = toy.build(default_chunk_size=5_000, **keys)
        losses = toy.train(model, optimizer, 3, rank, num_ranks, keys.get("gradient_accumulation_steps", 1))
        pieces = [read_piece(optimizer, "param", group.index) for group in model.layout.groups]
        model.export_weights(str(Path(folder, f"weights{number}")))
        found.append((losses, optimizer.grad_norm, *model.gather_state(), pieces, model.layout.elems_per_rank))
    return found


def test_the_bits_are_those_of_sharded_chunks_and_all_replicas_are_equal(ranks, tmp_path: Path) -> None:
    sharded, replicas = tmp_path / "sharded", tmp_path / "node"
    for folder in (sharded, replicas):
        folder.mkdir()
    expected, found = (ranks(4).run(on_two_nodes, train_case, [keys | own for keys in SETTINGS.values()], str(folder))
                       for own, folder in ((SHARDED, sharded), (NODE, replicas)))
    for number, name in enumerate(SETTINGS):
        for theirs, ours in zip((each[number] for each in expected), (each[number] for each in found), strict=True):
            assert ours[:2] == theirs[:2], name
            for tensors, others in zip(ours[2:4], theirs[2:4], strict=True):
                assert tensors.keys() == others.keys(), name
                assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items()), name
            if "8-bit" not in name:    # a chunk that ranks share by whole blocks has more padding
                assert ours[5] == pytest.approx(2 * theirs[5], rel=0.1), "a rank has a half, not a fourth"
        for rank in (0, 1):
            pairs = zip(found[rank][number][4], found[rank + 2][number][4], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
        assert (sharded / f"weights{number}").read_bytes() == (replicas / f"weights{number}").read_bytes(), name


def test_only_gradients_cross_the_network(ranks) -> None:
    results = ranks(4).run(on_two_nodes, case, NODE | {"near_budget": "60%", "default_chunk_size": 5_000})
    assert_follows(results)
    reduced = sum(result["step_bytes"]["reduce"] for result in results) / 2
    between = sum(result["step_bytes"]["between nodes"] for result in results)
    formula = sent_by_replicas(2, reduced, results[0]["step_bytes"]["sum"])
    assert between == pytest.approx(2 * formula, rel=1e-3)


def test_it_is_the_same_over_process_groups(ranks) -> None:
    """As with NCCL; the order of gloo's sums is another one."""
    keys = NODE | {"near_budget": "60%", "default_chunk_size": 5_000}
    with_memory, without = (ranks(4).run(on_two_nodes, call, keys) for call in (case, without_memory_case))
    assert_follows(without)
    for ours, theirs in zip(without, with_memory, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert {kind: ours["step_bytes"][kind] for kind in ("gather", "reduce")} == {
            kind: theirs["step_bytes"][kind] for kind in ("gather", "reduce")}


def without_memory_case(rank: int, num_ranks: int, keys: dict):
    with mock.patch.object(shared_memory, "available", lambda: False):
        return case(rank, num_ranks, keys)


@pytest.mark.parametrize("first, then", [(NODE, SHARDED), ({}, NODE), (NODE, NODE)], ids=str)
def test_a_checkpoint_goes_on_under_another_ownership(ranks, tmp_path: Path, first: dict, then: dict) -> None:
    path, chunk = str(tmp_path / "checkpoint"), {"default_chunk_size": 5_000, "near_budget": "60%"}
    through = ranks(4).run(on_two_nodes, save, chunk | first, path)
    results = ranks(4).run(on_two_nodes, resume, chunk | then, path)
    assert mean(results) == mean(through)
    assert [result[1] for result in results] == [result[2] for result in through], "each rank's random state is back"
    alone = ranks(2).run(resume, {"default_chunk_size": 4_096}, path)
    assert mean(alone) == pytest.approx(mean(through), rel=1e-6)


def drifting_case(rank: int, num_ranks: int, mutated: bool):
    before = Replicas.reduce_scatter_mean
    if mutated:
        def inside_only(self, piece, flat):
            target = [flat.view(len(self.nodes[0]), -1).unbind(0)]
            return self._begin(self._reductions, iter([self._reductions.memory.reduce_scatter_rows(
                piece.view(1, -1), target, 2)]))
        Replicas.reduce_scatter_mean = inside_only
    try:
        model, optimizer = toy.build(default_chunk_size=5_000, **NODE)
        toy.train(model, optimizer, STEPS, rank, num_ranks)
        return [read_piece(optimizer, "param", group.index).double().sum().item() for group in model.layout.groups]
    finally:
        Replicas.reduce_scatter_mean = before


@pytest.mark.parametrize("mutated", [False, True])
def test_without_the_sum_between_nodes_the_replicas_drift_apart(ranks, mutated: bool) -> None:
    found = ranks(4).run(on_two_nodes, drifting_case, mutated)
    assert (found[:2] == found[2:]) is not mutated


def seeds_case(rank: int, num_ranks: int) -> str:
    torch.manual_seed(rank // 2)
    with pytest.raises(pstar.ConfigError) as caught:
        pstar.initialize_engine(toy.Toy, 0, toy.config(**NODE))
    return str(caught.value)


def test_nodes_that_would_draw_other_initial_values_are_refused(ranks) -> None:
    """Each node makes all chunks itself, and afterwards only gradients cross the network."""
    for message in ranks(4).run(on_two_nodes, seeds_case):
        assert "the state of torch's random generator is" in message and "on rank 2: call torch.manual_seed with" in message
