"""Parameters that a module computes with but does not own: plain PyTorch's bits, or one line that names all."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pstar
from pstar.chunks import borrowed, hooks
from pstar.chunks.borrowed import Idle
from tests import borrowers, toy
from tests.borrowers import FLOATING_BUFFERS, PATTERNS, Deep, TiedByLinear, rows, whole
from tests.cover import quick_only

STEPS = 4


def plain_run(pattern: str, optimizer_class=toy.adamw) -> tuple[list[float], dict[str, torch.Tensor]]:
    model_func, loss_of = PATTERNS[pattern]
    return toy.plain_run(model_func, lambda model, step: loss_of(model, rows(step)), STEPS, optimizer_class)


def engine_run(pattern: str, **keys) -> tuple[list[float], dict[str, torch.Tensor], pstar.Engine]:
    """The same of the engine, and the engine; every second step evaluates before it trains."""
    model_func, loss_of = PATTERNS[pattern]
    model, optimizer = toy.build(model_func, **{"default_chunk_size": 300} | keys)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rows(step))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert not any(model._chunks.parameters.uses.values()) and not torch._C._autograd._top_saved_tensors_default_hooks(True)
    return losses, model.gather_state()[0], model


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.each
@pytest.mark.parametrize("near, prefetch", [("min", 2), ("min", 0), ("50%", 2), ("50%", 0), ("100%", 2), ("auto", 0)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_borrowed_parameter_gives_the_bits_of_plain_pytorch(pattern, near, prefetch):
    losses, weights = plain_run(pattern)
    found, state, model = engine_run(pattern, near_budget=near, prefetch=prefetch)
    assert found == losses
    assert_same(state, weights)
    if pattern != "a borrow in every other step":
        assert model.schedule.num_traced == 1, "every step after the first follows the trace"
    assert model.near.peak_bytes <= model.near.budget_bytes


@pytest.mark.filterwarnings("ignore:lazy start is not possible")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_borrowed_parameter_in_resident_steps_gives_the_bits_of_plain_pytorch(pattern):
    """All parameters are plain tensors there, and nobody asks for their bytes."""
    model_func, loss_of = PATTERNS[pattern]
    keys = {"near_budget": "100%", "near_memory": "1GiB", "default_chunk_size": 300}
    model = toy.compare(model_func, lambda model, step: loss_of(model, rows(step)), 7, **keys)
    if pattern != "a borrow in every other step":
        assert model.ledger.step_bytes.total() == 0


@pytest.mark.parametrize("pattern", quick_only(
    [pattern for pattern in PATTERNS if pattern != FLOATING_BUFFERS], "F.linear(h, self.embed.weight)",
    "another block's weight, checkpointed", "an autograd.Function that saves a parameter", "two forwards in a step"))
def test_a_borrowed_parameter_in_bf16_gives_the_same_bits_wherever_it_is(pattern):
    bf16 = {"bf16": {"enabled": True}}
    losses, weights, _ = engine_run(pattern, near_budget="auto", **bf16)
    found, state, _ = engine_run(pattern, near_budget="min", **bf16)
    assert found == losses
    assert_same(state, weights)


@pytest.mark.parametrize("pattern", ["F.linear(h, self.embed.weight)", "another block's weight"])
def test_against_the_adamw_of_torch(pattern):
    losses, _ = plain_run(pattern, torch.optim.AdamW)
    assert engine_run(pattern, near_budget="min")[0] == pytest.approx(losses, rel=1e-6)


def between_two_steps(**keys) -> nn.Module:
    model, optimizer = toy.build(TiedByLinear, near_budget="min", default_chunk_size=300, **keys)
    for step in range(2):
        model.backward(model(rows(step)))
        optimizer.step()
    return model.module


class Tensors(list):
    """A list that torch's trees take for a leaf."""


OPERATIONS = {    # operation between two steps -> its error
    "F.linear": (lambda model: F.linear(torch.ones(2, 16), model.embed.weight), "linear in no module .* embed.weight"),
    "a norm": (lambda model: [param.norm() for param in model.parameters()], "norm in no module .* parameter embed.weight"),
    "a product": (lambda model: torch.ones(2, 16) @ model.head.weight.T, r"Tensor.T in no module .* parameter head.weight"),
    "in a module": (lambda model: Outside(model)(), r"mul in Outside \(line .* parameter head.bias between two steps"),
    ".data": (lambda model: model.head.weight.data, "Tensor.data .* parameter head.weight"),
    "copy_": (lambda model: model.head.weight.copy_(torch.ones(24, 16)), "copy_ .* changes parameter head.weight in place"),
    "_foreach_mul_": (lambda model: torch._foreach_mul_(list(model.parameters()), 0.5), "changes parameter embed.weight in"),
    "out=": (lambda model: torch.neg(torch.ones(24), out=model.head.bias), "neg .* changes parameter head.bias in place"),
    "+=": (lambda model: model.head.bias.__iadd__(1), "changes parameter head.bias in place"),
    "data =": (lambda model: setattr(model.head.bias, "data", torch.ones(24)), "Tensor.data .* changes parameter head.bias"),
    "a moving average": (lambda model: torch.zeros(24).lerp_(model.head.bias, 0.1), "lerp_ .* reads parameter head.bias"),
    "a list of another class": (lambda model: torch.cat(Tensors([model.head.bias])), "cat .* reads parameter head.bias"),
    "apply": (lambda model: model.apply(lambda child: [nn.init.zeros_(p) for p in child.parameters(recurse=False)]),
              "changes parameter embed.weight in place"),
    "to": (lambda model: model.to(torch.bfloat16), "stays torch.float32, it does not become torch.bfloat16"),
    "deepcopy": (copy.deepcopy, "an engine and its module cannot be copied or pickled"),
    "deepcopy of a parameter": (lambda model: copy.deepcopy(model.head.bias), "head.bias is in a chunk and cannot"),
    "pickle": (pickle.dumps, "an engine and its module cannot be copied or pickled"),
    "pickle of a parameter": (lambda model: pickle.dumps(model.head.bias), "in a chunk and cannot be pickled"),
    "torch.save": (lambda model: torch.save(model, io.BytesIO()), "an engine and its module cannot be copied or pickled"),
    "state_dict": (lambda model: model.state_dict(), "have no state_dict"),
    "load_state_dict": (lambda model: model.load_state_dict({}), "have no state_dict"),
    "tolist": (lambda model: model.head.bias.tolist(), "tolist .* parameter head.bias"),
}


class Outside(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.models = [model]

    def forward(self) -> torch.Tensor:
        return self.models[0].head.bias * 2


@pytest.mark.parametrize("what", OPERATIONS)
def test_between_two_steps_an_operation_is_refused_in_one_line(what):
    operation, message = OPERATIONS[what]
    with pytest.raises(pstar.StateError, match=message) as caught:
        operation(between_two_steps())
    assert "\n" not in str(caught.value)


def test_between_two_steps_everything_but_bytes_can_be_asked_for():
    model = between_two_steps()
    assert isinstance(model.head.weight, nn.Parameter) and isinstance(model.head.weight, Idle)
    assert sum(param.numel() for param in model.parameters()) == sum(p.numel() for p in TiedByLinear().parameters())
    assert next(model.parameters()).device == torch.device("cpu") and model.head.weight.is_floating_point()
    assert model.head.bias.grad is None and model.head.bias.requires_grad and len(model.head.bias) == 24
    assert torch.zeros_like(model.head.weight).sum() == 0
    assert "Linear(in_features=16, out_features=24" in repr(model)
    assert repr(model.head.bias).startswith("Parameter in a chunk")
    assert list(model.named_parameters())[0][0] == "embed.weight" and model.eval() is model and model.train() is model


def test_reading_a_parameter_without_its_engine_is_an_error():
    bias = between_two_steps(prefetch=0).head.bias    # no copy goes on in the background, which would know the engine
    gc.collect()
    with pytest.raises(pstar.StateError, match="parameter head.bias has no bytes: its engine was deleted"):
        bias.sum()


def test_a_budget_that_cannot_hold_a_borrowed_parameter_is_an_error_that_names_it():
    pattern = "torch._foreach_norm(self.parameters())"
    least = pstar.plan_engine(PATTERNS[pattern][0], {"near_budget": "min", "default_chunk_size": 300}).near_budget
    message = r"_foreach_norm in AllNormsAtOnce \(line \d+ of borrowers.py\) borrows parameter layers.* near has no room"
    with pytest.raises(pstar.BudgetError, match=message):
        engine_run(pattern, near_budget=least)
    assert engine_run(pattern, near_budget="min")[2].near.budget_bytes > least, "the least that works is more here"


@pytest.mark.parametrize("near", ["min", "auto"])
def test_two_engines_whose_parameters_meet_in_one_operation(near):
    torch.manual_seed(0)
    plain = [Deep(), Deep()]
    expected = sum(model(rows(0)) for model in plain) + (plain[0].head.weight * plain[1].head.weight).mean()
    expected.backward()
    torch.manual_seed(0)
    engines = [pstar.initialize_engine(Deep, 0, toy.config(near_budget=near, default_chunk_size=300)) for _ in plain]
    (first, _), (second, _) = engines
    loss = first(rows(0)) + second(rows(0)) + (first.module.head.weight * second.module.head.weight).mean()
    assert loss.item() == expected.item()


def test_evaluation_and_direct_calls_borrow_too():
    torch.manual_seed(0)
    plain = TiedByLinear()
    model, _ = toy.build(TiedByLinear, near_budget="min", default_chunk_size=300)
    with torch.no_grad():
        assert model.eval()(rows(7)).item() == plain(rows(7)).item()
        assert model.module(rows(7)).item() == plain(rows(7)).item(), "as a method of the model's own calls it (generate)"
    norms = []
    handle = model.module.register_forward_hook(lambda module, args, out: norms.append(module.head.weight.norm()))
    with torch.inference_mode():
        assert model(rows(7)).item() == plain(rows(7)).item()
    assert norms == [plain.head.weight.norm()], "a hook of the user runs when the model is no longer in its forward"
    handle.remove()
    assert whole(model.train(), rows(7)).item() == plain(rows(7)).item()
    model.backward(model(rows(7)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_borrows_again_in_backward(reentrant, monkeypatch):
    monkeypatch.setattr(borrowers.Checkpointed, "reentrant", reentrant)
    losses, weights = plain_run("another block's weight, checkpointed")
    found, state, _ = engine_run("another block's weight, checkpointed", near_budget="min")
    assert found == losses
    assert_same(state, weights)


def bytes_without_asking(cls, func, types, args=(), kwargs=None):
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def without_checks(monkeypatch) -> None:
    """Removes the checks that refuse reads which do not ask for the bytes."""
    monkeypatch.setattr(borrowed.Lender, "refuse", lambda *_: None)
    monkeypatch.setattr(hooks.Hooks, "check_used", lambda *_: None)


@pytest.mark.filterwarnings("ignore:3 steps in a row")
@pytest.mark.parametrize("pattern", ["F.linear(h, self.embed.weight)", "another block's weight"])
def test_mutation_without_the_interception_the_numbers_are_wrong(pattern, monkeypatch):
    monkeypatch.setattr(Idle, "__torch_function__", classmethod(bytes_without_asking))
    with pytest.raises(pstar.StateError, match="without asking"):
        engine_run(pattern, near_budget="min")
    without_checks(monkeypatch)
    with pytest.raises(AssertionError):
        assert engine_run(pattern, near_budget="min")[0] == plain_run(pattern)[0]


def test_mutation_without_the_check_an_operation_between_two_steps_is_nan(monkeypatch):
    model = between_two_steps()
    monkeypatch.setattr(Idle, "__torch_function__", classmethod(bytes_without_asking))
    assert not model.layers[1].weight.norm().isfinite()


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class TakesLogarithms(Deep):
    """A module without parameters makes NaN of negative numbers, as soon as it is told to."""

    where = "nowhere"

    def __init__(self) -> None:
        super().__init__()
        self.log = Logarithm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        if self.where == "in a module":
            h = self.log(h)
        return self.head(h).square().mean() * (float("inf") if self.where == "in the model" else 1.0)


@pytest.mark.parametrize("near", ["min", "auto"])
@pytest.mark.parametrize("where, said", [
    ("in a module", r"3 steps in a row .* is log \(Logarithm\)"),
    ("in the model", r"is the model itself \(TakesLogarithms\)"),
    ("in the loss", "the outputs of all modules are finite"),
])
def test_the_first_output_that_is_not_finite_is_named_once(where, said, near):
    model, optimizer = toy.build(TakesLogarithms, near_budget=near, default_chunk_size=300)
    model.module.where = where
    caught = []
    for step in range(6):
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            loss = model(rows(step))
        caught.append([str(warning.message) for warning in now])
        model.backward(loss * float("nan") if where == "in the loss" else loss)
        optimizer.step()
    assert [len(lines) for lines in caught] == [0, 0, 0, 1, 0, 0] and re.search(said, caught[3][0])
    assert not model.module.log._forward_hooks
    model.module.where = "nowhere"
    model.backward(model(rows(0)))
    optimizer.step()
    assert not optimizer.skipped


@pytest.mark.parametrize("keys", [{"gradient_accumulation_steps": 2}, {"offload_activations": True},
                                  {"overlap_update": True}, {"far_states": "stream"}, {"near_memory": "2MiB"},
                                  {"eviction_policy": "lru"}], ids=str)
def test_borrowing_works_with_other_options_of_the_engine(keys):
    pattern = "a penalty over model.parameters() in the loop"
    if "gradient_accumulation_steps" not in keys:
        losses, weights = plain_run(pattern)
        found, state, _ = engine_run(pattern, near_budget="min", **keys)
        assert found == losses
        assert_same(state, weights)
        return
    runs = []
    for near in ("min", "auto"):
        model, optimizer = toy.build(PATTERNS[pattern][0], near_budget=near, default_chunk_size=300, **keys)
        for step in range(2):
            optimizer.zero_grad()
            for part in rows(step).chunk(2):
                model.backward(PATTERNS[pattern][1](model, part))
            optimizer.step()
        runs.append(model.gather_state()[0])
    assert_same(*runs)


@torch.jit.script
def scripted_linear(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(h, weight)


@torch.jit.script
def scripted_squares(weight: torch.Tensor) -> torch.Tensor:
    return (weight * weight).sum()


class Extension(torch.autograd.Function):
    """Computes, as a function in C++ does, without asking the class of what it is given."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight.T

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class SavesNothing(Extension):
    """The same, but saves the other factor alone."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight.T

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, = ctx.saved_tensors
        return torch.zeros_like(x), grad.T @ x


class DoesNotAsk(Deep):
    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NOT_ASKING[self.read][0](self, self.hidden(x)).square().mean()


# Kind of read that does not ask for the bytes of another module's parameter -> (the read, a regular expression of its
# error).
NOT_ASKING = {
    "torch.vmap": (lambda model, h: h.mean() * torch.vmap(torch.sum)(model.layers[1].weight),
                   r"torch.vmap in DoesNotAsk \(line \d+ of .*\) is given parameter layers.1.weight"),
    "torch.vmap in an axis": (lambda model, h: torch.vmap(torch.dot, (0, 1))(h[:, :16], model.embed.weight[:12].T.clone())
                              + torch.vmap(torch.sum, 1)(model.embed.weight).sum(), "is given parameter embed.weight"),
    "a scripted product": (lambda model, h: scripted_linear(h, model.head.weight), r"of shape \(16, 24\) \(head.weight\)"),
    "a scripted square": (lambda model, h: scripted_squares(model.layers[0].weight) + h, "read parameter layers.0.weight"),
    "an extension": (lambda model, h: Extension.apply(h, model.head.weight), "read parameter head.weight without asking"),
    "an extension that saves nothing": (lambda model, h: SavesNothing.apply(h, model.head.weight),
                                        "parameter head.weight got a gradient, but"),
}  # fmt: skip


@pytest.mark.parametrize("read", NOT_ASKING)
def test_reads_that_do_not_ask_for_a_parameters_bytes_are_refused_in_one_line(read):
    model, _ = toy.build(lambda: DoesNotAsk(read), near_budget="min", default_chunk_size=300)
    with pytest.raises(pstar.StateError, match=NOT_ASKING[read][1]) as caught:
        model.backward(model(rows(0)))
    assert "\n" not in str(caught.value) and "clone()" in str(caught.value)
    assert not model._hooks._pairs and not any(model._chunks.parameters.uses.values()), "nothing stays in use"


@pytest.mark.parametrize("read", ["a scripted product", "a scripted square", "an extension"])
def test_mutation_without_these_checks_the_loss_is_nan(read, monkeypatch):
    without_checks(monkeypatch)
    model, _ = toy.build(lambda: DoesNotAsk(read), near_budget="min", default_chunk_size=300)
    loss = model(rows(0))
    model.backward(loss)
    assert loss.isnan()


def test_a_gradient_after_zero_grad_between_forward_and_backward_is_no_mistake():
    model, optimizer = toy.build(TiedByLinear, near_budget="min", default_chunk_size=300)
    losses = []
    for step in range(3):
        loss = model(rows(step))
        optimizer.zero_grad()
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == engine_run("F.linear(h, self.embed.weight)", near_budget="min")[0][:3]


def test_a_scripted_module_is_refused_in_one_line():
    class Scripted(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = torch.jit.script(self.layers[2])

    for start in (pstar.initialize_engine, pstar.plan_engine):
        with pytest.raises(pstar.ConfigError, match=r"module layers\.2 is scripted"):
            start(Scripted, config={})
