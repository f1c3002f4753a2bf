"""Offload of activations: the same bits wherever they wait for backward, and every byte in the ledger."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.chunks import LEAST_BYTES, Offload
from pstar.memory.tier import FAR, Ledger, Tier
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy

STEPS, ROWS, LENGTH, WIDTH, BLOCKS = 3, 8, 64, 64, 3
HIDDEN_BYTES = ROWS * LENGTH * WIDTH * 4    # of a block's input: 128 KiB
VARIANTS = pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"])


class Stack(nn.Module):
    """Residual blocks with dropout, each checkpointed by the given variant (None: not at all)."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2),
                                                  nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + (block(h) if self.use_reentrant is None else checkpoint(block, h, use_reentrant=self.use_reentrant))
        return h.pow(2).mean()


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def activation_bytes(model: pstar.Engine) -> int:
    return model.far.used_by_kind["activation"]


def build(use_reentrant: bool | None = None, **keys) -> tuple:
    return toy.build(lambda: Stack(use_reentrant), **{"default_chunk_size": 20_000, "offload_activations": True} | keys)


def train(model: pstar.Engine, optimizer, num_micros: int = 1, evaluate: bool = False) -> tuple[list[float], Counter[str]]:
    """(losses, bytes moved for these steps). Bytes copied early for the next step are left out: they depend on when
    gradients arrive."""
    losses, moved = [], Counter()
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = model(tokens(10 * step + micro))
            if evaluate:
                state = torch.get_rng_state()
                with torch.no_grad():
                    model(tokens(100))
                torch.set_rng_state(state)
            model.backward(loss)
            losses.append(loss.item())
            del loss
            assert activation_bytes(model) == 0
        optimizer.step()
        moved += model.ledger.step_bytes
        blocks = [block.copies[FAR] for block in model._store.blocks.values() if FAR in block.copies]
        assert model.far.used_bytes == sum(data.nbytes for data in blocks), "nothing but chunks is in far between steps"
    return losses, moved


def plain(use_reentrant: bool | None, num_micros: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model, losses = Stack(use_reentrant), []
    adamw = toy.adamw(model.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    for step in range(STEPS):
        torch.manual_seed(step)
        adamw.zero_grad()
        for micro in range(num_micros):
            loss = model(tokens(10 * step + micro))
            (loss / num_micros).backward()
            losses.append(loss.item())
        clip_grad_norm_(model.parameters(), toy.CLIP)
        adamw.step()
    return losses, model


@pytest.mark.each
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")    # the evaluation, under no_grad
@VARIANTS
@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("num_micros", [1, 2])
def test_not_one_bit_depends_on_where_activations_wait(use_reentrant, near, num_micros):
    expected, reference = plain(use_reentrant, num_micros)
    moved = {}
    for offload in (False, True):
        model, optimizer = build(use_reentrant, near_budget=near, gradient_accumulation_steps=num_micros,
                                 offload_activations=offload)
        losses, moved[offload] = train(model, optimizer, num_micros, evaluate=True)
        assert losses == expected
        weights, _ = model.gather_state()
        assert all(torch.equal(weights[name], value) for name, value in reference.named_parameters())
    assert model.schedule.num_traced == 1
    # In every variant: the input of each block, and of the mean of squares, there and back again.
    least = STEPS * num_micros * (BLOCKS + 1) * HIDDEN_BYTES
    for way in ("near to far", "far to near"):
        assert moved[True][way] - moved[False][way] >= least
    if use_reentrant is not None:
        assert moved[True]["near to far"] - moved[False]["near to far"] == least, "and nothing else with checkpointing"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_inputs_of_checkpointed_blocks_are_in_far_and_in_no_other_place(use_reentrant):
    model, _ = build(use_reentrant)
    seen = []
    model.module.embed.register_forward_hook(lambda module, args, output: seen.append(output.untyped_storage()._weak_ref()))
    loss = model(tokens(0))
    assert activation_bytes(model) == (BLOCKS + 1) * HIDDEN_BYTES
    assert torch.UntypedStorage._expired(seen[0]), "the first block's input has no memory near"
    model.backward(loss)
    assert model.ledger.moved_bytes["near to far"] >= (BLOCKS + 1) * HIDDEN_BYTES


@VARIANTS
def test_a_graph_that_is_dropped_gives_its_buffers_back(use_reentrant):
    model, _ = build(use_reentrant)
    before = model.far.used_bytes
    loss = model(tokens(0))
    assert activation_bytes(model) >= (BLOCKS + 1) * HIDDEN_BYTES
    del loss
    gc.collect()    # the frames of torch's checkpoint are circles
    assert activation_bytes(model) == 0 and model.far.used_bytes == before


def test_a_backward_that_fails_gives_its_buffers_back():
    def fail(grad):
        raise RuntimeError("in the middle of backward")

    model, _ = build()
    handle = model.module.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    loss = model(tokens(0))
    with pytest.raises(RuntimeError, match="in the middle"):
        model.backward(loss)
    handle.remove()
    assert activation_bytes(model) > 0, "the first block's are still there"
    del loss
    gc.collect()
    assert activation_bytes(model) == 0


def test_a_graph_used_twice_comes_back_twice():
    model, _ = build()
    loss = model(tokens(0))
    loss.backward(retain_graph=True)
    held, once = activation_bytes(model), model.ledger.moved_bytes["far to near"]
    loss.backward()
    assert held > 0 and activation_bytes(model) == 0 and model.ledger.moved_bytes["far to near"] > once


class Heads(nn.Module):
    """q, k and v are views of one storage, saved by one node."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(ROWS, LENGTH, 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).sum()


def test_a_storage_goes_once_and_comes_once_however_many_views_of_it_are_saved():
    model, _ = toy.build(Heads, offload_activations=True, near_budget="1GiB")
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    loss = model(x)
    buffers = sorted(data.nbytes for data, kind in model.far._taken.values() if kind == "activation")
    # x, the attention's output (which is saved as well), and one buffer for q, k and v together.
    assert buffers == [HIDDEN_BYTES, HIDDEN_BYTES, 3 * HIDDEN_BYTES]
    before = model.ledger.moved_bytes["far to near"]
    model.backward(loss)
    assert model.ledger.moved_bytes["far to near"] - before == 5 * HIDDEN_BYTES


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale
        first = h.pow(2).sum()      # saves h
        h.detach().add_(1)
        return first + h.pow(2).sum()    # saves h again, with other values now


@pytest.mark.parametrize("numel", [LEAST_BYTES // 4, LEAST_BYTES // 4 - 1])
def test_a_tensor_changed_in_place_is_either_safe_in_far_or_refused(numel):
    """x = 2: the gradient of 4 + 9 with respect to scale is 2 * 2 * 2 + 2 * 3 * 2 for each element."""
    model, optimizer = toy.build(Changing, offload_activations=True, gradient_clipping=0.0)
    loss = model(torch.full((numel,), 2.0))
    assert loss.item() == 13 * numel
    if numel * 4 < LEAST_BYTES:
        with pytest.raises(pstar.StateError, match=r"changed in place .*: version 1, not 0; change a clone"):
            model.backward(loss)
    else:
        model.backward(loss)
        optimizer.step()
        assert optimizer.grad_norm == 20 * numel


@pytest.mark.parametrize("near, error, line", [
    ("min", pstar.StateError, "changed in place"),
    ("100%", RuntimeError, "modified by an inplace operation"),    # without a hook, autograd itself checks
])  # fmt: skip
def test_a_small_tensor_changed_in_place_is_refused_without_offload_too(near, error, line):
    model, _ = toy.build(Changing, near_budget=near)
    with pytest.raises(error, match=line):
        model.backward(model(torch.ones(3)))


def test_without_room_in_far_activations_stay_near():
    whole = pstar.plan_engine(Stack, {"default_chunk_size": 20_000, "near_budget": "min"})
    least = whole.costs.total * whole.layout.total_elems
    expected, _ = plain(True, 1)
    for room, in_far in ((0, 0), (2 * HIDDEN_BYTES + 5, 2), (100 * HIDDEN_BYTES, BLOCKS + 1)):
        model, optimizer = build(True, near_budget="min", far_budget=least + room)
        peak = []
        model.module.blocks[-1].register_forward_pre_hook(lambda *_, m=model, p=peak: p.append(activation_bytes(m)))
        assert train(model, optimizer)[0] == expected
        loss = model(tokens(0))
        assert activation_bytes(model) <= in_far * HIDDEN_BYTES and max(peak) <= room
        assert (activation_bytes(model) > 0) == (in_far > 0)
        del loss


def test_small_tensors_parameters_and_views_of_buffers_are_not_offloaded():
    far = Tier(FAR, torch.device("cpu"))
    offload = Offload(far, Ledger(), torch.device("cpu"))
    large = torch.zeros(LEAST_BYTES // 4 * 10)
    buffer = torch.zeros(LEAST_BYTES)
    offload.stay([buffer])
    assert offload.pack(torch.zeros(LEAST_BYTES // 4 - 1)) is None, "too small"
    assert offload.pack(large[: LEAST_BYTES // 4]) is None, "a small part of a large storage"
    assert offload.pack(buffer[3:]) is None, "a view of a buffer"
    assert offload.pack(nn.Parameter(large)) is None
    assert offload.pack(large.to_sparse()) is None
    assert offload.pack(large.to(torch.complex64).conj()) is None
    assert far.used_bytes == 0
    away = offload.pack(large.view(10, -1).T)
    part = offload.pack(large[5:9])
    assert part.copy is away.copy and far.used_bytes == large.nbytes, "a small part of an offloaded storage costs nothing"
    large.add_(1)
    again = away.unpack()
    assert again.shape == (LEAST_BYTES // 4, 10) and again.stride() == (1, LEAST_BYTES // 4) and not again.any()
    assert part.unpack().data_ptr() == again.data_ptr() + 20, "views of one storage share it again"
    assert offload.pack(large).copy is not away.copy, "changed since"
    del away, part
    assert far.used_bytes == 0


def rank_case(rank: int, num_ranks: int, offload: bool) -> dict:
    model, optimizer = build(True, near_budget="min", offload_activations=offload)
    losses, moved = train(model, optimizer, evaluate=True)
    weights, _ = model.gather_state()
    return {"losses": losses, "weights": weights, "moved": moved["near to far"]}


def test_two_ranks(ranks):
    off, on = (ranks(2).run(rank_case, offload) for offload in (False, True))
    for one, other in zip(off, on, strict=True):
        assert one["losses"] == other["losses"] and other["moved"] - one["moved"] == STEPS * (BLOCKS + 1) * HIDDEN_BYTES
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(other["weights"][name], value) for name, value in one["weights"].items())
