"""The engine on one process: bit for bit a plain PyTorch loop, wherever the bytes are."""

import json

import pytest
import torch
from torch import nn

import pstar
from pstar.chunks import TensorState
from pstar.memory.tier import FAR, NEAR
from pstar.numerics.grad_norm import clip_grad_norm_
from pstar.optim import group_updates
from tests import toy

STEPS = 5


def assert_same(model, losses, expected, weights):
    assert losses == expected
    got, _ = model.gather_state()
    for name, value in weights.items():
        assert torch.equal(got[name], value), name


@pytest.mark.each
@pytest.mark.parametrize("policy", ["next_use", "lru"])
@pytest.mark.parametrize("chunk", ["auto", 5_000, 11_000, 60_000])
@pytest.mark.parametrize("near", ["min", "50%", "100%", "1GiB"])
def test_placement_never_changes_a_number(near, chunk, policy):
    losses, weights, norms = toy.oracle(STEPS)
    model, optimizer = toy.build(near_budget=near, default_chunk_size=chunk, eviction_policy=policy)
    assert_same(model, toy.train(model, optimizer, STEPS), losses, weights)
    assert optimizer.grad_norm == norms[-1]
    assert model.near.peak_bytes <= model.near.budget_bytes
    if near == "min" and chunk != 60_000:
        assert model.ledger.moves["far to near"] > 2 * STEPS and model.ledger.moves["near to far"] > 0, "chunks really move"
    if near == "1GiB":
        assert model.ledger.moves["near to far"] == 0, "where everything fits nothing leaves"


@pytest.mark.parametrize("near", ["min", "100%"])
def test_accumulation_sums_micro_steps_as_autograd_does(near):
    losses, weights, _ = toy.oracle(STEPS, num_micros=3)
    model, optimizer = toy.build(near_budget=near, default_chunk_size=5_000, gradient_accumulation_steps=3)
    assert_same(model, toy.train(model, optimizer, STEPS, num_micros=3), losses, weights)


def test_the_curve_of_torch_optim():
    """Other roundings inside Adam; seen over these steps: 1e-7 in the losses."""
    torch.manual_seed(0)
    reference = toy.Toy()
    adamw, expected = torch.optim.AdamW(reference.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY), []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = reference(*toy.batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), toy.CLIP)
        adamw.step()
        expected.append(loss.item())
    model, optimizer = toy.build(near_budget="min")
    assert toy.train(model, optimizer, STEPS) == pytest.approx(expected, rel=1e-6)


def test_without_clipping():
    losses, weights, norms = toy.oracle(STEPS, clip=float("inf"))
    model, optimizer = toy.build(near_budget="min", gradient_clipping=0.0)
    assert_same(model, toy.train(model, optimizer, STEPS), losses, weights)
    assert optimizer.grad_norm == norms[-1]


@pytest.mark.parametrize("bf16, accumulation, per_param", [(False, 1, 16), (True, 1, 14), (True, 3, 16)])
def test_bytes_per_parameter_to_the_byte(bf16, accumulation, per_param):
    model, _ = toy.build(near_budget="min", bf16={"enabled": bf16}, gradient_accumulation_steps=accumulation)
    for micro in range(accumulation):
        model.backward(model(*toy.share(0, 0, 1, micro, accumulation)))
    assert model.model_data_bytes == per_param * model.layout.total_elems
    tiers = model.near.used_bytes + model.far.used_bytes
    twice = sum(block.num_bytes for block in model._store.blocks.values() if len(block.copies) == 2)
    assert tiers - twice == model.model_data_bytes


def test_bf16_with_a_split_master_is_bitwise_adam_on_an_fp32_master():
    """An independent short reference: bf16 weights are the rounded fp32 masters that AdamW updates."""
    model, optimizer = toy.build(near_budget="min", bf16={"enabled": True})
    losses = toy.train(model, optimizer, 8)

    torch.manual_seed(0)
    reference = toy.Toy()
    masters = {name: param.detach().clone().requires_grad_() for name, param in reference.named_parameters()}
    adamw = toy.adamw(masters.values(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    reference = reference.to(torch.bfloat16)
    expected = []
    for step in range(8):
        with torch.no_grad():
            for name, param in reference.named_parameters():
                bits = masters[name].detach().view(torch.int32)                 # to nearest, ties away from zero
                param.copy_((((bits + 0x8000) >> 16) << 16).view(torch.float32))
        reference.zero_grad()
        loss = reference(*toy.batch(step))
        loss.backward()
        expected.append(loss.item())
        for name, param in reference.named_parameters():
            masters[name].grad = param.grad.float()
        clip_grad_norm_(masters.values(), toy.CLIP)
        adamw.step()
    assert losses == expected
    weights, _ = model.gather_state()
    assert all(torch.equal(weights[name], master) for name, master in masters.items())


def test_split_master_loses_no_bit():
    from pstar.kernels import join_master, split_master
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4028e38, float("inf"), -float("inf"), 1.00390625, 1.01171875])
    master = torch.cat([bits.view(torch.float32), special])
    master = master[~master.isnan()]
    high, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_master(master, high, low)
    assert torch.equal(join_master(high, low).view(torch.int32), master.view(torch.int32))
    nearest = master.to(torch.bfloat16)                                         # ties to even; else the same
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[~ties].view(torch.int16), nearest[~ties].view(torch.int16))


def test_parameters_have_memory_only_while_they_are_in_use():
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    seen = []
    block = model.module.blocks[1].up
    block.register_forward_hook(lambda *_: seen.append(model._chunks.parameters.state("blocks.1.up.weight")))
    block.register_forward_hook(lambda *_: seen.append(model._chunks.parameters.state("blocks.0.up.weight")))
    toy.train(model, optimizer, 1)
    assert seen[0] == TensorState.HOLD and seen[1] == TensorState.RELEASED
    weight = model.module.blocks[1].up.weight
    assert weight.shape == (4 * toy.WIDTH, toy.WIDTH) and weight.dtype == torch.float32
    with pytest.raises(pstar.StateError, match=r"norm in no module .* reads parameter blocks.1.up.weight between two steps"):
        weight.norm()


def test_the_graph_keeps_no_chunk_alive():
    model, _ = toy.build(near_budget="min", default_chunk_size=5_000)
    before = model.near.used_bytes
    loss = model(*toy.batch(0))
    in_use = sum(block.pins for key, block in model._store.blocks.items() if key[0] == "param")
    assert in_use == 0 and loss.requires_grad and model.near.used_bytes >= before


def test_evaluation_between_and_inside_steps_changes_nothing():
    losses, weights, _ = toy.oracle(STEPS)
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    got = []
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            model(*toy.batch(100 + step, length=5))
        model.train()
        loss = model(*toy.batch(step))
        with torch.no_grad():
            model(*toy.batch(200 + step))
        model.backward(loss)
        optimizer.step()
        got.append(loss.item())
    assert_same(model, got, losses, weights)
    assert model.schedule.num_traced == 1


def test_a_skipped_layer_is_traced_anew():
    class Skipping(toy.Toy):
        skip = False

        def forward(self, inputs, targets):
            x = self.embed(inputs)
            for block in self.blocks[: 1 if self.skip else None]:
                x = block(x)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    model, optimizer = toy.build(Skipping, near_budget="min", default_chunk_size=5_000)
    reference = torch.manual_seed(0) and Skipping()
    adamw = toy.adamw(reference.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    for step in range(6):
        model.module.skip = reference.skip = step == 2
        loss = model(*toy.batch(step))
        model.backward(loss)
        optimizer.step()
        adamw.zero_grad()
        expected = reference(*toy.batch(step))
        expected.backward()
        clip_grad_norm_(reference.parameters(), toy.CLIP)
        adamw.step()                                                             # skips parameters without a gradient
        assert loss.item() == expected.item(), step
    assert model.schedule.num_traced == 2


def test_state_goes_to_plain_tensors_and_back_whatever_the_layout():
    first, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(first, optimizer, 3)
    where = {key: sorted(block.copies) for key, block in first._store.blocks.items()}
    weights, moments = first.gather_state()
    assert where == {key: sorted(block.copies) for key, block in first._store.blocks.items()}, "saving moves nothing"
    second, other = toy.build(near_budget="100%", default_chunk_size=60_000)
    second.load_state(weights, moments)
    assert toy.train(second, other, 3, first=3) == toy.train(first, optimizer, 3, first=3)
    assert moments["step.embed.weight"] == 3


def test_fault_shape_mismatches_on_load_are_raised_all_at_once():
    model, _ = toy.build()
    weights, _ = model.gather_state()
    weights["norm.weight"] = torch.zeros(3)
    del weights["norm.bias"]
    with pytest.raises(pstar.ConfigError, match=r"norm.weight: \(3,\), not \(48,\); norm.bias: missing"):
        model.load_state(weights)


def test_fault_learning_rate_schedulers_are_obeyed():
    model, optimizer = toy.build(near_budget="min")
    torch.manual_seed(0)
    reference = toy.Toy()
    adamw = toy.adamw(reference.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    ours, theirs = (torch.optim.lr_scheduler.StepLR(each, 2, 0.1) for each in (optimizer, adamw))
    for step in range(STEPS):
        loss = model(*toy.batch(step))
        model.backward(loss)
        optimizer.step()
        ours.step()
        adamw.zero_grad()
        expected = reference(*toy.batch(step))
        expected.backward()
        clip_grad_norm_(reference.parameters(), toy.CLIP)
        adamw.step()
        theirs.step()
        assert loss.item() == expected.item()


def test_parameter_groups_and_adam_with_l2():
    def groups(module):
        matrices = [param for param in module.parameters() if param.ndim > 1]
        vectors = [param for param in module.parameters() if param.ndim == 1]
        return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 1e-2}]

    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(
        toy.Toy, 0, {"optimizer": {"type": "Adam", "params": {"lr": toy.LR}}, "near_budget": "min"}, param_groups=groups)
    torch.manual_seed(0)
    reference = toy.Toy()
    adam = toy.adamw(groups(reference), lr=toy.LR, adamw_mode=False)
    for step in range(STEPS):
        loss = model(*toy.batch(step))
        model.backward(loss)
        optimizer.step()
        adam.zero_grad()
        expected = reference(*toy.batch(step))
        expected.backward()
        adam.step()
        assert loss.item() == expected.item()


def test_neighbours_with_the_same_options_are_updated_in_one_run(monkeypatch):
    """As many runs as there are neighbours that differ, and the bits of a run for each parameter."""
    def train(options):
        runs = []
        with monkeypatch.context() as patch:
            plain = group_updates.adam_steps
            patch.setattr(group_updates, "adam_steps",
                          lambda updates, **threads: (runs.append(len(updates)), plain(updates, **threads)))
            torch.manual_seed(0)
            model, optimizer = pstar.initialize_engine(
                toy.Toy, 0, {"optimizer": {"type": "AdamW", "params": {"lr": toy.LR}}, "default_chunk_size": 2**15,
                             "near_budget": "90%"},    # all near: each gradient is a tensor of its own
                param_groups=lambda module: [{"params": [param], **options(number)}
                                             for number, param in enumerate(module.parameters())])
            losses = toy.train(model, optimizer, 3)
        return sum(runs), losses

    one_each, losses = train(lambda number: {"eps": 1e-8 * (1 + number % 2 * 1e-9)})    # too little to change a bit
    fewer, same = train(lambda number: {"eps": 1e-8})
    num_params = len(list(toy.Toy().parameters()))
    assert one_each == 3 * num_params and fewer < one_each    # not half: vectors of 48 leave gaps
    assert losses == same


def test_the_norm_reads_no_gradient_a_second_time(monkeypatch):
    """A group's norms are taken when its gradients are complete, so that those that went far, or to disk, stay there."""
    model, optimizer = toy.build(near_budget="min", gradient_clipping=toy.CLIP)
    for number in range(2):
        loss = model(*toy.batch(number))
        model.backward(loss)
        monkeypatch.setattr(optimizer.chunks.gradients, "take_norms",
                            lambda group: pytest.fail(f"group {group} is read again"))
        optimizer.step()
        monkeypatch.undo()


def test_fault_the_default_configuration_works():
    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(toy.Toy)
    losses = toy.train(model, optimizer, STEPS)
    assert losses[-1] < losses[0] + 1


def test_fault_clip_threshold_does_not_drift_from_parameter_to_parameter():
    model, optimizer = toy.build(gradient_clipping=0.01)
    model.backward(model(*toy.batch(0)))
    expected, _, norms = toy.oracle(1, clip=0.01)
    optimizer.step()
    assert optimizer.grad_norm == norms[0] and optimizer.clip_norm == 0.01


def test_fault_an_unused_and_a_frozen_parameter_keep_their_values():
    class Odd(toy.Toy):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(7, 3)
            self.frozen = nn.Linear(toy.WIDTH, toy.WIDTH)
            self.frozen.requires_grad_(False)

        def forward(self, inputs, targets):
            x = self.frozen(self.embed(inputs))
            return nn.functional.cross_entropy(self.head(self.norm(self.blocks[0](x))).flatten(0, 1), targets.flatten())

    losses, weights, _ = toy.oracle(STEPS, model_func=Odd)
    model, optimizer = toy.build(Odd, near_budget="min", default_chunk_size=5_000)
    assert_same(model, toy.train(model, optimizer, STEPS), losses, weights)


def test_hooks_keep_the_near_bytes_in_the_ledger_only():
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 2)
    for tier in (NEAR, FAR):
        blocks = [block.copies[tier] for block in model._store.blocks.values() if tier in block.copies]
        assert sum(data.nbytes for data in blocks) == model._store.tiers[tier].used_bytes


def test_a_budget_too_small_names_the_module_and_the_smallest_that_would_do():
    with pytest.raises(pstar.BudgetError) as error:
        toy.build(near_budget=1000)
    least = int(str(error.value).split("give at least ")[1].split(",")[0])
    assert "module 'embed'" in str(error.value) or "module 'head'" in str(error.value)
    with pytest.raises(pstar.BudgetError, match=f"give at least {least}, that is"):
        toy.build(near_budget=least - 1)
    losses, weights, _ = toy.oracle(2)
    model, optimizer = toy.build(near_budget=least)
    assert_same(model, toy.train(model, optimizer, 2), losses, weights)
    assert model.near.peak_bytes <= least == pstar.plan_engine(toy.Toy, {"near_budget": "min"}).near_budget


def test_planning_allocates_nothing():
    plan = pstar.plan_engine(toy.Toy, {"near_budget": "25%"}, num_ranks=2)
    assert plan.layout.num_ranks == 2 and plan.near_budget == int(0.25 * 16 * plan.layout.total_elems)


def test_mistakes_in_the_loop_are_named():
    model, optimizer = toy.build()
    with pytest.raises(pstar.StateError, match="without a training forward"):
        model.backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("values, message", [
    ({"gradient_cliping": 1}, "unknown key 'gradient_cliping'; did you mean 'gradient_clipping'?"),
    ({"optimizer": {"params": {"learning_rate": 1}}}, "unknown key 'optimizer.params.learning_rate'"),
    ({"optimizer": {"type": "SGD"}}, "optimizer.type is 'SGD'; choose Adam or AdamW"),
    ({"bf16": True}, "'bf16' must be a JSON object"),
    ({"bf16": {"enabled": 1}}, "'bf16.enabled' must be bool, found 1"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0; give at least 1"),
    ({"optimizer": {"params": {"betas": 0.9}}}, "'optimizer.params.betas' must be a list of numbers, found 0.9"),
    ({"optimizer": {"params": {"betas": [0.9, "x"]}}}, "'optimizer.params.betas' must be a list of numbers"),
    ({"near_states": "all"}, "near_states is 'all'; choose margin or fill"),
    ({"gradient_accumulation_steps": 1.5}, "'gradient_accumulation_steps' must be int, found 1.5"),
    ({"default_chunk_size": "big"}, "default_chunk_size is 'big'"),
    ({"near_budget": "lots"}, "'lots' is no amount of memory"),
    ({"eviction_policy": "random"}, "eviction_policy is 'random'"),
    ({"communication": "all"}, "communication is 'all'; choose group or chunk"),
    ({"communication": "chunk", "ownership": "sharded"}, "set communication to group or ownership to whole"),
    ({"prefetch": -1}, "prefetch is -1; give 0"),
])
def test_a_configuration_that_cannot_run(values, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(pstar.ConfigError) as error:
        pstar.plan_engine(toy.Toy, path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_configuration_key_has_a_meaning():
    from pstar.config import reference
    rows = reference()
    assert len(rows) > 10 and all(meaning.endswith((".", ")")) for _, _, meaning in rows)
