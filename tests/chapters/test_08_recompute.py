"""Recomputation in chapter 08: the same bits of losses and gradients; bytes and FLOPs equal their formulas to the unit.

No tolerance: the second forward computes the same operations on the same numbers. torch.utils.checkpoint is a second oracle
for the FLOPs.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpt2_chinese.errors import UserError
from gpt2_chinese.model import recomputation
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import Block, GPT2LMHeadModel
from gpt2_chinese.model.recompute_plan import Plan
from gpt2_chinese.run.optim import autocast
from tests.chapters.adapters import CASES, spec
from tests.chapters.technique import technique

CHAPTER = "08_param_efficient"
MODES = ("none", "block", "every:2", "every:3", "every:5", "selective", "sqrt")
SHAPE = {"n_layer": 5, "n_embd": 24, "n_head": 4, "n_positions": 24, "vocab_size": 53, "n_inner": 80}
ROWS, LENGTH = 3, 16


def build(dropout: float = 0.0, **changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    rates = {"resid_pdrop": dropout, "attn_pdrop": dropout, "embd_pdrop": dropout}
    return GPT2LMHeadModel(ModelConfig(**{**SHAPE, **rates, **changes}))


def batch(rows: int = ROWS, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 53, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def recomputing(model: GPT2LMHeadModel, mode: str, offload: bool = False) -> Any:
    return recomputation.recompute(model, mode, offload)


def step(model: GPT2LMHeadModel, precision: str = "fp32", steps: int = 2) -> dict[str, torch.Tensor]:
    """The loss and all gradients after forwards and backwards whose dropout draws from one seed."""
    torch.manual_seed(9)
    for _ in range(steps):
        with autocast(torch.device("cpu"), precision):
            loss = model(*batch())
        loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def recomputed(model: GPT2LMHeadModel, mode: str, offload: bool = False, precision: str = "fp32") -> dict[str, torch.Tensor]:
    recomputing(model, mode, offload)
    return step(model, precision)


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(ours[name], expected[name])]
    assert not different, different


@functools.cache
def straight(dropout: float, precision: str) -> dict[str, torch.Tensor]:
    """Without this file's technique."""
    return step(build(dropout), precision)


@pytest.mark.each
@pytest.mark.parametrize("offload", [False, True], ids=["near", "on the host"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout, precision", [(0.0, "fp32"), (0.2, "fp32"), (0.2, "bf16")])
def test_losses_and_gradients_have_the_same_bits(mode, offload, dropout, precision) -> None:
    """Dropout draws the same numbers again, autocast rounds the same, and two backwards add up."""
    assert_equal(recomputed(build(dropout), mode, offload, precision), straight(dropout, precision))


@pytest.mark.each
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["block", "every:3", "selective"])
def test_every_method_has_the_same_bits_as_without_recomputation(case, mode) -> None:
    """Where the first block's input needs no gradient, too."""
    results = []
    for way in ("none", mode):
        model = build()
        technique(CHAPTER, "methods.apply").apply_method(model, spec(case))
        results.append(recomputed(model, way))
    assert len(results[0]) > 1
    assert_equal(results[1], results[0])


@pytest.mark.each
@pytest.mark.parametrize("changes, rows, length", [({}, 3, 16), ({"n_layer": 1, "n_inner": None}, 2, 24),
                                                   ({"n_layer": 7, "n_embd": 40, "n_head": 2}, 1, 5)])  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_bytes_and_flops_equal_their_formulas(mode, changes, rows, length) -> None:
    formulas = technique(CHAPTER, "kept_activations")
    model = build(**changes)
    if mode.startswith("every") and int(mode[-1]) > model.config.n_layer:
        with pytest.raises(UserError, match="the model has 1 layers"):
            Plan.of(mode, model.config.n_layer)
        return
    activations = recomputing(model, mode)
    with activations.counting():
        loss = model(*batch(rows, length))
        loss.backward()
    shape = model.config, rows, length, activations.plan
    assert activations.kept_bytes == formulas.kept_bytes(*shape)
    assert activations.again_bytes == formulas.again_bytes(*shape)
    assert activations.flops == formulas.recomputed_flops(*shape)
    assert activations.offloaded_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_bytes_equal_their_formula(mode) -> None:
    formulas = technique(CHAPTER, "kept_activations")
    model = build()
    activations = recomputing(model, mode, offload=True)
    with activations.counting():
        model(*batch())
    shape = model.config, ROWS, LENGTH, activations.plan
    assert activations.offloaded_bytes == formulas.offloaded_bytes(*shape)
    assert activations.kept_bytes == formulas.kept_bytes(*shape)


@pytest.mark.parametrize("offload", [False, True], ids=["near", "on the host"])
@pytest.mark.parametrize("mode", MODES)
def test_after_a_step_nothing_of_it_is_alive(mode, offload) -> None:
    """A tensor that refers to its own node of the graph is never freed: a run would lose the memory of a forward a step."""
    model = build(dropout=0.2)
    recomputing(model, mode, offload)

    def alive_after_a_step() -> int:
        model.zero_grad()
        model(*batch()).backward()
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    alive_after_a_step()
    assert alive_after_a_step() == alive_after_a_step()


def test_flops_are_those_of_torchs_checkpoint() -> None:
    """It also stops at the last tensor that backward needs."""
    mapping = recomputation.ON_CPU

    def counted(model: GPT2LMHeadModel) -> int:
        loss = model(*batch())
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            loss.backward()
        return counter.get_total_flops()

    plain, theirs, ours = build(), build(), build()
    for block in theirs.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    activations = recomputing(ours, "block")
    with activations.counting():
        loss = ours(*batch())
        loss.backward()
    assert activations.flops == counted(theirs) - counted(plain) > 0


def test_the_attention_of_the_cpu_is_counted_as_that_of_gpus() -> None:
    q = torch.randn(2, 4, 16, 6)
    with FlopCounterMode(display=False, custom_mapping=recomputation.ON_CPU) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counter.get_total_flops() == 4 * 2 * 4 * 16 * 16 * 6


def test_a_second_backward_is_refused() -> None:
    model = build()
    recomputing(model, "block")
    loss = model(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through the same segment"):
        loss.backward()


def test_a_forward_that_changes_between_is_noticed() -> None:
    """The second forward of a block that counts its calls saves more tensors, or fewer."""
    model, calls = build(), []
    old = model.transformer.h[0].mlp.forward
    model.transformer.h[0].mlp.forward = lambda x: old(x) if not calls.append(1) and len(calls) == 1 else x
    recomputing(model, "block")
    loss = model(*batch())
    with pytest.raises(RuntimeError, match="the second forward saved"):
        loss.backward()


def test_outside_of_a_forward_and_without_gradients_blocks_run_as_they_are() -> None:
    """Segments are seen only by the loop of a training step's forward; a forward that fails ends it as well."""
    model, plain, kinds = build(), build(), []
    names = [name for name, _ in plain.named_parameters()]
    recomputing(model, "every:2")
    assert [name for name, _ in model.named_parameters()] == names
    model.transformer.ln_f.register_forward_pre_hook(lambda *_: kinds.append({type(b) for b in model.transformer.h}))
    with torch.no_grad():
        assert torch.equal(model(batch()[0]), plain(batch()[0]))
    model(*batch())
    assert kinds == [{Block}, {recomputation.Segment}]
    with pytest.raises(IndexError):
        model(batch()[0] + 53)
    assert {type(block) for block in model.transformer.h} == {Block}


@pytest.mark.parametrize("text", ["", "all", "every", "every:", "every:0", "every:-1", "every:2.5", "every:x", "block:2"])
def test_a_wrong_recompute_is_one_line(text) -> None:
    with pytest.raises(UserError, match=r"^--recompute .*: give none, block, every:K"):
        Plan.of(text, 4)


def test_segments_cover_each_layer_once() -> None:
    for layers in range(1, 30):
        for mode in ("block", "sqrt", "selective", *(f"every:{k}" for k in range(1, layers + 1))):
            cut = Plan.of(mode, layers).cut(layers)
            assert [i for segment in cut for i in segment] == list(range(layers))
    assert Plan.of("none", 9).cut(9) == [] and len(Plan.of("sqrt", 9).cut(9)) == 3
