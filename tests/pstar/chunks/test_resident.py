"""Resident steps: all model data stay near next to the largest peak of activations, and hooks of modules acquire nothing."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pstar
from tests import toy

ROOMY = {"near_memory": "1GiB", "default_chunk_size": 5_000}


def build(model_func=toy.Toy, **keys) -> tuple[pstar.Engine, pstar.optim.chunked_adam.ChunkedAdam]:
    return toy.build(model_func, **ROOMY | keys)


def steps(model, optimizer, count: int, first: int = 0, length: int = toy.LENGTH) -> tuple[list[float], list[bool]]:
    """The losses of `count` steps, and whether each was resident."""
    losses, resident = [], []
    for number in range(first, first + count):
        optimizer.zero_grad()
        loss = model(*toy.batch(number, length))
        resident.append(model._chunks.resident.active)
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, resident


def pins(model: pstar.Engine) -> int:
    return sum(block.pins for block in model._store.blocks.values())


def test_a_step_is_resident_after_one_has_followed_the_trace_and_hooks_then_acquire_nothing():
    """Step 0 is recorded, states move near, step 1 is recorded with the new order of updates, step 2 follows its trace."""
    model, optimizer = build()
    expected, weights, norms = toy.oracle(6)
    losses, resident = steps(model, optimizer, 4)
    assert resident == [False, False, False, True]
    before, acquired = pins(model), []
    model._chunks.acquire = acquired.append
    loss = model(*toy.batch(4))
    assert pins(model) > before, "nothing can be evicted"
    assert acquired == [] and model._chunks.resident.active
    model.backward(loss)
    optimizer.step()
    del model._chunks.acquire
    assert model.ledger.step_bytes.total() == 0 and pins(model) == before
    assert [*losses, loss.item(), *steps(model, optimizer, 1, 5)[0]] == expected
    assert optimizer.grad_norm == norms[-1] and model.schedule.num_traced == 2
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_the_second_of_two_backwards_finds_its_parameters_also_under_a_mode_that_sees_all_operations():
    """Flop counters and module trackers are such modes; they see the parameters that autograd saved."""
    model, optimizer = build(gradient_accumulation_steps=2)
    plain, its_optimizer = toy.build(gradient_accumulation_steps=2)
    for number in range(5):
        both = []
        for engine, updates in ((model, optimizer), (plain, its_optimizer)):
            losses = [engine(*toy.batch(2 * number + micro)) for micro in range(2)]
            with FlopCounterMode(display=False) if number > 2 else nullcontext() as counter:
                for loss in losses:
                    engine.backward(loss)
            updates.step()
            both.append(([loss.item() for loss in losses], counter and counter.get_total_flops()))
        assert both[0] == both[1] and both[0][1] != 0
    assert torch.equal(model.gather_state()[0]["norm.weight"], plain.gather_state()[0]["norm.weight"])


def test_a_program_that_calls_loss_backward_is_not_measured_for_ever():
    model, optimizer = build()
    for number in range(4):
        model(*toy.batch(number)).backward()
        optimizer.step()
        assert not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("near_states", ["margin", "fill"])
def test_the_least_near_memory_with_which_steps_are_resident(near_states):
    """All model data (16 bytes of each element) and the largest peak of activations; with one byte less, no step is."""
    model, optimizer = build()
    steps(model, optimizer, 3)
    enough = 16 * sum(group.elems for group in model.layout.groups) + max(model.schedule.known_peaks())
    whole, _ = exact = build(near_memory=enough, near_states=near_states)
    assert steps(*exact, 6)[1][3:] == [True, True, True]
    assert whole.near.limit_bytes == enough - max(model.schedule.known_peaks()), "idle buffers, too, leave room for the peak"
    assert steps(*build(near_memory=enough - 1, near_states=near_states), 6)[1] == [False] * 6


@pytest.mark.parametrize("keys", [{"profile": "profile.json"}, {"offload_activations": True},
                                  {"near_memory": "auto"}, {"optimizer": {"params": {"use_hybrid_adam": False}}}], ids=str)
def test_other_configurations_have_no_resident_steps(keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert steps(*build(**keys), 5)[1] == [False] * 5


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str)
def test_two_lengths_in_turn_and_an_evaluation_change_no_bit(keys):
    model, optimizer = build(**keys)
    other, its_optimizer = toy.build(**keys)
    numbers = [0] * 5 + [1] * 2 + [0] * 2 + [1] * 3    # steps of two lengths; each is resident after its own trace
    resident = []
    for number, long in enumerate(numbers):
        batch = toy.batch(number, 9 if long else 5)
        losses = []
        for engine, updates in ((model, optimizer), (other, its_optimizer)):
            updates.zero_grad()
            loss = engine(*batch)
            if engine is model:
                resident.append(model._chunks.resident.active)
            engine.backward(loss)
            updates.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    with torch.no_grad():
        assert torch.equal(model(batch[0]), other(batch[0]))
    assert resident[3:5] == [True, True] and resident[-1] and not any(resident[5:7])
    losses, resident = steps(model, optimizer, 4, 20)
    assert losses == steps(other, its_optimizer, 4, 20)[0]
    assert resident == [False, True, True, True], "the evaluation sent parameters away, the first step brings them back"
    left, right = model.gather_state()[0], other.gather_state()[0]
    assert all(torch.equal(left[name], right[name]) for name in right)


def grads_in_chunks(model: pstar.Engine) -> int:
    return sum(key[0] == "grad" and block.copies != {} for key, block in model._store.blocks.items())


@pytest.mark.parametrize("keys, kept", [({}, True), ({"bf16": {"enabled": True}}, True),
                                        ({"gradient_accumulation_steps": 2}, False)], ids=str)
def test_a_resident_step_keeps_autograds_gradients_unless_micro_steps_are_summed(keys, kept):
    model, optimizer = build(**keys)
    micros = keys.get("gradient_accumulation_steps", 1)
    peaks = []
    for number in range(6):
        for micro in range(micros):
            loss = model(*toy.batch(number + 10 * micro))
            model.backward(loss)
        resident = model._chunks.resident.active
        assert (grads_in_chunks(model) == 0) is (resident and kept)
        peaks.append(model.near.used_bytes)
        optimizer.step()
        assert grads_in_chunks(model) == 0 and not model._chunks.resident.keeps_gradients
    assert resident
    assert peaks[-1] <= peaks[2] and model.near.idle_bytes <= peaks[2] - model.near.used_bytes, "near keeps no second room"


def test_a_gradient_from_before_the_first_training_forward_of_a_step_is_not_lost():
    found = []
    for keys in (ROOMY, {}):
        model, optimizer = toy.build(**keys)
        steps(model, optimizer, 4)
        model.eval()
        model(*toy.batch(5)).backward()
        model.train()
        model.backward(model(*toy.batch(6)))
        optimizer.step()
        found.append((optimizer.grad_norm, steps(model, optimizer, 2, 7)[0]))
    assert found[0] == found[1]


@pytest.mark.parametrize("keys", [ROOMY, {}, {"near_budget": "min"}], ids=str)
def test_a_graph_from_before_the_update_is_refused_also_after_an_evaluation(keys):
    model, optimizer = toy.build(**keys)
    steps(model, optimizer, 4)
    late = model(*toy.batch(5))
    model.backward(model(*toy.batch(4)))
    optimizer.step()
    with torch.no_grad():
        model(*toy.batch(6))
    with pytest.raises(pstar.StateError, match=r"from before the last optimizer\.step"):
        late.backward()


class Skips(toy.Toy):
    """A Toy that leaves blocks out, or calls one twice, as its attribute `order` says."""

    order = (0, 1, 2)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for number in self.order:
            x = self.blocks[number](x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("order", [(0, 1), (0, 2, 1), (0, 1, 2, 2)])
def test_a_step_that_calls_other_modules_is_right_and_the_next_one_is_recorded(order):
    model, optimizer = build(Skips)
    plain, its_optimizer = toy.build(Skips)
    seen = []
    for number in range(9):
        for engine in (model, plain):
            engine.module.order = order if number == 5 else Skips.order
        expected, _ = steps(plain, its_optimizer, 1, number)
        losses, resident = steps(model, optimizer, 1, number)
        assert losses == expected
        seen += resident
    assert seen == [False] * 3 + [True] * 3 + [False] * 2 + [True]    # step 5 differs, 6 is recorded, 7 follows its trace


@pytest.mark.parametrize("first_backward", [True, False], ids=["after its backward", "before its backward"])
def test_a_micro_step_of_another_length_loses_no_gradient(first_backward):
    """It ends the residence, if no graph waits: near then keeps what the larger activations leave."""
    keys = {"gradient_accumulation_steps": 2}
    model, optimizer = build(**keys)
    plain, its_optimizer = toy.build(**keys)
    for number in range(8):
        both = []
        for engine, updates in ((model, optimizer), (plain, its_optimizer)):
            resident = engine._chunks.resident
            first = engine(*toy.batch(number))
            before = resident.active
            if first_backward:
                engine.backward(first)
            second = engine(*toy.batch(number, 5 if number == 4 else 9))
            after = resident.active
            if not first_backward:
                engine.backward(first)
            engine.backward(second)
            updates.step()
            both.append((first.item(), second.item()))
            if engine is model:
                assert before is (number in (3, 4, 7))    # 4 differs, 5 is recorded, 6 follows its trace
                assert after is (before and not (number == 4 and first_backward))
        assert both[0] == both[1]


@pytest.mark.parametrize("dropped", [True, False], ids=["gradients dropped", "gradients kept"])
def test_another_length_after_the_first_backward_of_a_resident_step_finds_room_for_its_gradients(dropped):
    """Until it is traced, chunks and gradients get little of near."""
    keys = {"near_memory": "3MiB", "gradient_clipping": 0.0}
    model, optimizer = build(**keys)
    plain, its_optimizer = toy.build(**keys | {"near_memory": "auto"})
    both = []
    for engine, updates in ((model, optimizer), (plain, its_optimizer)):
        losses, resident = steps(engine, updates, 4)
        assert resident[-1] is (engine is model)
        engine.backward(engine(*toy.batch(4)))
        if dropped:
            updates.zero_grad()
        loss = engine(*toy.batch(4, 30))
        assert not engine._chunks.resident.active
        engine.backward(loss)
        updates.step()
        both.append([*losses, loss.item(), *steps(engine, updates, 3, 5)[0]])
    assert both[0] == both[1]


def test_after_an_error_in_a_resident_step_training_goes_on():
    model, optimizer = build()
    expected, weights, _ = toy.oracle(6)
    losses, _ = steps(model, optimizer, 4)
    before = pins(model)
    handle = model.module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*toy.batch(4))
    handle.remove()
    assert losses + steps(model, optimizer, 2, 4)[0] == expected and pins(model) == before
    assert all(torch.equal(model.gather_state()[0][name], weight) for name, weight in weights.items())


def test_an_evaluation_before_backward_is_no_other_step():
    model, optimizer = build()
    steps(model, optimizer, 4)
    loss = model(*toy.batch(4))
    with torch.no_grad():
        assert model(*toy.batch(4)) == loss
    model.backward(loss)
    optimizer.step()
    assert steps(model, optimizer, 2, 5)[1] == [True, True] and model.schedule.num_traced == 2


def test_a_parameter_read_between_two_resident_steps_is_refused():
    model, optimizer = build()
    steps(model, optimizer, 5)
    with pytest.raises(pstar.StateError, match="between two steps"):
        model.module.norm.weight.sum()


class Checkpointed(toy.Toy):
    """Recomputes its blocks in backward, and reads a block's weight outside of its module."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = x @ self.blocks[0].down.weight.T[: toy.WIDTH, : toy.WIDTH]
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def test_recomputed_blocks_and_borrowed_parameters_in_resident_steps():
    assert toy.compare(Checkpointed, lambda model, step: model(*toy.batch(step)), 6, near_budget="100%",
                       **ROOMY).schedule.num_traced == 2
