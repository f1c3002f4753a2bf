"""Tiled linear layers: the values of nn.Linear in several modules, and models with layers larger than near.

Tolerance: 1e-6 relative, differences of fp32 in the last bits. A tile's product is a matrix product of another shape, in
which the library may add in another order. The gradient of the input is summed over the tiles.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pstar
from pstar.modules.lazy_init import record
from tests import toy

IN, OUT, ROWS, STEPS = 24, 1000, 8, 4
LARGEST = 2_000


class Wide(nn.Module):
    """A layer of 24,000 elements between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, IN)
        self.wide = nn.Linear(IN, OUT)
        self.last = nn.Linear(OUT, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.wide(torch.relu(self.first(x))))).pow(2).mean()


def tiled(model: nn.Module | None = None) -> nn.Module:
    model = model or Wide()
    assert pstar.tile_linears(model, LARGEST) > 0
    return model


def inputs(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(step))


def train(model_func, near: int | str) -> tuple[list[float], pstar.Engine]:
    model, optimizer = toy.build(model_func, near_budget=near, default_chunk_size=LARGEST + 200)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs(step))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tiles", [1, 3, 7, 10])
def test_it_starts_as_the_linear_layer_of_the_same_seed_and_computes_the_same(num_tiles, bias):
    torch.manual_seed(3)
    plain = nn.Linear(6, 10, bias)
    torch.manual_seed(3)
    layer = pstar.TiledLinear(6, 10, bias, num_tiles)
    sizes = [tile.weight.shape[0] for tile in layer.tiles]
    assert len(sizes) == num_tiles and sum(sizes) == 10 and max(sizes) - min(sizes) <= 1
    state = layer.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    x = torch.randn(2, 5, 6, requires_grad=True)
    y, z = layer(x), x.detach().requires_grad_()
    expected = plain(z)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-6, atol=1e-6)
    grad = torch.cat([tile.weight.grad for tile in layer.tiles])
    torch.testing.assert_close(grad, plain.weight.grad, rtol=1e-6, atol=1e-5)


def test_state_goes_in_and_out_by_plain_names():
    plain, model = Wide(), tiled()
    model.load_state_dict(plain.state_dict())
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    again = copy.deepcopy(model)
    again.load_state_dict(dict(model.named_parameters()))    # the tiles themselves, as in a chunk
    with pytest.raises(RuntimeError, match=r"size mismatch for wide.weight: it has the shape \(4, 24\), the layer has 1000"):
        model.load_state_dict(plain.state_dict() | {"wide.weight": torch.zeros(4, IN)})
    del plain.wide
    with pytest.raises(RuntimeError, match="Missing key.*wide.tiles.0.weight"):
        model.load_state_dict(plain.state_dict())


def test_tiles_are_views_and_only_large_layers_are_cut():
    model = Wide()
    memory = model.wide.weight.data_ptr()
    model.wide.weight.requires_grad_(False)
    model.wide.eval()
    assert pstar.tile_linears(model, LARGEST) == 1
    assert isinstance(model.wide, pstar.TiledLinear) and type(model.first) is nn.Linear
    assert len(model.wide.tiles) == 13 and max(tile.weight.numel() for tile in model.wide.tiles) <= LARGEST
    assert model.wide.tiles[0].weight.data_ptr() == memory and not model.wide.training
    assert not model.wide.tiles[1].weight.requires_grad and model.wide.tiles[1].bias.requires_grad
    assert pstar.tile_linears(model, LARGEST) == 0, "a second call changes nothing"


def test_tied_layers_are_left_and_named_and_a_shared_module_is_replaced_everywhere():
    model = toy.Toy()
    with pytest.warns(UserWarning, match="head is left whole, for embed uses its parameters too"):
        assert pstar.tile_linears(model, 5_000) == 2 * toy.LAYERS
    assert type(model.head) is nn.Linear and model.head.weight is model.embed.weight
    shared = nn.Linear(4, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    assert pstar.tile_linears(model, 16) == 1 and model["a"][0] is model["b"] is not shared
    hooked = nn.Sequential(nn.Linear(4, 8))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="0 is left whole, it has hooks"):
        assert pstar.tile_linears(hooked, 16) == 0


def test_wrong_arguments_of_tiled_layers_are_refused():
    with pytest.raises(pstar.ConfigError, match="num_tiles is 9; give 1 to 8"):
        pstar.TiledLinear(4, 8, True, 9)
    with pytest.raises(pstar.ConfigError, match="one row of wide has 24 elements, more than max_elems, which is 23"):
        pstar.tile_linears(Wide(), 23)
    with pytest.raises(pstar.ConfigError, match="from_linear"):
        pstar.tile_linears(nn.Linear(4, 8), 4)


def test_a_lazy_start_gives_the_tiles_the_numbers_of_a_plain_one():
    module, _ = record(tiled)
    assert all(param.device.type == "meta" for param in module.parameters())
    torch.manual_seed(0)
    plain = Wide()
    model, _ = toy.build(tiled, near_budget="min", default_chunk_size=LARGEST)
    weights, _ = model.gather_state()
    assert "wide.tiles.12.weight" in weights
    joined = pstar.join_tiles(model.module, weights)
    assert joined.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(joined[name], value) for name, value in plain.named_parameters())


def test_a_layer_larger_than_near_trains_in_tiles():
    least = pstar.plan_engine(tiled, {"near_budget": "min", "default_chunk_size": LARGEST + 200}).near_budget
    assert least < 4 * IN * OUT, "less than the layer's weight alone, and there are gradients as well"
    with pytest.raises(pstar.BudgetError, match="module 'wide' and its gradients need .* pstar.tile_linears cuts"):
        train(Wide, least)
    expected, reference = train(Wide, "100%")
    losses, model = train(tiled, least)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert model.near.peak_bytes <= least
    weights, _ = reference.gather_state()
    for name, value in pstar.join_tiles(model.module, model.gather_state()[0]).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)


def rank_case(rank: int, num_ranks: int) -> list[float]:
    return train(tiled, "min")[0]


def test_two_ranks(ranks):
    expected, _ = train(Wide, "100%")
    for losses in ranks(2).run(rank_case):    # every rank has the same batch here
        assert losses == pytest.approx(expected, rel=1e-6)
