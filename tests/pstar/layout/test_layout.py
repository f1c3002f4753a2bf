"""Layouts and budgets are numbers: checked without a tensor."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar.errors import ConfigError
from pstar.layout.budget import (
    Costs,
    default_near_bytes,
    groups_with_near_states,
    model_data_bytes,
    smallest_near_budget,
)
from pstar.layout.layout import ALIGN_ELEMS, ModuleSpec, align, candidate_layouts, least_waste, make_layout


def gpt2(layers: int, width: int, vocab: int = 50257, context: int = 1024) -> list[ModuleSpec]:
    """The modules of GPT-2 with a tied head."""
    modules = [ModuleSpec("wte", (("wte", vocab * width),)), ModuleSpec("wpe", (("wpe", context * width),))]
    for layer in range(layers):
        for name, *sizes in (("ln_1", width, width), ("c_attn", 3 * width**2, 3 * width), ("attn.c_proj", width**2, width),
                             ("ln_2", width, width), ("c_fc", 4 * width**2, 4 * width), ("mlp.c_proj", 4 * width**2, width)):
            name = f"h.{layer}.{name}"
            modules.append(ModuleSpec(name, tuple((f"{name}.{index}", size) for index, size in enumerate(sizes))))
    return [*modules, ModuleSpec("ln_f", (("ln_f.0", width), ("ln_f.1", width)))]


@pytest.mark.parametrize("layers, width, mega, chunks, utilisation", [
    (12, 768, 64, 2, 0.927), (24, 1024, 64, 6, 0.881), (36, 1280, 64, 12, 0.961), (48, 1600, 128, 12, 0.967)])
def test_the_published_packings_of_gpt2(layers, width, mega, chunks, utilisation):
    layout = make_layout(gpt2(layers, width), mega * 2**20)
    assert sum(group.num_ranks for group in layout.groups) == chunks
    assert round(layout.utilisation, 3) == utilisation


@pytest.mark.parametrize("layers, width", [(12, 768), (24, 1024), (36, 1280), (48, 1600)])
def test_the_searched_chunk_size_wastes_at_most_one_per_cent(layers, width):
    modules = gpt2(layers, width)
    best = least_waste(candidate_layouts(modules, max_elems=128 * 2**20)).chunk_elems
    assert make_layout(modules, best).utilisation >= 0.99
    assert best <= 128 * 2**20


modules_strategy = st.lists(st.lists(st.integers(1, 3000), max_size=4), min_size=1, max_size=12).filter(
    lambda sizes: any(sizes)
).map(lambda sizes: [ModuleSpec(f"m{i}", tuple((f"m{i}.{j}", n) for j, n in enumerate(own))) for i, own in enumerate(sizes)])


@settings(max_examples=200, deadline=None)
@given(modules_strategy, st.integers(1, 5000), st.integers(1, 5), st.sampled_from(["whole", "sharded"]))
def test_every_element_has_one_place_and_one_owner(modules, chunk, num_ranks, ownership):
    layout = make_layout(modules, chunk, num_ranks, ownership)
    sizes = {name: numel for module in modules for name, numel in module.parameters}
    assert {name: slot.numel for name, slot in layout.slots.items()} == sizes
    for group in layout.groups:
        assert group.num_ranks == num_ranks
        if ownership == "sharded" and all(align(slot.numel) <= layout.chunk_elems for slot in group.slots):
            assert group.elems < layout.chunk_elems + num_ranks * ALIGN_ELEMS, "one chunk, not p, is gathered at once"
        end = 0
        for slot in sorted(group.slots, key=lambda slot: slot.offset):
            assert slot.offset >= end and slot.offset % ALIGN_ELEMS == 0
            end = slot.offset + slot.numel
        assert end <= group.elems
        spans = [span for rank in range(num_ranks) for span in group.spans(rank)]
        for slot in group.slots:
            own = sorted((span.param_offset, span.numel) for span in spans if span.name == slot.name)
            assert sum(numel for _, numel in own) == slot.numel
            if align(slot.numel) <= layout.chunk_elems and ownership == "whole":
                assert len(own) == 1, "a parameter that fits into a chunk has one owner"


def test_a_module_is_not_split_while_it_fits_into_a_chunk():
    layout = make_layout([ModuleSpec("a", (("a.w", 700),)), ModuleSpec("b", (("b.w", 320), ("b.b", 32)))], 1024)
    assert [slot.group for slot in layout.slots.values()] == [0, 1, 1]


def test_a_parameter_larger_than_a_chunk_is_cut_into_equal_pieces():
    layout = make_layout([ModuleSpec("a", (("a.w", 1000),)), ModuleSpec("b", (("b.w", 64),))], 128, num_ranks=4)
    assert layout.groups[0].piece_elems == 256 and len(layout.groups[0].slots) == 1
    assert [span.numel for rank in range(4) for span in layout.groups[0].spans(rank)] == [256, 256, 256, 232]


def test_bytes_a_parameter():
    layout = make_layout(gpt2(2, 64, 1000, 64), 100_000, 2)
    assert model_data_bytes(layout, Costs(4, 4, 8)) == 16 * layout.total_elems
    assert model_data_bytes(layout, Costs(2, 2, 10)) == 14 * layout.total_elems


def test_the_smallest_budget_names_the_module_and_counts_the_modules_around_it():
    modules = [ModuleSpec("", (("scale", 32),)), ModuleSpec("a", (("a.w", 1024),)), ModuleSpec("b", (("b.w", 64),))]
    layout = make_layout(modules, 1024)
    uses = {module.name: tuple(name for name, _ in module.parameters) for module in modules}
    need, name = smallest_near_budget(layout, uses, Costs(4, 4, 8))
    # a.w fills a chunk of its own; scale, a parameter of the module around it, is in use too, in another chunk
    assert name == "a"
    assert need == 4 * (layout.groups[0].elems + layout.groups[1].elems) + 4 * 1024


def test_with_all_model_data_as_budget_every_group_is_updated_near():
    for num_ranks in (1, 2, 4):
        layout = make_layout(gpt2(2, 64, 1000, 64), 40_000, num_ranks)
        near = groups_with_near_states(layout, 16 * layout.total_elems, Costs(4, 4, 8))
        assert near == list(range(len(layout.groups)))
        assert groups_with_near_states(layout, 4 * layout.total_elems, Costs(4, 4, 8)) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(20, 110), st.booleans(), st.sampled_from([Costs(4, 4, 8), Costs(2, 2, 10), Costs(2, 4, 10)]))
def test_the_margin_holds_states_next_to_all_parameters_and_the_gradients_of_that_moment(percent, grads_wait, costs):
    """And it holds no fewer of them than next to all gradients."""
    layout = make_layout(gpt2(4, 64, 1000, 64), 20_000)
    near = layout.total_elems * costs.total * percent // 100
    groups = [layout.groups[index] for index in groups_with_near_states(layout, near, costs, grads_wait=grads_wait)]
    left = near - costs.param * layout.total_elems
    states = sum(costs.state_bytes(group) for group in groups)
    others = sorted(costs.grad * group.elems for group in layout.trained if group not in groups)
    at_once = sum(others) if grads_wait else sum(others[-2:])
    if groups:
        assert states + sum(costs.grad * group.elems for group in groups) + at_once <= left
    all_gradients = costs.grad * layout.trained_elems
    room, fewest = left - all_gradients, 0
    for group in layout.trained:
        if costs.state_bytes(group) <= room:
            room, fewest = room - costs.state_bytes(group), fewest + 1
    assert len(groups) == fewest if grads_wait else len(groups) >= fewest
    assert len(groups) == len(layout.groups) if percent >= 100 else True


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_size_that_cannot_be(chunk):
    with pytest.raises(ConfigError, match="chunk size"):
        make_layout([ModuleSpec("a", (("a.w", 1),))], chunk)


def test_a_model_without_parameters():
    for function in (lambda: make_layout([ModuleSpec("a", ())], 8), lambda: candidate_layouts([ModuleSpec("a", ())])):
        with pytest.raises(ConfigError, match="no parameters"):
            function()


def test_the_search_allocates_nothing_and_ends_soon():
    start = time.process_time()
    least_waste(candidate_layouts(gpt2(48, 1600), 8, 128 * 2**20))
    assert time.process_time() - start < 30, "a search that makes no tensor takes a second or so, not half a minute"


@settings(max_examples=100, deadline=None)
@given(modules_strategy, st.integers(1, 5000), st.integers(1, 5), st.sampled_from(["whole", "sharded"]))
def test_units_hold_every_parameter_once_and_chunks_lie_in_their_owners_piece(modules, chunk, num_ranks, ownership):
    layout = make_layout(modules, chunk, num_ranks, ownership)
    assert [unit.slots for unit in layout.units()] == [group.slots for group in layout.groups]
    units = layout.units("chunk")
    assert [unit.index for unit in units] == list(range(len(units)))
    names = [slot.name for unit in units for slot in unit.slots]
    assert sorted(names) == sorted(layout.slots)
    for unit in [*units, *layout.units()]:
        inside = [(slot.offset, slot.offset + slot.numel) for slot in unit.slots]
        parts = sorted([*inside, *((gap.start, gap.stop) for gap in unit.gaps)])
        assert [0, *(end for _, end in parts)] == [*(begin for begin, _ in parts), unit.elems]
    for unit in units:
        group = layout.groups[unit.group]
        if unit.owner is None:
            assert unit.elems == group.elems and unit.slots == group.slots
            continue
        spans = {span.name: span for span in group.spans(unit.owner)}
        assert unit.elems == group.piece_elems and num_ranks > 1
        for slot in unit.slots:
            assert (spans[slot.name].piece_offset, spans[slot.name].numel) == (slot.offset, slot.numel)
    modules_of = {module.name: tuple(name for name, _ in module.parameters) for module in modules}
    least = {mode: smallest_near_budget(layout, modules_of, Costs(4, 4, 8), mode)[0] for mode in ("group", "chunk")}
    assert least["chunk"] <= least["group"]


def test_the_near_budget_of_gpus_is_a_share_of_what_the_fullest_one_has_free():
    """Ranks with other budgets would evict other chunks, and then gather other ones."""
    assert default_near_bytes([139 * 2**30]) == int(0.4 * 139 * 2**30)
    assert default_near_bytes([80 * 2**30, 10 * 2**30, 80 * 2**30]) == 4 * 2**30
