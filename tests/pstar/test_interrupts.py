"""Ctrl-C at any line of the engine: the program catches it and goes on, with the bits of a run without it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import pstar
from pstar.chunks import interrupts
from tests import toy

STEPS, STOPPED_AT, TRIES = 4, 2, 12
MIN = {"near_budget": "min", "default_chunk_size": 5_000}
QUICK = {"near min": MIN, "all near": {}}
DEEP = {
    "near_memory": {"near_memory": 4_000_000},
    "slow link": MIN | {"simulated_link": 3e7, "prefetch": 2},
    "speculative": MIN | {"speculative_update": True, "prefetch": 2},
    "overlap": MIN | {"overlap_update": True, "prefetch": 2},
    "offload": MIN | {"offload_activations": True},
    "bf16": MIN | {"bf16": {"enabled": True}},
    "micro-steps": MIN | {"gradient_accumulation_steps": 2},
    "schedule": MIN | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
}
ENGINE = str(Path(pstar.__file__).parent)


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    assert not interrupts.waiting


class CtrlC:
    """Inside, SIGINT comes before the line with this number of those of the engine that this thread runs; 0: it never comes.

    Attributes:
        lines: how many lines the engine has run.
        place: the file and line at which the signal came.
    """

    def __init__(self, number: int):
        self.number, self.lines, self.place = number, 0, "nowhere"

    def __enter__(self) -> CtrlC:
        self._before = sys.gettrace()
        sys.settrace(self._function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _function(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        return self._line if frame.f_code.co_filename.startswith(ENGINE) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable:
        self.lines += event == "line"
        if event == "line" and self.lines == self.number:
            self.place = f"{frame.f_code.co_filename.removeprefix(ENGINE)}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        return self._line


def step(model: pstar.Engine, optimizer: torch.optim.Optimizer, number: int, by_engine: bool) -> float:
    num_micros, total = model.config.gradient_accumulation_steps, 0.0
    optimizer.zero_grad()
    for micro in range(num_micros):
        loss = model(*toy.share(number, 0, 1, micro, num_micros))
        if by_engine:
            model.backward(loss)
        else:
            (loss / num_micros).backward()
        total += loss.item() / num_micros
    optimizer.step()
    return total


def train(keys: dict, ctrl_c: CtrlC, by_engine: bool = True,
          between: Callable = lambda model: None) -> tuple[list[float | None], dict[int, dict[str, torch.Tensor]]]:
    """Of a program that goes on after Ctrl-C: the loss of each step and of an evaluation at the end, None for a step that
    Ctrl-C ended after its update; and the weights by the number of updates, at Ctrl-C and around the step at which it comes.

    The program counts the updates with the optimizer: it has no other way to know whether the step had its update.
    """
    model, optimizer = toy.build(**keys)
    losses: dict[int, float] = {}
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for _ in range(STEPS + 2):
        number = max(optimizer.steps.values())
        if number in (STOPPED_AT, STOPPED_AT + 1):
            weights[number] = model.gather_state()[0]
        if number == STEPS:
            break
        try:
            if number == STOPPED_AT and ctrl_c.place == "nowhere":
                with ctrl_c:
                    between(model)
                    losses[number] = step(model, optimizer, number, by_engine)
            else:
                losses[number] = step(model, optimizer, number, by_engine)
        except KeyboardInterrupt:
            model.train()
    with torch.no_grad():
        losses[STEPS] = model.eval()(*toy.share(STEPS, 0, 1)).item()
    return [losses.get(number) for number in range(STEPS + 1)], weights


def spread(lines: int) -> list[int]:
    """TRIES numbers from 1 to `lines`, about as far from each other, but not on the same line of each layer."""
    return [1 + (lines * number // TRIES + 7 * number) % lines for number in range(TRIES)]


def check_at_all_lines(keys: dict, **options) -> None:
    whole = CtrlC(0)
    expected, its_weights = train(keys, whole, **options)
    assert whole.lines > 300
    for number in spread(whole.lines):
        ctrl_c = CtrlC(number)
        found, weights = train(keys, ctrl_c, **options)
        assert ctrl_c.place != "nowhere"
        assert found == [None if ours is None else loss for loss, ours in zip(expected, found, strict=True)], ctrl_c.place
        assert found.count(None) <= 1 and found[STEPS] is not None
        for number, at_the_time in weights.items():
            assert all(torch.equal(value, its_weights[number][name]) for name, value in at_the_time.items()), ctrl_c.place


@pytest.mark.parametrize("by_engine", [True, False], ids=["model.backward", "loss.backward"])
@pytest.mark.parametrize("keys", [*(pytest.param(keys, id=name) for name, keys in QUICK.items()),
                                  *(pytest.param(keys, id=name, marks=pytest.mark.deep) for name, keys in DEEP.items())])
def test_training_goes_on_with_the_same_bits(keys: dict, by_engine: bool) -> None:
    check_at_all_lines(keys, by_engine=by_engine)


@pytest.mark.deep
def test_with_a_disk(tmp_path: Path) -> None:
    check_at_all_lines(MIN | {"far_budget": "min", "disk_path": str(tmp_path)})


@pytest.mark.parametrize("what", ["save", "gather", "export", "evaluate"])
def test_while_the_state_is_read(tmp_path: Path, what: str) -> None:
    def evaluate(model: pstar.Engine) -> None:
        with torch.no_grad():
            model.eval()(*toy.share(9, 0, 1))
        model.train()

    act = {"save": lambda model: model.save_checkpoint(tmp_path / "state"), "gather": pstar.Engine.gather_state,
           "export": lambda model: model.export_weights(tmp_path / "model.safetensors"), "evaluate": evaluate}[what]
    check_at_all_lines(MIN, between=act)
    left = {"save": ["state"], "export": ["model.safetensors"]}.get(what, [])
    assert [file.name for file in tmp_path.iterdir()] == left    # an interrupted file is removed


def test_without_a_marked_function_the_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests can fail."""
    monkeypatch.setattr(interrupts, "_whole", set())
    with pytest.raises((AssertionError, pstar.StateError, pstar.BudgetError)):
        check_at_all_lines(MIN)


class Scale(nn.Module):
    """Ctrl-C comes in its forward, while its parameter is in use, if `stopped`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.stopped, self.went_on = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.stopped:
            self.stopped = False
            signal.raise_signal(signal.SIGINT)
            self.went_on = True
        return x


class Stoppable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), Scale(), nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("another_waits", [False, True])
def test_in_the_code_of_the_model_it_comes_at_once_and_leaves_nothing_behind(another_waits: bool) -> None:
    """Also if an earlier Ctrl-C waits for the engine's next operation: the two are one KeyboardInterrupt."""
    x = torch.randn(6, 16)

    def stop(model: nn.Module, step: int) -> None:
        if step == 1 and isinstance(model, pstar.Engine):
            scale = model.module.layers[1]
            scale.stopped = True
            scale.register_forward_pre_hook(lambda *_: setattr(interrupts, "waiting", another_waits and scale.stopped))
            with pytest.raises(KeyboardInterrupt):
                model(x)
            assert not scale.went_on
            assert not model._hooks._pairs and not any(model._chunks.parameters.uses.values())
            assert not torch._C._autograd._top_saved_tensors_default_hooks(True)

    toy.compare(Stoppable, lambda model, step: model(x), STEPS, before=stop, default_chunk_size=700)


def test_a_handler_of_the_program_stays() -> None:
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, handler)
    train(MIN, ctrl_c := CtrlC(500))
    assert signal.getsignal(signal.SIGINT) is handler and came == [signal.SIGINT] and ctrl_c.place != "nowhere"


def test_with_several_ranks_pythons_handler_stays() -> None:
    """A rank that waits for another one, which has ended, ends at Ctrl-C."""
    interrupts.wait_for_operations(num_ranks=2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.wait_for_operations(num_ranks=1)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
