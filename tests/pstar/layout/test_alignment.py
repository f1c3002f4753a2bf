"""Parameters begin at multiples of 512 bytes in chunks for a GPU, as separate tensors do; checkpoints do not depend on it.

The engine of these tests runs on the CPU with the alignment that it takes on a GPU. Not one bit may differ from the usual
one: on a CPU no kernel of this model looks at more than the alignment that both have.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar.layout.budget import Costs, auto_layouts
from pstar.layout.layout import (
    ALIGN_ELEMS,
    CODE_BLOCK,
    GPU_ALIGN_ELEMS,
    GPU_PACKING,
    GROUP_COST_ELEMS,
    HOST_PACKING,
    Layout,
    ModuleSpec,
    Packing,
    least_waste,
    make_layout,
)
from pstar.planner import plan
from tests import toy
from tests.pstar.layout.test_layout import gpt2, modules_strategy

BF16 = Costs(2, 2, 10)
CONFIGS = [
    {"near_budget": "min", "default_chunk_size": 5_000},
    {"near_budget": "30%", "optimizer": {"type": "AdamW", "params": {"state_bits": 8}}},
    {"default_chunk_size": 12_000, "gradient_accumulation_steps": 2},
]


@settings(max_examples=100, deadline=None)
@given(modules_strategy, st.integers(1, 5000), st.integers(1, 5), st.sampled_from(["whole", "sharded"]), st.booleans(),
       st.booleans())
def test_every_parameter_and_every_piece_begins_at_512_bytes(modules, chunk, num_ranks, ownership, blocks, in_codes) -> None:
    """In 16 bit; in fp32 at 1 KiB. With trained vectors, frozen matrices in codes and frozen vectors."""
    names = [name for module in modules for name, _ in module.parameters]
    frozen, matrices = frozenset(names[::2]) if in_codes else frozenset(), frozenset(names[::3])
    specs = [ModuleSpec(m.name, m.parameters, frozen & dict(m.parameters).keys(), matrices & dict(m.parameters).keys())
             for m in modules]
    layout = make_layout(specs, chunk, num_ranks, ownership, blocks, in_codes, GPU_ALIGN_ELEMS)
    assert {name: slot.numel for name, slot in layout.slots.items()} == {n: e for m in modules for n, e in m.parameters}
    for group in layout.groups:
        assert group.piece_elems * 2 % 512 == 0
        for slot in group.slots:
            assert slot.offset * 2 % 512 == 0 and slot.offset + slot.numel <= group.elems
        for rank in range(num_ranks):
            for span in group.spans(rank):
                assert span.param_offset % (CODE_BLOCK if group.coded else 1) == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("layers, width, vocab, context", [(4, 128, 3980, 128), (12, 768, 21128, 1024)])
def test_what_it_costs(layers, width, vocab, context, num_ranks) -> None:
    """tiny and small, padding and the cost of groups included: at most 0.3 % more, where a chunk has 18,000 elements."""
    cost = {}
    for align_elems in (ALIGN_ELEMS, GPU_ALIGN_ELEMS):
        modules = gpt2(layers, width, vocab, context)
        packing = Packing(align_elems)
        layout = least_waste(auto_layouts(modules, num_ranks, Costs(4, 4, 8), None, "whole", "group", packing))
        cost[align_elems] = layout.total_elems + GROUP_COST_ELEMS * len(layout.groups)
    assert cost[GPU_ALIGN_ELEMS] <= 1.003 * cost[ALIGN_ELEMS]


def chosen(layers: int, width: int, near: int, packing: Packing) -> Layout:
    layouts = auto_layouts(gpt2(layers, width, 21128), 1, BF16, near, "whole", "group", packing)
    return least_waste(layouts, group_cost_elems=packing.group_cost_elems)


@pytest.mark.parametrize("layers, width", [(12, 768), (24, 1024), (24, 1600), (48, 1600)])
def test_a_gpu_has_fewer_groups_for_a_little_padding(layers, width) -> None:
    """Python starts the copies and the update of each group; on an H200 that took longer than to compute its layers."""
    whole = BF16.total * sum(size for module in gpt2(layers, width, 21128) for _, size in module.parameters)
    host, gpu = (chosen(layers, width, whole // 4, packing) for packing in (HOST_PACKING, GPU_PACKING))
    assert len(gpu.groups) < 0.45 * len(host.groups) and gpu.utilisation > 0.95
    assert BF16.param * gpu.chunk_elems * GPU_PACKING.near_groups <= whole // 4


def test_a_model_of_some_billions_pays_no_padding_for_it() -> None:
    host, gpu = (chosen(36, 4096, 20 * 2**30, packing) for packing in (HOST_PACKING, GPU_PACKING))
    assert gpu.total_elems < 1.002 * host.total_elems


@pytest.fixture(params=CONFIGS, ids=str)
def wide(request, monkeypatch: pytest.MonkeyPatch):
    """A function that builds the engine, True: as it is on a GPU."""
    def build(aligned: bool):
        monkeypatch.setattr(plan, "HOST_PACKING", GPU_PACKING if aligned else HOST_PACKING)
        return toy.build(toy.Untied, **request.param)

    micros = request.param.get("gradient_accumulation_steps", 1)
    return build, lambda model, optimizer, steps: toy.train(model, optimizer, steps, num_micros=micros)


def test_losses_and_checkpoints_are_those_of_the_usual_alignment(wide, tmp_path) -> None:
    """A checkpoint of either is read by the other: one that was written before goes on on a GPU."""
    build, train = wide
    runs, losses = [build(False), build(True)], []
    for aligned, (model, optimizer) in enumerate(runs):
        losses.append(train(model, optimizer, 2))
        model.save_checkpoint(tmp_path / str(aligned))
    offsets = [{name: slot.offset for name, slot in model.layout.slots.items()} for model, _ in runs]
    assert losses[0] == losses[1] and offsets[0] != offsets[1], "biases of 48 elements begin elsewhere"
    ahead = [train(model, optimizer, 2) for model, optimizer in runs]
    assert ahead[0] == ahead[1] != losses[0]
    for aligned in (False, True):
        model, optimizer = build(aligned)
        model.load_checkpoint(tmp_path / str(int(not aligned)))
        assert train(model, optimizer, 2) == ahead[0]


def test_parameters_in_use_have_the_addresses_of_separate_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "HOST_PACKING", GPU_PACKING)
    model, _ = toy.build(toy.Untied, near_budget="50%", default_chunk_size=12_000, bf16={"enabled": True})
    offsets = []

    def look(module: torch.nn.Module, *_: object) -> None:
        for param in module.parameters(recurse=False):
            offsets.append(param.data_ptr() - param.untyped_storage().data_ptr())

    for child in model.module.modules():
        child.register_forward_pre_hook(look)
    model(*toy.batch(0))
    assert len(set(offsets)) > 1 and all(offset % 512 == 0 for offset in offsets)
