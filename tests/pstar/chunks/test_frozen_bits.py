"""Frozen matrices in 8- and 4-bit codes: their bytes, the bytes on the link, and the numbers, which no placement changes.

The oracle is a plain torch loop whose frozen matrices were replaced by the values of their codes. In fp32 all comparisons
with it are of bits: both compute the same operations on the same values. In 16 bit the oracle is the engine without codes,
given these values.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import pstar
from pstar.kernels import CODE_BLOCK, BlockCodes
from pstar.layout.budget import model_data_bytes
from pstar.memory.tier import DISK, FAR, NEAR
from tests import toy
from tests.pstar.chunks.test_frozen import (
    FAR_UPDATES,
    PRECISIONS,
    STEPS,
    WIDTH,
    Adapted,
    Adapter,
    Chain,
    Six,
    assert_clean,
    copies,
    frozen_keys,
    loss_of,
    numels,
    trains_like,
)

assert copies  # a fixture
BITS = (8, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(model_func, bits: int, precision: str = "fp32"):
    """model_func whose frozen matrices have the values of their codes."""
    def make() -> torch.nn.Module:
        model = model_func()
        for param in model.parameters():
            if not param.requires_grad and param.dim() > 1:
                param.data = BlockCodes(bits).round(param.data, DTYPES[precision]).float()
        return model

    return make


def frozen_bytes(model: pstar.Engine) -> int:
    """By the formula: a matrix in rows of 2 + 8 * bits bytes, any other frozen parameter whole; of all chunks, padding
    included."""
    row, param = 2 + CODE_BLOCK * model.config.frozen_bits // 8, model.costs.param
    return sum(group.elems // CODE_BLOCK * row if group.coded else group.elems * param for group in model.layout.frozen)


@pytest.fixture(scope="module", params=BITS)
def plain(request) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """(bits, losses, weights) of the oracle."""
    return request.param, *toy.plain_run(rounded(Six, request.param), loss_of, STEPS)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_matrices_cost_exactly_the_bytes_of_their_codes(precision, bits):
    keys = PRECISIONS[precision] | {"frozen_bits": bits, "default_chunk_size": WIDTH**2}
    model, optimizer = toy.build(Adapted, near_budget="min", **keys)
    frozen, trained = numels(model)
    size, states, codes = model.costs.param, model.costs.states, frozen // 64 * {8: 66, 4: 34}[bits]
    assert model.model_data_bytes == codes + (size + states) * trained == model.far.used_bytes
    toy.train(model, optimizer, STEPS)
    assert model.far.used_bytes == codes + (size + states) * trained and codes == frozen_bytes(model)
    assert model.far.peak_bytes == codes + model.costs.total * trained
    assert model.near.peak_bytes <= model.near.budget_bytes == model._plan.least_near
    whole, _ = toy.build(Adapted, near_budget="min", **keys | {"frozen_bits": 32})
    assert model.near.budget_bytes == whole.near.budget_bytes, "codes need no room near"
    assert_clean(model)


def test_vectors_keep_their_bits_in_groups_of_their_own():
    torch.manual_seed(0)
    start = dict(Six().named_parameters())
    model, _ = toy.build(Six, near_budget="min", default_chunk_size=5_000, frozen_bits=4)
    weights, _ = model.gather_state()
    for group in model.layout.frozen:
        for slot in group.slots:
            value = start[slot.name]
            assert group.coded == (value.dim() == 2) and (slot.offset % CODE_BLOCK == 0 or not group.coded)
            assert torch.equal(weights[slot.name], BlockCodes(4).round(value, torch.float32) if group.coded else value)
    rows = dict(model.memory_table())
    assert "matrices in 4-bit codes except near (34 bytes for 64 weights), all else 4 bytes a parameter" in rows["frozen"]
    assert sum(not group.coded for group in model.layout.frozen) == 1, "few vectors, one group"


@pytest.mark.parametrize("bits", BITS)
def test_a_near_budget_means_the_same_bytes_with_codes_and_without(bits):
    """Near is whole. Far budgets are shares of what far holds, the codes."""
    def planned(near: int | str, each: int = bits, model_func=Adapted) -> pstar.planner.plan.Plan:
        return pstar.plan_engine(model_func, {"default_chunk_size": WIDTH**2, "near_budget": near, "far_budget": "100%",
                                              "frozen_bits": each})

    for share in ("60%", "100%"):
        assert planned(share).near_budget == planned(share, 32).near_budget
        assert planned(share).far_budget == model_data_bytes(planned(share).layout, planned(share).costs)
    whole = planned("100%").near_budget
    assert planned(whole).stays_near and not planned(whole - 1).stays_near
    assert not planned("60%", model_func=lambda: Adapted().requires_grad_(False)).stays_near, "no states, but whole weights"


@pytest.mark.each
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n, room", [(8, 3), (8, 5), (12, 4), (8, 8)])
def test_loads_and_bytes_of_a_step_equal_the_maths(n, room, prefetch, bits, copies):
    """2 (n - C) loads of codes, n clean chunks in room for C, and none of them back. Near has room for C whole chunks, the
    trained vectors and their gradients; only these gradients are copied to far."""
    trained = 4 * 2 * WIDTH
    model, optimizer = toy.build(lambda: Chain(n), near_budget=room * 4 * WIDTH**2 + 2 * trained, prefetch=prefetch,
                                 default_chunk_size=WIDTH**2, optimizer=FAR_UPDATES, frozen_bits=bits)
    toy.train(model, optimizer, 3)
    copies.clear()
    toy.train(model, optimizer, 3, first=3)
    assert [tier for key, tier in copies if key in frozen_keys(model)] == [NEAR] * 3 * 2 * (n - room)
    assert model.ledger.step_bytes["near to far"] == trained
    loaded = 2 * (n - room) * WIDTH**2 // 64 * {8: 66, 4: 34}[bits]
    assert model.ledger.step_bytes["far to near"] in [loaded + times * trained for times in (1, 2)]


class Wide(torch.nn.Module):
    """Six layers of width 256 with LoRA of rank 2, which is 1.5 % of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Adapter(torch.nn.Linear(256, 256, bias=False), 2) for _ in range(6))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.nn.functional.one_hot(inputs, 256).to(self.layers[0].down.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


@pytest.mark.parametrize("bits, most", [(8, 0.53), (4, 0.30)])
@pytest.mark.parametrize("hybrid", [True, False])
def test_the_link_carries_at_most_so_much_of_the_bytes_of_bf16(bits, most, hybrid):
    """Both directions together, the adapters and their gradients included: 0.266 and 0.516 for the codes alone."""
    optimizer = {"type": "AdamW", "params": {"use_hybrid_adam": hybrid}}
    moved = {}
    for each in (32, bits):
        model, adam = toy.build(Wide, near_budget="min", default_chunk_size=256**2, frozen_bits=each,
                                bf16={"enabled": True}, optimizer=optimizer)
        toy.train(model, adam, 3)
        moved[each] = sum(model.ledger.step_bytes[way] for way in ("far to near", "near to far"))
    assert 0 < moved[bits] <= most * moved[32]


# ---------------------------------------------------------------- numbers


@pytest.mark.each
@pytest.mark.parametrize("near", ["min", "40%", "100%"])
@pytest.mark.parametrize("chunk", ["auto", 5_000])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("states", ["host", "stream"])
@pytest.mark.parametrize("far", [None, "70%"])
def test_every_placement_has_the_bits_of_a_plain_loop_with_the_codes_values(near, chunk, prefetch, states, far, plain,
                                                                            tmp_path, copies):
    bits, losses, weights = plain
    keys = {"disk_path": str(tmp_path), "far_budget": far} if far else {}
    keys |= {"near_budget": near, "default_chunk_size": chunk, "prefetch": prefetch, "far_states": states}
    trains_like(losses, weights, copies, frozen_bits=bits, **keys)


@pytest.mark.each
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("near, chunk", [("min", "auto"), ("100%", 5_000), ("60%", 9_000)])
def test_in_16_bit_it_is_the_engine_without_codes_on_the_codes_values(precision, bits, near, chunk):
    runs = []
    for model_func, each in ((Six, bits), (rounded(Six, bits, precision), 32)):
        with warnings.catch_warnings():    # the rounded model cannot start without memory
            warnings.simplefilter("ignore")
            model, optimizer = toy.build(model_func, near_budget=near, default_chunk_size=chunk, frozen_bits=each,
                                         **PRECISIONS[precision])
        runs.append((toy.train(model, optimizer, STEPS), model.gather_state()[0]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


@pytest.mark.parametrize("keys", [
    {"profile": "profile.json"}, {"near_memory": "2MiB"}, {"overlap_update": True, "simulated_link": 1e9},
    {"offload_activations": True}, {"gradient_accumulation_steps": 2}, {"near_states": "fill", "near_budget": "60%"},
    {"optimizer": {"type": "AdamW", "params": {"lr": toy.LR, "state_bits": 8}}},
], ids=lambda keys: next(iter(keys)))
def test_with_every_other_part_of_the_engine(keys, tmp_path, monkeypatch):
    """Each against itself with everything near."""
    monkeypatch.chdir(tmp_path)
    micros = keys.get("gradient_accumulation_steps", 1)
    found = []
    for near in ("min", "100%"):
        model, optimizer = toy.build(Six, frozen_bits=4, **{"near_budget": near} | keys)
        found.append(toy.train(model, optimizer, STEPS, num_micros=micros))
    assert found[0] == found[1]


@pytest.mark.parametrize("near", ["min", "100%"])
def test_evaluation_computes_with_the_codes_values(near):
    torch.manual_seed(0)
    plain = rounded(Six, 4)()
    model, optimizer = toy.build(Six, near_budget=near, frozen_bits=4)
    with torch.inference_mode():
        assert model.eval()(*toy.batch(0)).item() == plain(*toy.batch(0)).item()
    assert toy.train(model.train(), optimizer, STEPS) == toy.plain_run(rounded(Six, 4), loss_of, STEPS)[0]


# ---------------------------------------------------------------- weights that change


@pytest.mark.parametrize("near", ["min", "100%"])
def test_new_weights_reach_every_copy_of_a_frozen_block(near):
    model, optimizer = toy.build(Six, near_budget=near, default_chunk_size=5_000, frozen_bits=4)
    toy.train(model, optimizer, 2)
    weights, moments = model.gather_state()
    weights |= {name: value + 0.25 for name, value in weights.items() if name in ("embed.weight", "blocks.1.norm.bias")}
    model.load_state(weights, moments)
    assert_clean(model)
    for key in frozen_keys(model):
        block = model._store.blocks[key]
        if block.codes is not None and NEAR in block.copies:
            assert torch.equal(block.copies[NEAR], block.codes.decode(block.copies[FAR], torch.empty(block.numel)))
    found = model.gather_state()[0]
    for name, value in weights.items():
        changed = name == "embed.weight"    # the others have values of codes already
        assert torch.equal(found[name], BlockCodes(4).round(value, torch.float32) if changed else value), name


def test_a_far_copy_comes_back_from_disk_and_not_from_near(tmp_path):
    """Where far had to drop its copy. What is near is decoded."""
    model, _ = toy.build(Adapted, near_budget="100%", frozen_bits=4, default_chunk_size=WIDTH**2, disk_path=str(tmp_path))
    store, (key, *_) = model._store, sorted(frozen_keys(model))
    codes = store.ensure(key, FAR).clone()
    near = store.ensure(key, NEAR).clone()
    assert store._drop_duplicate() and store.blocks[key].copies.keys() == {NEAR, DISK}
    assert torch.equal(store.ensure(key, FAR), codes) and torch.equal(store.ensure(key, NEAR), near)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_resumes_bitwise_at_another_budget_and_chunk_size(precision, bits, tmp_path):
    keys = PRECISIONS[precision] | {"frozen_bits": bits}
    model, optimizer = toy.build(Six, near_budget="min", **keys)
    toy.train(model, optimizer, 2)
    model.save_checkpoint(tmp_path / "saved")
    model.export_weights(tmp_path / "weights.safetensors")
    weights, losses = model.gather_state()[0], toy.train(model, optimizer, 2, first=2)
    for near, chunk in (("100%", 5_000), ("min", 9_000)):
        torch.manual_seed(1)
        again, other = pstar.initialize_engine(Six, 0, toy.config(near_budget=near, default_chunk_size=chunk, **keys))
        again.load_checkpoint(tmp_path / "saved")
        assert all(torch.equal(value, weights[name]) for name, value in again.gather_state()[0].items())
        assert toy.train(again, other, 2, first=2) == losses
    again.import_weights(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in again.gather_state()[0].items())


def test_a_checkpoint_of_other_bits_is_refused_where_it_would_round_twice(tmp_path):
    engines = {bits: toy.build(Six, near_budget="min", frozen_bits=bits)[0] for bits in (4, 8, 32)}
    for bits, model in engines.items():
        model.save_checkpoint(tmp_path / str(bits))
    weights = {bits: model.gather_state()[0] for bits, model in engines.items()}
    for saved, bits in ((4, 8), (8, 4)):
        with pytest.raises(pstar.CheckpointError, match=f"with frozen_bits {saved}, this engine has {bits}: its frozen"):
            engines[bits].load_checkpoint(tmp_path / str(saved))
    for saved, bits, expected in ((4, 32, 4), (32, 8, 8)):    # as they are; and rounded now, as at a start
        engines[bits].load_checkpoint(tmp_path / str(saved))
        assert all(torch.equal(value, weights[expected][name]) for name, value in engines[bits].gather_state()[0].items())


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize("bits", [3, 0, 16, -4])
def test_bits_that_no_format_has_are_refused(bits):
    with pytest.raises(pstar.ConfigError, match=f"^.*frozen_bits is {bits}; choose 4, 8 or 32"):
        pstar.load_config({"frozen_bits": bits})
    with pytest.raises(pstar.ConfigError, match="'frozen_bits' must be int, found 'nf4'"):
        pstar.load_config({"frozen_bits": "nf4"})


def test_a_model_without_a_frozen_matrix_is_trained_with_a_warning():
    with pytest.warns(UserWarning, match="frozen_bits is 4, but no matrix of this model is frozen"):
        model, optimizer = toy.build(frozen_bits=4)
    assert toy.train(model, optimizer, 2) == toy.oracle(2)[0]


def test_a_weight_that_is_not_finite_is_refused_by_name():
    def broken() -> torch.nn.Module:
        model = Six()
        torch.nn.init.constant_(model.blocks[2].down.base.weight, float("inf"))
        return model

    with pytest.raises(pstar.ConfigError, match=r"^parameter blocks\.2\.down\.base\.weight has values that are not finite"):
        toy.build(broken, frozen_bits=4)
    toy.build(broken)
