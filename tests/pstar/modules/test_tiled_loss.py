"""The tiled loss: the loss and gradients of cross-entropy on whole logits, in a fraction of their memory.

Tolerance in fp32: 1e-6 of the norm. A tile's products have other shapes, so the library may add in another order, and
weight's gradient is summed over the tiles.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pstar
from pstar.memory.activation_peak import LiveBytes
from tests import toy

VOCAB, WIDTH, SHAPE = 61, 16, (3, 13)
TILES = (1, 2, 5, "auto", 39, 1000)


def case(bias: bool, dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    """hidden, weight, bias, targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(4)
    shapes = (*SHAPE, WIDTH), (VOCAB, WIDTH), (VOCAB,)
    values = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, VOCAB, SHAPE, generator=generator)
    targets[0, :3] = targets[2, 7] = -100
    return [*values[:2], values[2] if bias else None, targets]


def whole(hidden, weight, bias, targets, reduction="mean"):
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def gradients(loss: torch.Tensor, tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in tensors[:3] if tensor is not None]))


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], rel: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs.double()).norm() <= rel * theirs.double().norm()


@pytest.mark.parametrize("tiles, bias, reduction", [*itertools.product(TILES, (False, True), ("mean", "sum"))])
def test_it_is_cross_entropy(tiles, bias, reduction):
    tensors = case(bias)
    expected = whole(*tensors, reduction)
    found = pstar.tiled_loss(*tensors[:2], tensors[3], tensors[2], tiles=tiles, reduction=reduction)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_close(gradients(3 * found, tensors), gradients(3 * expected, tensors), 1e-6)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "16-bit tensors"])
def test_in_16_bit_it_is_as_close_to_fp32_as_the_whole_loss(autocast):
    """At most 1.2 times its error: both round hidden, weight and the gradient of the logits to 16 bit once."""
    exact = case(True)
    reference = gradients(whole(*exact), exact)
    tensors = case(True, torch.float32 if autocast else torch.bfloat16)
    errors = []
    for loss in (whole, lambda h, w, b, t: pstar.tiled_loss(h, w, t, b, tiles=4)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = loss(*tensors)
        assert found.dtype == torch.float32
        pairs = zip(gradients(found, tensors), reference, strict=True)
        errors.append([(ours.float() - exact).norm() for ours, exact in pairs])
    assert all(ours <= 1.2 * theirs for ours, theirs in zip(errors[1], errors[0], strict=True)), errors


def test_a_frozen_weight_gets_no_gradient_and_no_grad_keeps_nothing():
    hidden, weight, _, targets = case(False)
    frozen = weight.detach()
    assert_close([torch.autograd.grad(pstar.tiled_loss(hidden, frozen, targets), hidden)[0]],
                 [torch.autograd.grad(whole(hidden, frozen, None, targets), hidden)[0]], 1e-6)
    with torch.no_grad():
        loss = pstar.tiled_loss(hidden, weight, targets)
    assert not loss.requires_grad and loss.item() == pytest.approx(whole(hidden, weight, None, targets).item(), rel=1e-6)


def test_a_second_backward_raises():
    hidden, weight, _, targets = case(False)
    loss = pstar.tiled_loss(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("change, message", [
    ({"tiles": 0}, "tiles is 0; give a number of at least 1, or 'auto'"),
    ({"tiles": "few"}, "tiles is 'few'; give a number"),
    ({"reduction": "none"}, "reduction is 'none'; give 'mean' or 'sum'"),
    ({"bias": torch.zeros(3)}, r"bias \(3,\) does not fit weight \(61, 16\)"),
    ({"targets": torch.zeros(3, dtype=torch.int64)}, r"hidden \(3, 13, 16\), weight \(61, 16\), targets \(3,\) do not fit"),
])
def test_a_wrong_argument_is_one_line(change, message):
    hidden, weight, _, targets = case(False)
    with pytest.raises(pstar.ArgumentError, match=message):
        pstar.tiled_loss(**{"hidden": hidden, "weight": weight, "targets": targets} | change)


def test_its_peak_is_at_most_035_of_the_whole_loss():
    """8 x 512 tokens, vocabulary 21,128: the logits are 346 MB, the whole loss holds three such tensors at once."""
    hidden = torch.randn(8, 512, 32, requires_grad=True)
    weight = torch.randn(21128, 32, requires_grad=True)
    targets = torch.randint(0, 21128, (8, 512))
    peaks = []
    for loss in (lambda: whole(hidden, weight, None, targets), lambda: pstar.tiled_loss(hidden, weight, targets)):
        with LiveBytes() as live:
            torch.autograd.grad(loss(), [hidden, weight])
            peaks.append(live.take_peak())
    logits = 4096 * 21128 * 4
    assert peaks[0] > 2 * logits
    assert peaks[1] <= 0.35 * peaks[0]
    # one tile and a temporary, both at most as large as weight; the gradients of weight and hidden
    assert peaks[1] <= 3 * weight.nbytes + 2 * hidden.nbytes


# ---- in the engine


class Tied(nn.Module):
    """The loss reads the embedding's weight outside of the embedding: the engine must lend it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = toy.Toy()

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.body.embed(inputs)
        for block in self.body.blocks:
            x = block(x)
        return self.body.norm(x)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return pstar.tiled_loss(self.hidden(inputs), self.body.embed.weight, targets, tiles=3)


class Owned(Tied):
    """The head computes the loss itself, in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body.head = Head(self.body.embed.weight)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.body.head(self.hidden(inputs), targets)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return pstar.tiled_loss(x, self.weight, targets, tiles=3)


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.parametrize("keys", [{"near_budget": "min"}, {"near_budget": "60%", "prefetch": 0}, {"near_budget": "100%"},
                                  {"near_budget": "min", "offload_activations": True}], ids=str)
@pytest.mark.parametrize("model_func", [Tied, Owned])
def test_a_model_in_chunks_gives_the_bits_of_plain_pytorch(model_func, keys):
    losses, weights = toy.plain_run(model_func, lambda model, step: model(*toy.batch(step)), 4)
    model, optimizer = toy.build(model_func, **keys)
    assert toy.train(model, optimizer, 4) == losses
    state = model.gather_state()[0]
    for name, value in weights.items():
        assert torch.equal(state[name], value), name
