"""Compiled blocks: the numbers of eager ones, one compilation for equal blocks, and no graph that the engine ends.

Models are compiled in the living ranks of the session (`ranks(1)`), which share one folder of compiled code. The modules of
the compiler are loaded there, not in the process of pytest.

Tolerance: fused kernels round elsewhere than separate ones. In fp32 losses stay within 1e-5 relative, moments after one step
(0.1 of the gradient) within 1e-5 of the largest. At different near budgets the same kernels run: equal bits.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.errors import ConfigError
from pstar.kernels import build
from pstar.memory.activation_peak import LiveBytes
from pstar.modules.compiled_blocks import find_blocks, owners
from tests import toy
from tests.cover import quick_only
from tests.pstar.test_engine_ranks import global_losses

STEPS = 4
BLOCK = {"compile": "block", "default_chunk_size": 5_000}
EAGER = {"compile": "none", "default_chunk_size": 5_000}
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler: torch.compile cannot run")


class Recomputed(toy.Toy):
    """Recomputes each block in backward, from outside of the block."""

    reentrant = False

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RecomputedReentrant(Recomputed):
    reentrant = True


def recomputes_inside() -> toy.Toy:
    """As chapter 07 does it: 12 blocks, more than the compilations that torch.compile allows for one function."""
    model = toy.Toy(12)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


class Deciding(toy.Block):
    """Its forward reads a number of a tensor, so the model ends its graph once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.sum().item() > 1e9 else 1.0)


def deciding() -> toy.Toy:
    model = toy.Toy()
    model.blocks = nn.ModuleList(Deciding(toy.WIDTH) for _ in range(2))
    return model


MODELS = {"toy": toy.Toy, "outside": Recomputed, "reentrant": RecomputedReentrant, "inside": recomputes_inside,
          "deciding": deciding}


def one_run(rank: int, num_ranks: int, model: str, keys: dict, evaluates: bool) -> dict:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine, optimizer = toy.build(MODELS[model], **keys)
    num_micros = keys.get("gradient_accumulation_steps", 1)
    losses = toy.train(engine, optimizer, 1, rank, num_ranks, num_micros)
    moments = engine.gather_state()[1]
    counters = torch._dynamo.utils.counters
    first = counters["stats"]["unique_graphs"]
    losses += toy.train(engine, optimizer, STEPS - 1, rank, num_ranks, num_micros, first=1)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if evaluates:
        with torch.no_grad():
            losses.append(engine.eval()(*toy.share(9, rank, num_ranks)).item())
    named = [name for name, _ in engine.named_parameters()]
    return {"losses": global_losses(losses, num_ranks), "norm": optimizer.grad_norm, "moments": moments, "named": named,
            "weights": engine.gather_state()[0], "graphs": (first, graphs), "breaks": breaks,
            "near": (engine.near.peak_bytes, engine.near.budget_bytes), "moved": engine.ledger.moves["far to near"],
            "traced": engine.schedule.num_traced, "peak": max(engine.schedule.known_peaks(), default=0)}


def case(rank: int, num_ranks: int, model: str, runs: list[dict], evaluates: bool = False) -> list[dict]:
    try:
        return [one_run(rank, num_ranks, model, keys, evaluates) for keys in runs]
    finally:
        torch._dynamo.reset()


def assert_same_bits(runs: list[dict]) -> None:
    for run in runs[1:]:
        assert run["losses"] == runs[0]["losses"] and run["norm"] == runs[0]["norm"]
        assert all(torch.equal(value, run["weights"][name]) for name, value in runs[0]["weights"].items())
        assert all(torch.equal(value, run["moments"][name]) for name, value in runs[0]["moments"].items())


def assert_follows(compiled: dict, eager: dict, loss: float = 1e-5, moment: float = 1e-5) -> None:
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=loss)
    for name, value in eager["moments"].items():
        difference = (compiled["moments"][name].double() - value.double()).abs().max()
        assert difference <= moment * value.double().abs().max(), name
    assert compiled["named"] == eager["named"] and compiled["weights"].keys() == eager["weights"].keys()
    assert compiled["traced"] == 1 and compiled["near"][0] <= compiled["near"][1]


def run_all(ranks, num_ranks: int, model: str, nears: tuple[str, ...], evaluates: bool = False, **keys) -> list[dict]:
    """[the eager run, the compiled run at each near budget] on rank 0."""
    runs = [EAGER | keys, *(BLOCK | keys | {"near_budget": near} for near in nears)]
    return ranks(num_ranks).run(case, model, runs, evaluates)[0]


@needs_compiler
@pytest.mark.parametrize("nears", quick_only([("min", "100%"), ("min", "40%", "100%")], ("min", "100%")), ids=str)
def test_losses_and_gradients_are_those_of_eager_blocks_and_equal_bits_at_every_near_budget(ranks, nears) -> None:
    eager, *compiled = run_all(ranks, 1, "toy", nears)
    assert_same_bits(compiled)
    for run in compiled:
        assert_follows(run, eager)
        assert run["breaks"] == 0, "the engine ends no graph"
        assert run["graphs"] == (1, 1), "one compilation for three equal blocks, however often their chunks move"
    assert compiled[0]["moved"] > 0 and not any("_orig_mod" in name for name in compiled[0]["named"])


@needs_compiler
def test_measured_activations_contain_what_compiled_blocks_save(ranks) -> None:
    eager, compiled = run_all(ranks, 1, "toy", ("100%",), near_memory="8MiB")
    hidden = toy.BATCH * toy.LENGTH * 4 * toy.WIDTH * 4    # bytes of one output of `up`
    assert compiled["peak"] > toy.LAYERS * 2 * hidden, "each block saves the input and the output of gelu"
    assert compiled["peak"] <= eager["peak"] and compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)


RANKS_KEYS = [{}, {"ownership": "sharded"}, {"communication": "chunk"}, {"prefetch": 0}, {"gradient_accumulation_steps": 2}]


@needs_compiler
@pytest.mark.deep    # every rank imports the compiler, for ten seconds; the quick command compiles on one rank
@pytest.mark.parametrize("keys", RANKS_KEYS, ids=str)
def test_two_ranks_follow_eager_blocks(ranks, keys) -> None:
    eager, *compiled = run_all(ranks, 2, "toy", ("min", "40%", "100%"), **keys)
    assert_same_bits(compiled)
    for run in compiled:
        assert_follows(run, eager)
        assert run["breaks"] == 0 and run["graphs"] == (1, 1)


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bf16_follows_eager_blocks_to_its_rounding(ranks, num_ranks) -> None:
    """A fused kernel keeps in fp32 what separate ones round to bf16 (2^-9 relative)."""
    eager, *compiled = run_all(ranks, num_ranks, "toy", ("min", "40%", "100%"), bf16={"enabled": True})
    assert_same_bits(compiled)
    for run in compiled:
        assert_follows(run, eager, loss=1e-2, moment=5e-2)
        assert run["breaks"] == 0 and run["graphs"] == (1, 1)


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize("model", ["outside", "reentrant", "inside"])
def test_recomputation_around_a_block_and_in_it(ranks, model) -> None:
    eager, *compiled = run_all(ranks, 1, model, ("min", "100%"))
    assert_same_bits(compiled)
    for run in compiled:
        assert_follows(run, eager)
        first, last = run["graphs"]
        assert run["breaks"] == 0 and first == last <= 2, "two: reentrant, without and with gradients"


OTHERS = [{"offload_activations": True}, {"far_states": "stream"}, {"overlap_update": True}]


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize("keys", OTHERS, ids=str)
def test_compiled_blocks_with_other_techniques(ranks, keys) -> None:
    eager, compiled = run_all(ranks, 1, "toy", ("min",), **keys)
    assert_follows(compiled, eager)
    assert compiled["breaks"] == 0 and compiled["graphs"] == (1, 1)


@needs_compiler
@pytest.mark.deep
def test_an_evaluation_after_the_steps(ranks) -> None:
    eager, compiled = run_all(ranks, 1, "toy", ("min",), evaluates=True)
    assert_follows(compiled, eager)
    assert compiled["breaks"] == 0 and len(compiled["losses"]) == STEPS + 1


@needs_compiler
@pytest.mark.deep
def test_a_graph_that_the_model_itself_ends_goes_on(ranks) -> None:
    eager, compiled = run_all(ranks, 1, "deciding", ("min",))
    assert_follows(compiled, eager)
    assert compiled["breaks"] > 0, "this counter would count the engine's as well"


# ------------------------------------------------------------------- which modules, without compiling


class Stages(nn.Module):
    """Two lists: a small one, and a larger one of blocks with lists inside."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.stages = nn.ModuleList(nn.Sequential(toy.Block(8), nn.ModuleList([toy.Block(8)])[0]) for _ in range(2))


def test_blocks_are_the_elements_of_the_list_with_most_parameters() -> None:
    assert list(find_blocks(toy.Toy(), "block")) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(find_blocks(Stages(), "block")) == ["stages.0", "stages.1"]
    assert find_blocks(toy.Toy(), "none") == {}


def test_blocks_are_named_by_their_classes_the_outermost_counts() -> None:
    assert list(find_blocks(Stages(), ["Block"])) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert list(find_blocks(Stages(), ["Block", "Sequential"])) == ["stages.0", "stages.1"]


def test_a_block_owns_all_parameters_below_it_and_the_modules_inside_none() -> None:
    model = toy.Toy(2)
    found = {name: len(params) for name, _, params in owners(model, find_blocks(model, "block"))}
    assert found == {"": 0, "embed": 1, "blocks": 0, "blocks.0": 6, "blocks.1": 6, "norm": 2, "head": 1}
    assert "blocks.0.up" in {name for name, _, _ in owners(model, {})}


@needs_compiler  # else that is the line
@pytest.mark.parametrize("compile, line", [
    ("block", r"compile is block, but the model has no torch.nn.ModuleList of repeated modules: name their classes"),
    (["Layer"], r"compile names Layer, but no module of the model has this class: it has .*Linear"),
])
def test_a_model_without_such_blocks_is_one_line(compile, line) -> None:
    with pytest.raises(ConfigError, match=line):
        pstar.plan_engine(lambda: nn.Sequential(nn.Linear(4, 4)), {"compile": compile})


@pytest.mark.parametrize("compile", ["blocks", "auto", [], ["Block", 1]])
def test_another_value_is_one_line(compile) -> None:
    with pytest.raises(ConfigError, match=r"compile is .*; choose none or block, or give a list of classes"):
        pstar.load_config({"compile": compile})


def test_deepspeeds_object_of_the_same_name_is_still_ignored() -> None:
    assert pstar.load_config({"compile": {"enabled": True}}).compile == "none"
    assert pstar.load_config({"compile": "block", "optimizer": {"type": "Adam"}}).optimizer.type == "Adam", \
        "the key makes no file of DeepSpeed's"
    with pytest.raises(ConfigError, match="deepcompile"):
        pstar.load_config({"compile": {"deepcompile": True}})


@pytest.mark.parametrize("start", [lambda func: pstar.initialize_engine(func, 0, BLOCK),
                                   lambda func: pstar.plan_engine(func, BLOCK)], ids=["start", "plan"])
def test_without_a_compiler_one_line_before_the_model_is_built(monkeypatch, start) -> None:
    def model_func() -> nn.Module:
        raise AssertionError("the model is built")

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile is block, which needs a C\+\+ compiler: install one .* or set compile"):
        start(model_func)


def test_counted_tensors_count_until_they_are_freed() -> None:
    made = [torch.empty(1_000), torch.empty(500)]    # before: as if without an operation
    with LiveBytes(lambda address: address == made[1].data_ptr()) as live:
        live.count([made[0], made[0].view(10, 100), None, made[1]])
        assert live.now == live.peak == 4_000, "each memory once, and no chunk"
        live.count([made[0]])
        del made[0]
        assert live.now == 0 and live.take_peak() == 4_000 and live.peak == 0
