"""Random training programs: a model, a training loop and a configuration of pstar, each a function of a seed.

A loop does what a user's program may do between two updates: evaluate, drop a loss, change the learning rate, fail, save and
go on in a new engine. It runs with plain PyTorch or with an engine, and returns all numbers that it saw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pstar
from pstar.numerics.grad_norm import clip_grad_norm_
from tests.program_models import VOCAB, FailsOnce, Model

LR, WEIGHT_DECAY = 2e-3, 0.1

Weights = dict[str, torch.Tensor]


def data(number: int, rows: int = 3, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each (rows, length); depends only on the arguments."""
    tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---- programs and configurations

EVENTS = ("evaluation", "inference mode", "dropped loss", "failed forward", "failed backward", "other lr",
          "other weight decay", "late lr", "freeze", "thaw", "gather", "save", "evaluation before backward",
          "evaluation after backward", "two forwards", "two backwards", "thrown away", "other length", "no targets",
          "late zero_grad")  # fmt: skip


@dataclass
class Program:
    """What a loop does: the events of each step, and the settings that change numbers."""

    seed: int
    num_ranks: int = 1
    steps: list[set[str]] = field(init=False)
    micro_steps: int = field(init=False)
    settings: dict[str, Any] = field(init=False)
    """Keys of the configuration that change numbers."""

    def __post_init__(self) -> None:
        draw = random.Random(7 * self.seed + 1)
        self.steps = []
        for _ in range(draw.randint(4, 9)):
            share = draw.choice([0, 0.05, 0.15])
            self.steps.append({event for event in EVENTS if draw.random() < share})
        self.micro_steps, self.adam = draw.choice([1, 1, 1, 2, 3]), draw.choice(["Adam", "AdamW", "AdamW"])
        self.clip = draw.choice([0.0, 0.0, 0.3, 1.0, 100.0])
        self.settings = {"optimizer": {"type": self.adam, "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
                         "gradient_clipping": self.clip, "gradient_accumulation_steps": self.micro_steps}
        self.precision = draw.choice(["fp32", "fp32", "fp32", "bf16", "fp16", "8-bit states", "4-bit frozen"])
        if self.precision == "bf16":
            self.settings["bf16"] = {"enabled": True}
        elif self.precision == "fp16":    # the scale begins too large: the first steps are skipped
            self.settings["fp16"] = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}
        elif self.precision == "8-bit states":
            self.settings["optimizer"]["params"]["state_bits"] = 8
        elif self.precision == "4-bit frozen":
            self.settings["frozen_bits"] = 4
        if self.num_ranks > 1:
            for events in self.steps:    # refused there: a gradient after its reduction, an error in all backwards at once
                events -= {"failed backward", "two backwards"}
            self.settings["find_unused_parameters"] = draw.random() < 0.2

    def model(self) -> Model:
        model = Model(self.seed)
        if self.num_ranks > 1 and not self.settings["find_unused_parameters"]:
            model.uses = [("checkpoint" if use == "reentrant" else use, number) for use, number in model.uses]
        return model


def placement_of(program: Program, folder: Path) -> dict[str, Any]:
    """Keys of the configuration that change no number."""
    draw = random.Random(13 * program.seed + 5)
    keys: dict[str, Any] = {
        "near_budget": draw.choice(["min", "min", "40%", "50%", "60%", "75%", "90%", "100%", "auto"]),
        "default_chunk_size": draw.choice([100, 200, 300, 500, 1000, "auto"]), "prefetch": draw.choice([0, 1, 2, 5]),
        "near_states": draw.choice(["margin", "fill"]), "far_states": draw.choice(["auto", "host", "stream"]),
    }  # fmt: skip
    for key, share, values in (("overlap_update", 0.3, [True]), ("offload_activations", 0.2, [True]),
                               ("near_memory", 0.3, [60_000, 100_000, 200_000, 10**6]),
                               ("eviction_policy", 0.2, ["lru", "fifo"]), ("simulated_link", 0.2, [1e6, 1e8])):
        if draw.random() < share:
            keys[key] = draw.choice(values)
    unused = program.settings.get("find_unused_parameters", draw.random() < 0.15)
    if unused:
        keys["find_unused_parameters"] = True
    elif draw.random() < 0.3 and keys["far_states"] != "stream":
        keys |= {"speculative_update": True, "speculative_log": draw.choice(["auto", 14_000])}
    if draw.random() < 0.15:
        keys |= {"disk_path": str(folder), "far_budget": draw.choice(["min", "60%", "auto"])}
    elif draw.random() < 0.1:
        keys["far_budget"] = draw.choice(["min", "80%"])
    if draw.random() < 0.2 and program.precision != "4-bit frozen":    # an embedding outside of chunks has no codes
        keys["use_cpu_embedding"] = True
    if program.num_ranks > 1:
        keys |= draw.choice([{}, {"communication": "chunk"}, {"ownership": "sharded"}, {"ownership": "node"}])
    return keys


def calls_loss_backward(program: Program) -> bool:
    """Whether the program calls loss.backward() instead of model.backward(loss), which fp16 needs."""
    return program.precision != "fp16" and random.Random(17 * program.seed + 3).random() < 0.4


# ---- loops


class Plain:
    """A model and its Adam behind the calls of an engine."""

    def __init__(self, program: Program) -> None:
        self.program, self.module = program, made(program)
        self.optimizer = pstar.HybridAdam(self.module.parameters(), implementation="torch", lr=LR, weight_decay=WEIGHT_DECAY,
                                          adamw_mode=program.adam == "AdamW")
        self.train = self.module.train

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.program.micro_steps if self.program.micro_steps > 1 else loss).backward()

    def step(self) -> None:
        if self.program.clip:
            clip_grad_norm_([param for param in self.module.parameters() if param.grad is not None], self.program.clip)
        self.optimizer.step()

    def save_and_go_on(self) -> None:
        """Nothing: an engine that goes on from its checkpoint must do what this one does."""

    def weights(self) -> Weights:
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}


class Chunked:
    """The same with an engine. folder: for its checkpoints; by_program: the program calls loss.backward()."""

    def __init__(self, program: Program, keys: dict[str, Any], folder: Path, by_program: bool = False) -> None:
        self.program, self.keys, self.folder, self.saves = program, program.settings | keys, folder, 0
        self.by_program = by_program
        self._start()

    def _start(self) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = pstar.initialize_engine(self.program.model, 0, self.keys)
        self.module, self.train = self.model.module, self.model.train
        self.step = self.optimizer.step

    def backward(self, loss: torch.Tensor) -> None:
        Plain.backward(self, loss) if self.by_program else self.model.backward(loss)

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(*(arg.to(self.model.device) for arg in args))

    def save_and_go_on(self) -> None:
        """Saves a checkpoint and loads it in a new engine; like a program, keeps what a checkpoint does not hold."""
        self.saves += 1
        path = self.folder / f"saved {self.saves}"
        self.model.save_checkpoint(path)
        trained = {name: param.requires_grad for name, param in self.module.named_parameters()}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        random_state = torch.get_rng_state()
        self._start()
        self.model.load_checkpoint(path)
        for name, param in self.module.named_parameters():
            if param.requires_grad != trained[name]:
                param.requires_grad_(trained[name])
        for group, before in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(before)
        torch.set_rng_state(random_state)

    def weights(self) -> Weights:
        return self.model.gather_state()[0]


def made(program: Program) -> Model:
    torch.manual_seed(0)
    return program.model()


Run = Plain | Chunked


class Loop:
    """A training loop of a program; run() returns all numbers that it saw, and the final weights.

    rank: decides which data it trains on.
    """

    def __init__(self, run: Run, rank: int = 0) -> None:
        self.on, self.program, self.rank = run, run.program, rank
        self.seen: list[tuple[str, float]] = []
        self.could_train = [name for name, param in made(run.program).named_parameters() if param.requires_grad]
        self.frozen: set[str] = set()

    def run(self) -> tuple[list[tuple[str, float]], Weights]:
        self.on.train(True)
        for number, events in enumerate(self.program.steps):
            torch.manual_seed(number)
            self._before(number, events)
            self._micro_steps(number, events)
            if "late lr" in events:
                self._set(lr=LR / 2 / (number + 1))
            self.on.step()
        return self.seen, self.on.weights()

    def _before(self, number: int, events: set[str]) -> None:
        """What happens before the first micro-step of a step."""
        if "save" in events:
            self.on.save_and_go_on()
        params = dict(self.on.module.named_parameters())
        self.on.module.step.fill_(number)
        if "gather" in events:
            self.see("sum", sum(float(value.double().sum()) for _, value in sorted(self.on.weights().items())))
        if "freeze" in events:
            self.frozen |= set(self.could_train[number % 3 :: 3]) - {"head.weight", "embed.weight"}
        if "thaw" in events:
            self.frozen.clear()
        for name in self.could_train:
            if params[name].requires_grad != (name not in self.frozen):
                params[name].requires_grad_(name not in self.frozen)
        if "evaluation" in events:
            self._evaluate(1000 + number)
        if "inference mode" in events:
            self._evaluate(2000 + number, torch.inference_mode())
        if "late zero_grad" not in events:
            self.on.optimizer.zero_grad()
        if "dropped loss" in events:
            self.see("dropped", self.on(*self._data(3000 + number)).item())
        if "failed forward" in events:
            self._fail_forward(4000 + number)
        if "other lr" in events:
            self._set(lr=LR / (number + 1))
        if "other weight decay" in events:
            self._set(weight_decay=WEIGHT_DECAY / 2 * number)
        if "thrown away" in events:
            for micro in range(self.program.micro_steps):
                self.on.backward(self.on(*self._data(5000 + number + micro)))
            self.on.optimizer.zero_grad()
        torch.manual_seed(100 + number)

    def _micro_steps(self, number: int, events: set[str]) -> None:
        size = (4, 7) if "other length" in events else (3, 5)
        for micro in range(self.program.micro_steps):
            batch = self._data(10 * number + micro, *size)[: 1 if "no targets" in events else 2]
            if "failed backward" in events and micro == 0:
                self._fail_backward(batch)
                self.on.optimizer.zero_grad()
            torch.manual_seed(200 + number)
            loss = self.on(*batch)
            if "two forwards" in events:
                loss = loss + 0.5 * self.on(*self._data(6000 + 10 * number + micro))
            if "late zero_grad" in events and micro == 0:
                self.on.optimizer.zero_grad()
            if "evaluation before backward" in events:
                self._evaluate(7000 + number)
            torch.manual_seed(300 + number)
            self.see("loss", loss.item())
            self.on.backward(loss)
            if "evaluation after backward" in events:
                self._evaluate(8000 + number)
        if "two backwards" in events and self.program.micro_steps == 1:
            loss = self.on(*self._data(9000 + number, *((3, 5) if number % 2 else (4, 7)))) / 4
            self.see("second loss", loss.item())
            self.on.backward(loss)

    def _data(self, number: int, *size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return data(number + 100_000 * self.rank, *size)

    def see(self, what: str, value: float) -> None:
        self.seen.append((what, value))

    def _set(self, **options: float) -> None:
        for group in self.on.optimizer.param_groups:
            group.update(options)

    def _evaluate(self, number: int, mode: Any = None) -> None:
        self.on.train(False)
        with mode or torch.no_grad():
            self.see("evaluation", self.on(*self._data(number)).item())
        self.on.train(True)

    def _fail_forward(self, number: int) -> None:
        handle = self.on.module.head.register_forward_pre_hook(_fail)
        try:
            self.on(*self._data(number))
        except ZeroDivisionError:
            self.see("failed forward", number)
        handle.remove()

    def _fail_backward(self, batch: tuple[torch.Tensor, ...]) -> None:
        loss = self.on(*batch)
        FailsOnce.armed = True
        try:
            self.on.backward(loss)
        except ZeroDivisionError:
            self.see("failed backward", loss.item())
        FailsOnce.armed = False


def _fail(*_: object) -> None:
    raise ZeroDivisionError("on purpose")


def first_difference(expected: tuple[list, Weights], found: tuple[list, Weights]) -> str | None:
    """The first number or weight that differs between the results of two loops; None if none does."""
    for number, (one, other) in enumerate(zip(expected[0], found[0], strict=True)):
        if one != other and not (one[1] != one[1] and other[1] != other[1]):    # nan is equal to nan
            return f"number {number}: {one} and {other}"
    return next((name for name, value in expected[1].items() if not torch.equal(value, found[1][name])), None)
