"""On a GPU the engine gives plain PyTorch's bits, and refuses what it refuses on a CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import program_models, toy
from tests.pstar import test_programs

pytestmark = pytest.mark.gpu
STEPS, LAYERS = 5, 6
SMALL = {"default_chunk_size": 20_000}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all near": {"near_budget": "100%"},
    "resident": {"near_memory": "1GiB"},
    "60 %": {"near_budget": "60%", **SMALL},
    "least": {"near_budget": "min", **SMALL},
    "least, nothing prefetched": {"near_budget": "min", "prefetch": 0, **SMALL},
    "early updates": {"near_budget": "40%", "speculative_update": True, **SMALL},
    "updates in the next forward": {"near_budget": "min", "overlap_update": True, **SMALL},
    "states updated near": {"near_budget": "60%", "far_states": "stream", **SMALL},
    "activations in host memory": {"near_budget": "min", "offload_activations": True, **SMALL},
    "near_memory too small for all": {"near_memory": "3MiB", **SMALL},
    "on disk": {"near_budget": "min", "far_budget": "min", "disk_path": "a folder", **SMALL}}


class Model(toy.Toy):
    """The toy with dropout, and with blocks that backward computes again: one of them by a backward inside of backward."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.dropout = nn.Dropout(0.1)
        self.blocks[1].forward = functools.partial(checkpoint, self.blocks[1].forward, use_reentrant=False)
        self.blocks[2].forward = functools.partial(checkpoint, self.blocks[2].forward, use_reentrant=True)
        self.embed.register_forward_hook(lambda module, args, out: self.dropout(out))


@pytest.fixture(autouse=True)
def _same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")    # read when this process first multiplies matrices
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def batch(number: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cuda() for tensor in toy.batch(number))


@functools.cache
def oracle(num_micros: int = 1, model_func: Callable[[], nn.Module] = Model) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights on the host) of plain PyTorch on the GPU."""
    torch.manual_seed(0)
    model = model_func().cuda()
    optimizer, losses = toy.adamw(model.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY), []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = model(*batch(10 * step + micro)) / num_micros
            loss.backward()
        clip_grad_norm_(model.parameters(), toy.CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach().cpu() for name, param in model.named_parameters()}


def train(model, optimizer, first: int = 0, end: int = STEPS, num_micros: int = 1) -> list[float]:
    losses = []
    for step in range(first, end):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = model(*batch(10 * step + micro))
            model.backward(loss)
        optimizer.step()
        losses.append((loss / num_micros).item())
    return losses


def keys_of(placement: str, folder) -> dict[str, Any]:
    keys = PLACEMENTS[placement]
    return keys | {"disk_path": str(folder)} if "disk_path" in keys else keys


@pytest.mark.parametrize("num_micros", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_losses_and_weights_are_plain_pytorchs(placement: str, num_micros: int, tmp_path) -> None:
    if num_micros == 2 and "overlap_update" in PLACEMENTS[placement]:
        pytest.skip("one update of another step is under way at most")
    expected, weights = oracle(num_micros)
    model, optimizer = toy.build(Model, gradient_accumulation_steps=num_micros, **keys_of(placement, tmp_path))
    assert model.device.type == "cuda"
    assert train(model, optimizer, num_micros=num_micros) == expected
    found, _ = model.gather_state()
    assert [name for name, weight in weights.items() if not torch.equal(found[name].cpu(), weight)] == []
    if placement == "resident":
        assert model._chunks.resident.active or model.ledger.step_bytes.total() == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_are_equal_in_all_placements(precision: str, tmp_path) -> None:
    found = {}
    for placement in PLACEMENTS:
        model, optimizer = toy.build(Model, **keys_of(placement, tmp_path), **{precision: {"enabled": True}})
        found[placement] = train(model, optimizer)
    assert {placement for placement, losses in found.items() if losses != found["all near"]} == set()


@pytest.mark.parametrize("near", ["min", "100%"])
def test_compiled_blocks_follow_eager_ones(near: str) -> None:
    losses = []
    for keys in ({}, {"compile": "block"}):
        model, optimizer = toy.build(lambda: toy.Toy(LAYERS), near_budget=near, **keys)
        losses.append(train(model, optimizer))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def test_a_checkpoint_goes_on_with_the_same_bits_in_another_placement(tmp_path) -> None:
    model, optimizer = toy.build(Model, near_budget="min", **SMALL)
    losses = train(model, optimizer, end=3)
    model.save_checkpoint(tmp_path / "saved")
    model, optimizer = toy.build(Model, near_budget="100%")
    model.load_checkpoint(tmp_path / "saved")
    assert losses + train(model, optimizer, first=3) == oracle()[0]


def test_an_evaluation_between_two_steps_changes_nothing() -> None:
    for keys in ({"near_budget": "min", **SMALL}, {"near_memory": "1GiB"}):
        model, optimizer = toy.build(Model, **keys)
        losses = []
        for step in range(STEPS):
            losses += train(model, optimizer, step, step + 1)
            with torch.no_grad():
                assert model.eval()(*batch(99)).isfinite()
            model.train()
        assert losses == oracle()[0]


class Changed(Model):
    """Writes into a parameter before each forward."""

    how = "counted"

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[3].up.weight
        with torch.no_grad():
            (weight if self.how == "counted" else weight.data).clamp_(-0.01, 0.01)
        return super().forward(inputs, targets)


@pytest.mark.parametrize("how", ["counted", "data"])
def test_a_parameter_that_the_model_changes_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changed, "how", how)
    model, optimizer = toy.build(Changed, near_budget="min", **SMALL)
    with pytest.raises(pstar.StateError, match=r"blocks\.3\.up\.weight in place"):
        train(model, optimizer)


@pytest.mark.parametrize("backward", ["model", "loss"])
@pytest.mark.parametrize("placement", ["all near", "resident", "least"])
def test_reading_grad_between_backward_and_update_is_refused(placement: str, backward: str) -> None:
    model, optimizer = toy.build(Model, **PLACEMENTS[placement])
    train(model, optimizer)
    loss = model(*batch(0))
    model.backward(loss) if backward == "model" else loss.backward()
    with pytest.raises(pstar.StateError, match="optimizer.grad_norm|gradient_clipping"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_hooks_of_gradients_and_parameters_with_pytorch() -> None:
    def doubled() -> nn.Module:
        model = Model()
        pstar.exclude(model.norm)
        model.blocks[0].up.weight.register_hook(lambda grad: 2 * grad)
        return model

    losses, _ = oracle(model_func=doubled)
    for keys in ({"near_budget": "min", **SMALL}, {"near_memory": "1GiB"}, {"near_budget": "100%"}):
        model, optimizer = toy.build(doubled, **keys)
        assert train(model, optimizer) == losses


def test_twelve_random_programs(tmp_path, monkeypatch) -> None:
    """Without a GRU, whose kernels do not give the same bits each time."""
    kinds = tuple(kind for kind in program_models.KINDS if kind is not program_models.Recurrent)
    monkeypatch.setattr(program_models, "KINDS", kinds)
    assert test_programs.check(range(12), tmp_path)["equal"] >= 6
