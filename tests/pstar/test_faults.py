"""The faults of the published PatrickStar, each with the test that keeps it out; and those tests that have no other home."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

from pstar.layout.layout import ModuleSpec, make_layout
from tests import toy

ROOT = Path(__file__).parents[2]
ENGINE, TIERS, HERE = "tests/pstar/test_engine.py", "tests/pstar/memory/test_tiers.py", "tests/pstar/test_faults.py"
PRECISION, RANKS, LAST = "tests/pstar/numerics/test_precision.py", "tests/pstar/test_engine_ranks.py", (
    "tests/pstar/test_faults_ranks.py")

# What was wrong -> (file, test).
FAULTS = {
    "an uninitialised default configuration crashes": (ENGINE, "test_fault_the_default_configuration_works"),
    "the clip threshold is multiplied by the loss scale": (PRECISION, "test_fault_the_clip_threshold_is_not_scaled"),
    "... and again at every parameter": (ENGINE, "test_fault_clip_threshold_does_not_drift_from_parameter_to_parameter"),
    "the payload cache hands out a buffer of the wrong size": (
        TIERS, "test_fault_cache_hands_out_a_buffer_of_the_wrong_size"),
    "room-making reports failure when there is room": (TIERS, "test_fault_room_making_fails_although_there_is_room"),
    "refilling a gap breaks the offset order": (HERE, "test_fault_slots_are_in_the_order_of_their_offsets"),
    "accesses are traced under one name and looked up under another": (
        HERE, "test_fault_whatever_may_leave_is_found_in_the_trace"),
    "hysteresis is used as the scale factor": (PRECISION, "test_fault_hysteresis_is_a_count_and_not_the_factor"),
    "an unused parameter is read as its own gradient": (
        ENGINE, "test_fault_an_unused_and_a_frozen_parameter_keep_their_values"),
    "a frozen chunk is overwritten by zero gradients": (
        ENGINE, "test_fault_an_unused_and_a_frozen_parameter_keep_their_values"),
    "an infinity born in the cross-rank sum is not noticed": (
        LAST, "test_fault_an_infinity_born_in_the_sum_over_ranks_is_noticed"),
    "... where a mean need not overflow at all": (
        RANKS, "test_fault_a_mean_overflows_where_it_is_summed_before_it_is_divided"),
    "a monitor thread samples device 0 on every rank": (HERE, "test_fault_no_thread_watches_a_device_that_is_not_ours"),
    "p squared chunk buffers are reserved in backward": (LAST, "test_fault_backward_holds_p_chunks_and_not_p_squared"),
    "shape mismatches on load are collected and never raised": (
        ENGINE, "test_fault_shape_mismatches_on_load_are_raised_all_at_once"),
    "saving moves chunks": (HERE, "test_fault_saving_moves_no_chunk"),
    "learning-rate schedulers are ignored": (ENGINE, "test_fault_learning_rate_schedulers_are_obeyed"),
    "a test harness in which a failing child process passes": (
        "tests/harness/test_harness.py", "test_a_raising_rank_fails_with_its_traceback"),
}


@pytest.mark.parametrize("file, name", FAULTS.values(), ids=FAULTS)
def test_every_fault_has_its_test(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"


def test_every_test_of_a_fault_is_in_the_table() -> None:
    listed = {name for _, name in FAULTS.values()}
    for path in (ROOT / "tests/pstar").rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_fault_"):
                assert node.name in listed, f"{path.name}: {node.name}"


def test_fault_slots_are_in_the_order_of_their_offsets() -> None:
    """A small parameter after a large one must not go back into the gap that the large one left."""
    sizes = [60, 70, 20, 90, 10, 40, 200, 5, 30]
    modules = [ModuleSpec(f"m{number}", ((f"p{number}", 32 * size),)) for number, size in enumerate(sizes)]
    for ownership in ("whole", "sharded"):
        for num_ranks in (1, 3):
            layout = make_layout(modules, 32 * 100, num_ranks, ownership)
            for group in layout.groups:
                ends = [(slot.offset, slot.offset + slot.numel) for slot in group.slots]
                assert ends == sorted(ends) and all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
            ordinary = [slot.name for group in layout.groups for slot in group.slots if slot.numel <= 32 * 100]
            assert ordinary == [f"p{number}" for number, size in enumerate(sizes) if size <= 100]


def test_fault_whatever_may_leave_is_found_in_the_trace() -> None:
    """A candidate that the trace does not know looks as if it were never needed again, and leaves first."""
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 1)
    seen, victim = set(), model.schedule.victim

    def watch(candidates):
        candidates = list(candidates)
        seen.update(candidate.key for candidate in candidates)
        return victim(candidates)

    model.schedule.victim = watch
    toy.train(model, optimizer, 2)
    assert {kind for kind, _ in seen} == {"param", "grad"}
    assert all(model.schedule.next_use(key) < float("inf") for key in seen)


def test_fault_no_thread_watches_a_device_that_is_not_ours() -> None:
    before = set(threading.enumerate())
    model, optimizer = toy.build(near_budget="min")
    toy.train(model, optimizer, 1)
    assert all(thread.name.startswith("pstar copy queue") for thread in set(threading.enumerate()) - before)
    asks = {"memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info", "memory_stats",
            "get_device_properties", "reset_peak_memory_stats", "max_memory_reserved"}
    for path in (ROOT / "pstar").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in asks:
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                assert given and ast.unparse(given[0]) != "0", f"{path.name}:{node.lineno} asks device 0, or whichever"


def test_fault_saving_moves_no_chunk() -> None:
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 2)

    def places() -> dict:
        return {key: {tier: data.data_ptr() for tier, data in block.copies.items()}
                for key, block in model._store.blocks.items()}

    where, moves = places(), dict(model.ledger.moves)
    weights, _ = model.gather_state()
    assert where == places() and moves == dict(model.ledger.moves)
    again, _ = model.gather_state()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
