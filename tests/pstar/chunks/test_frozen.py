"""Frozen parameters in chunks of their own: they cost their bytes, are always clean, and change no trained number.

In fp32 all comparisons are of bits, with a plain torch loop that has the same frozen parameters: both compute the same
operations on the same values. In 16 bit placements are compared with each other, bit for bit.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pstar
from pstar.layout.layout import GROUP_COST_ELEMS, ModuleSpec, make_layout
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import DISK, FAR, NEAR
from pstar.numerics.precision import PARAM, Precision
from tests import toy

STEPS, WIDTH, RANK = 4, 64, 4
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}}}
FAR_UPDATES = {"type": "AdamW", "params": {"lr": toy.LR, "weight_decay": toy.WEIGHT_DECAY, "use_hybrid_adam": False}}


class Adapter(nn.Module):
    """A frozen layer plus the product of two small trained matrices."""

    def __init__(self, base: nn.Linear, rank: int = RANK):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """n square layers of one chunk each, frozen, with an adapter each, whose elements divide among four ranks."""

    def __init__(self, n: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(Adapter(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(n))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = F.one_hot(inputs % WIDTH, WIDTH).to(self.layers[0].down.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


class Six(toy.Toy):
    """The toy of six blocks with everything frozen, the tied table too, and adapters in all blocks."""

    def __init__(self) -> None:
        super().__init__(6)
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)


def loss_of(model, step: int) -> torch.Tensor:
    return model(*toy.batch(step))


def numels(model: nn.Module) -> tuple[int, int]:
    """(elements of frozen parameters, elements of trained ones)."""
    counts = Counter()
    for param in model.parameters():
        counts[param.requires_grad] += param.numel()
    return counts[False], counts[True]


def frozen_keys(model: pstar.Engine) -> set[tuple[str, int]]:
    return {("param", group.index) for group in model.layout.frozen}


def assert_clean(model: pstar.Engine) -> None:
    """Frozen groups have parameters only, of which far or disk has a copy."""
    frozen = {group.index for group in model.layout.frozen}
    blocks = {key: block for key, block in model._store.blocks.items() if key[1] in frozen and key[0] != "gathered"}
    assert set(blocks) == frozen_keys(model)
    assert all({FAR, DISK} & block.copies.keys() for block in blocks.values())


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    return toy.plain_run(Six, loss_of, STEPS)


@pytest.fixture
def copies(monkeypatch) -> list[tuple[tuple[str, int], str]]:
    """(block, tier to which it was copied) of each copy between tiers that any store makes."""
    found, begin = [], BlockStore._begin

    def spy(self, block, tier, *args, **keys):
        found.append((block.key, tier))
        return begin(self, block, tier, *args, **keys)

    monkeypatch.setattr(BlockStore, "_begin", spy)
    return found


def trains_like(losses: list[float], weights: dict[str, torch.Tensor], copies: list, **keys) -> None:
    """Trains the six-layer model. Losses and weights are the given ones bit for bit, frozen blocks move only to near or,
    once, to disk, and every tier keeps its budget. copies: the fixture."""
    model, optimizer = toy.build(Six, **keys)
    copies.clear()    # the start fills the chunks
    assert toy.train(model, optimizer, STEPS) == losses
    there = Counter(copy for copy in copies if copy[0] in frozen_keys(model))
    assert_clean(model)
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert "disk_path" in keys or not any(tier == FAR for _, tier in there), "no frozen block is copied out of near"
    assert all(count == 1 for (_, tier), count in there.items() if tier == DISK), "to disk once in the whole run"
    for tier in (model.near, model.far, model.disk):
        assert tier is None or tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_parameters_cost_exactly_their_bytes(precision):
    model, optimizer = toy.build(Adapted, near_budget="min", default_chunk_size=WIDTH**2, **PRECISIONS[precision])
    frozen, trained = numels(model)
    size, states = model.costs.param, model.costs.states
    assert frozen == 8 * WIDTH**2 and trained == 8 * 2 * RANK * WIDTH
    assert model.model_data_bytes == size * frozen + (size + states) * trained == model.far.used_bytes
    toy.train(model, optimizer, STEPS)
    assert model.far.used_bytes == size * frozen + (size + states) * trained    # between steps no gradient is left
    assert model.far.peak_bytes == size * frozen + model.costs.total * trained
    assert_clean(model)


def test_the_six_layer_model_needs_far_what_the_formula_says():
    """4 bytes of a frozen element and 16 of a trained one; before frozen chunks it was 12 of each and the gradients."""
    model, optimizer = toy.build(Six, near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, STEPS)
    frozen, trained = (sum(group.elems for group in part) for part in (model.layout.frozen, model.layout.trained))
    assert numels(model) == (122_832, 11_520) and trained == 11_520 and frozen < 1.03 * 122_832    # padding of 5,000
    assert model.far.peak_bytes == 4 * frozen + 16 * trained
    assert model.far.used_bytes == 4 * frozen + 12 * trained < 0.4 * 12 * (122_832 + 11_520)
    rows = dict(model.memory_table())
    assert "16 bytes a trained parameter" in rows["model data"]
    assert rows["frozen"].startswith(f"{4 * frozen / 1024:.4g} KiB of it, 4 bytes a parameter")
    assert rows["Adam"] == f"0 groups updated near, {len(model.layout.trained)} far"


def test_chunks_of_trained_parameters_shrink_and_never_grow():
    """At most the given size; about four groups where their starts cost less than that brings."""
    base, adapters = 40 * GROUP_COST_ELEMS, 10 * GROUP_COST_ELEMS
    modules = [ModuleSpec(f"{kind}{number}", ((f"{kind}{number}", size // 40),), frozenset({f"base{number}"}))
               for number in range(40) for kind, size in (("base", base), ("adapter", adapters))]
    for num_ranks, ownership in itertools.product((1, 2, 4), ("whole", "sharded")):
        layout = make_layout(modules, base, num_ranks, ownership)
        assert [group.index for group in layout.groups] == list(range(len(layout.groups)))
        assert layout.groups == layout.trained + layout.frozen and layout.num_params == base + adapters
        short = (num_ranks, ownership) == (4, "whole")    # a 16th is less than a group's cost: ten chunks of four adapters
        assert len(layout.trained) == (3 if short else 4)
        assert layout.trained_elems == (1.2 if short else 1) * adapters
        small = make_layout(modules, 1_000, num_ranks, ownership)
        assert max(group.piece_elems for group in small.trained) <= max(1_024, adapters // 40)


def test_a_model_without_frozen_parameters_has_the_layout_that_it_had():
    """Chunks shrink for adapters only."""
    plan = pstar.plan_engine(toy.Toy, {"default_chunk_size": 5_000})
    assert {group.piece_elems for group in plan.layout.groups} == {5_024, 9_216, 10_144}    # two larger parameters
    assert plan.layout.trained == plan.layout.groups and not plan.layout.frozen


# ---------------------------------------------------------------- numbers


@pytest.mark.each
@pytest.mark.parametrize("near", ["min", "40%", "100%"])
@pytest.mark.parametrize("chunk", ["auto", 5_000])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("states", ["host", "stream"])
@pytest.mark.parametrize("far", [None, "40%"])
def test_what_is_trained_has_the_bits_of_a_plain_loop(near, chunk, prefetch, states, far, plain, tmp_path, copies):
    keys = {"disk_path": str(tmp_path), "far_budget": far} if far else {}
    keys |= {"near_budget": near, "default_chunk_size": chunk, "prefetch": prefetch, "far_states": states}
    trains_like(*plain, copies, **keys)


@pytest.mark.each
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("micros", [1, 2])
def test_in_16_bit_no_placement_changes_a_bit(precision, micros):
    keys = PRECISIONS[precision] | {"gradient_accumulation_steps": micros}
    found = []
    for near, chunk in (("min", "auto"), ("100%", "auto"), ("min", 5_000), ("60%", 9_000)):
        model, optimizer = toy.build(Six, near_budget=near, default_chunk_size=chunk, **keys)
        before = model.gather_state()[0]
        losses = toy.train(model, optimizer, STEPS, num_micros=micros)
        weights, moments = model.gather_state()
        trained = {name for name, param in model.module.named_parameters() if param.requires_grad}
        moved = {name for name in weights if not torch.equal(before[name], weights[name])}
        assert moved == trained == {name.removeprefix("exp_avg.") for name in moments if name.startswith("exp_avg.")}
        found.append((losses, weights))
    for (losses, weights), (others, more) in itertools.pairwise(found):
        assert losses == others and all(torch.equal(weights[name], more[name]) for name in weights)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_values_are_rounded_as_the_master_of_trained_ones(precision):
    """Values halfway between two of bf16 too: the split master rounds them away from zero, a cast to even."""
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-11, 0.3])
    stored = []
    for each in (Precision(precision), Precision(precision, frozen=True)):
        kinds = {PARAM: each.param_dtype, **each.states}
        buffers = {kind: torch.zeros(5, dtype=dtype) for kind, dtype in kinds.items()}
        each.write_master(halfway, buffers)
        stored.append(buffers[PARAM])
    assert list(buffers) == [PARAM] and each.state_bytes == 0
    assert torch.equal(*stored) and torch.equal(each.read_master(buffers), stored[0].float())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_frozen_parameter_is_stored_as_a_trained_one_computes(precision):
    """The first loss is that of the model with nothing frozen: freezing changes no rounding."""
    def thawed() -> nn.Module:
        return Six().requires_grad_(True)

    losses = [toy.train(*toy.build(func, near_budget="min", **PRECISIONS[precision]), 1) for func in (Six, thawed)]
    assert losses[0] == losses[1]


def test_a_lazy_start_makes_the_weights_of_a_plain_one():
    torch.manual_seed(0)
    plain = Six()
    model, _ = toy.build(Six, near_budget="min")
    weights, _ = model.gather_state()
    assert all(torch.equal(weights[name], param) for name, param in plain.named_parameters())


# ---------------------------------------------------------------- when they travel


class Chain(nn.Module):
    """A trained vector, then n frozen layers of one chunk each: every layer's input needs a gradient."""

    def __init__(self, n: int = 8, at: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n))
        self.requires_grad_(False)
        self.scale, self.at = nn.LayerNorm(WIDTH), at

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = F.one_hot(inputs % WIDTH, WIDTH).float()
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(self.scale(x) if number == self.at else x))
        return x.square().mean()


@pytest.mark.each
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("policy", ["next_use", "lru"])
@pytest.mark.parametrize("n, room", [(8, 3), (8, 5), (8, 7), (12, 4), (8, 8)])
def test_loads_of_a_step_equal_the_maths(n, room, prefetch, policy, copies):
    """2 (n - C) loads of n clean chunks in room for C, and none of their bytes back. Near has room for the trained vectors
    and their gradients beside the C chunks; only these gradients are copied to far."""
    trained = 4 * 2 * WIDTH
    model, optimizer = toy.build(lambda: Chain(n), near_budget=room * 4 * WIDTH**2 + 2 * trained, prefetch=prefetch,
                                 default_chunk_size=WIDTH**2, eviction_policy=policy, optimizer=FAR_UPDATES)
    toy.train(model, optimizer, 3)
    copies.clear()
    toy.train(model, optimizer, 3, first=3)
    assert model.ledger.step_bytes["near to far"] == trained
    assert [tier for key, tier in copies if key in frozen_keys(model)] == [NEAR] * 3 * 2 * (n - room)
    assert model.ledger.step_bytes["far to near"] in [4 * WIDTH**2 * 2 * (n - room) + times * trained for times in (1, 2)]


@pytest.mark.parametrize("at", [0, 3, 7])
def test_backward_fetches_only_layers_through_which_a_gradient_flows(at):
    """Layers before the first trained parameter are used in forward only."""
    model, optimizer = toy.build(lambda: Chain(8, at), near_budget="min", default_chunk_size=WIDTH**2)
    toy.train(model, optimizer, 3)
    units = model._chunks.units
    uses = [len(model.schedule.trace.positions[units.place[f"layers.{number}.weight"][0].key]) for number in range(8)]
    assert uses[:at] == [1] * at and uses[at:7] == [2] * (7 - at)
    assert uses[7] == 1    # its forward and its backward are one moment, or the gradient ends before it
    assert model.schedule.num_traced == 1, "every step after the first follows the trace"


def test_a_frozen_embedding_and_a_frozen_table_that_is_the_head(copies):
    class Half(toy.Toy):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight.requires_grad_(False)    # the same Parameter as embed.weight: both are frozen

    model = toy.compare(Half, loss_of, STEPS, default_chunk_size=5_000)
    assert [slot.name for group in model.layout.frozen for slot in group.slots] == ["embed.weight"]
    assert_clean(model)
    assert {tier for key, tier in copies if key in frozen_keys(model)} == {NEAR}


def test_a_frozen_embedding_in_host_memory_has_no_states():
    class FrozenTables(toy.Untied):
        def __init__(self) -> None:
            super().__init__()
            self.tokens.requires_grad_(False)

    model = toy.compare(FrozenTables, loss_of, STEPS, use_cpu_embedding=True)
    tokens, places = toy.VOCAB * toy.WIDTH, toy.LENGTH * toy.WIDTH
    assert model._outside.num_bytes == 4 * tokens + 12 * places
    assert "exp_avg.tokens.weight" not in model.gather_state()[1]
    model.module.tokens.requires_grad_(True)
    with pytest.raises(pstar.StateError, match="tokens.weight was frozen when the engine started"):
        model(*toy.batch(0))


# ---------------------------------------------------------------- what a user may do


@pytest.mark.parametrize("near", ["min", "100%"])
def test_thawing_what_was_frozen_at_the_start_is_refused_in_one_line(near, plain):
    model, optimizer = toy.build(Six, near_budget=near)
    toy.train(model, optimizer, 2)
    model.module.blocks[1].norm.requires_grad_(True)
    with pytest.raises(pstar.StateError, match=r"^parameter blocks\.1\.norm\.bias was frozen .* after initialize_engine"):
        model(*toy.batch(2))
    model.module.blocks[1].norm.requires_grad_(False)
    assert toy.train(model, optimizer, STEPS - 2, first=2) == plain[0][2:], "the run goes on as if nothing had happened"


def test_thawing_in_the_middle_of_a_forward_is_refused_too():
    class Thaws(Adapted):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            self.layers[3].base.weight.requires_grad_(True)
            return super().forward(inputs)

    model, _ = toy.build(Thaws, near_budget="min")
    with pytest.raises(pstar.StateError, match="layers.3.base.weight was frozen"):
        model.backward(model(*toy.batch(0)))


def test_parameter_groups_may_leave_out_what_is_frozen(plain):
    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(
        Six, 0, toy.config(near_budget="min"),
        param_groups=lambda module: [{"params": [param for param in module.parameters() if param.requires_grad]}])
    assert toy.train(model, optimizer, STEPS) == plain[0]
    with pytest.raises(pstar.ConfigError, match=r"lacks 1 parameters \(blocks\.0\.up\.down\): list all that the model"):
        pstar.initialize_engine(Six, 0, {}, param_groups=lambda module: [
            {"params": [p for name, p in module.named_parameters() if p.requires_grad and name != "blocks.0.up.down"]}])


@pytest.mark.parametrize("near", ["min", "100%"])
def test_new_weights_reach_every_copy_of_a_frozen_block(near):
    model, optimizer = toy.build(Six, near_budget=near, default_chunk_size=5_000)
    toy.train(model, optimizer, 2)
    other, optimizer_2 = toy.build(lambda: Six(), near_budget="min")
    toy.train(other, optimizer_2, 1)
    weights, moments = other.gather_state()
    weights = {name: value + 0.25 if name == "embed.weight" else value for name, value in weights.items()}
    for engine in (model, other):
        engine.load_state(weights, moments)
    assert_clean(model)
    for key in frozen_keys(model):
        first, *others = model._store.blocks[key].copies.values()
        assert all(torch.equal(first, each) for each in others)
    assert toy.train(model, optimizer, 2) == toy.train(other, optimizer_2, 2)
    assert torch.equal(model.gather_state()[0]["embed.weight"], weights["embed.weight"])


def test_an_all_frozen_model_evaluates():
    model, _ = toy.build(lambda: toy.Toy().requires_grad_(False), near_budget="min")
    torch.manual_seed(0)
    plain = toy.Toy()
    with torch.no_grad():
        assert model.eval()(*toy.batch(0)).item() == plain(*toy.batch(0)).item()
    assert model.model_data_bytes == 4 * model.layout.total_elems == model.far.used_bytes
