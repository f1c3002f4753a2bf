"""Updates that begin during backward (speculative_update): not one bit depends on them, and their log keeps to its budget.

The oracle is the same run without them. FAULTS removes each rule in turn: the test that needs it must fail.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pstar
from pstar.checkpoint import state
from pstar.chunks import step
from pstar.layout.budget import model_data_bytes
from pstar.memory.block_log import BlockLog
from pstar.memory.tier import NEAR, Tier
from pstar.optim.chunked_adam import ChunkedAdam
from pstar.optim.speculative import Speculation
from tests import toy
from tests.limits import HANGS_S, wait_until

STEPS = 7
WHOLE = {"speculative_update": True, "speculative_log": "75%"}    # 12 of 16 bytes: all that updates overwrite
CLIPPING = {"never": 100.0, "always": 0.05, "sometimes": 3.0, "overflow": 100.0}
INFINITE = (2, 4)
"""Steps with a loss that is not finite, in the case "overflow"."""


def build(model_func: Callable[[], nn.Module] = toy.Toy, speculates: bool = True, **keys):
    base = {"near_budget": "min", "default_chunk_size": 5_000, "gradient_clipping": 100.0}
    return toy.build(model_func, **base | (WHOLE if speculates else {}) | keys)


def scale_of(step: int, clipping: str) -> float:
    """The factor of a step's loss: norms of about 1.3 or 13 in the case "sometimes"."""
    if clipping == "overflow":
        return float("inf") if step in INFINITE else 1.0
    return (0.1, 1.0)[step in (3, 5)] if clipping == "sometimes" else 1.0


def run(model, optimizer, clipping: str = "never", num_micros: int = 1, steps: range = range(STEPS),
        between: Callable[[int], object] = lambda step: None) -> tuple[list[float], list[float]]:
    """(losses, norms); between(step) is called between backward and step()."""
    losses, norms = [], []
    for number in steps:
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = model(*toy.share(number, 0, 1, micro, num_micros))
            losses.append(loss.item())
            model.backward(loss * scale_of(number, clipping))
        between(number)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return losses, norms


def bits(*values: Any) -> Any:
    """Values that are equal exactly if all bits are: NaN equals itself. Tensors become digests, or a red test would print
    megabytes."""
    flat = []
    for value in values:
        if isinstance(value, torch.Tensor):
            content = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            flat.append(hashlib.sha256(content).hexdigest())
        elif isinstance(value, dict):
            flat += [item for key in sorted(value) for item in (key, bits(value[key]))]
        elif isinstance(value, list | tuple):
            flat += [bits(each) for each in value]
        else:
            flat.append(repr(value))
    return tuple(flat)


def same(first, second, **keys) -> None:
    """Asserts that two runs of (model, optimizer) give the same losses, norms, parameters and moments."""
    assert bits(run(*first, **keys)) == bits(run(*second, **keys))
    assert bits(*first[0].gather_state()) == bits(*second[0].gather_state())


# ---------------------------------------------------------------------------------------------- placement and clipping

@cache
def oracle(precision: str, clipping: str, num_micros: int) -> tuple[Any, list[float]]:
    """(bits, norms) of the run without speculation."""
    model, optimizer = build(speculates=False, **keys_of(precision, clipping, num_micros))
    told = run(model, optimizer, clipping, num_micros)
    return bits(told, *model.gather_state()), told[1]


def keys_of(precision: str, clipping: str, num_micros: int) -> dict[str, Any]:
    fp16 = {"enabled": precision == "fp16", "initial_scale_power": 10, "hysteresis": 1}
    return {"bf16": {"enabled": precision == "bf16"}, "fp16": fp16, "gradient_clipping": CLIPPING[clipping],
            "gradient_accumulation_steps": num_micros}


@pytest.mark.filterwarnings("ignore:.*gradients were not finite")
@pytest.mark.pairs
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("near", ["min", "40%", "100%"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_micros", [1, 2])
def test_no_bit_depends_on_when_updates_begin(clipping, precision, near, prefetch, num_micros):
    expected, norms = oracle(precision, clipping, num_micros)
    model, optimizer = build(near_budget=near, prefetch=prefetch, **keys_of(precision, clipping, num_micros))
    told = run(model, optimizer, clipping, num_micros)
    assert bits(told, *model.gather_state()) == expected
    speculation, log = optimizer.speculation, model._chunks.log
    assert len(log) == log.tier.used_bytes == 0 and log.tier.reserved_bytes <= log.tier.budget_bytes
    if near == "100%":    # all updates are computed near
        assert speculation.begun == 0
        return
    assert 0 < log.tier.peak_bytes <= log.tier.budget_bytes
    clipped = [norm > CLIPPING[clipping] for norm in norms]
    assert (all(clipped), any(clipped)) == {"always": (True, True), "sometimes": (False, True)}.get(clipping, (False, False))
    if clipping == "always":
        assert speculation.begun == speculation.undone > 0
    else:
        assert 0 <= speculation.undone < speculation.begun
        assert (speculation.undone > 0) == (clipping != "never")


@pytest.mark.each
@pytest.mark.parametrize("keys", [
    {"overlap_update": True}, {"simulated_link": 2e7}, {"near_states": "fill", "near_budget": "45%"},
    {"eviction_policy": "lru"}, {"near_memory": "1500KiB"}, {"near_memory": "1100KiB"}, {"offload_activations": True},
    {"far_budget": "30%", "disk": True}, {"far_budget": "min"}, {"default_chunk_size": "auto"},
    {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "state_bits": 8}}}], ids=str)
@pytest.mark.parametrize("clipping", ["sometimes", "never"])
def test_other_settings_change_no_bit(keys, clipping, tmp_path):
    keys = dict(keys)
    if keys.pop("disk", False):
        keys["disk_path"] = str(tmp_path)
    keys["gradient_clipping"] = CLIPPING[clipping]
    model, optimizer = build(**keys)
    same(build(speculates=False, **keys), (model, optimizer), clipping=clipping)
    assert optimizer.speculation.begun > 0


# ---------------------------------------------------------------------------------------------- the log

def test_a_full_log_lets_the_other_groups_wait_and_never_exceeds_its_budget(monkeypatch):
    """The budget is checked after every operation of the log's tier."""
    used: list[int] = []
    check = Tier._check

    def checked(self: Tier) -> None:
        check(self)
        if self.name == "log":
            used.append(self.reserved_bytes)

    monkeypatch.setattr(Tier, "_check", checked)
    begun = []
    for log in ("75%", "40%", "20%"):
        model, optimizer = build(speculative_log=log)
        same(build(speculates=False), (model, optimizer))
        budget = model._plan.log_budget
        assert budget < model_data_bytes(model.layout, model.costs) and used and max(used) <= budget
        used.clear()
        begun.append(optimizer.speculation.begun)
    assert begun[0] > begun[1] > begun[2] > 0


def test_a_log_of_auto_is_a_quarter_of_the_model_data():
    model, _ = toy.build(near_budget="min", default_chunk_size=5_000, speculative_update=True)
    assert model._chunks.log.tier.budget_bytes == model_data_bytes(model.layout, model.costs) // 4


@pytest.mark.parametrize("keys, message", [
    ({"speculative_log": "25%"}, "speculative_log is given without speculative_update"),
    ({"speculative_update": True, "find_unused_parameters": True}, "find_unused_parameters"),
    ({"speculative_update": True, "far_states": "stream"}, "far_states is stream"),
    ({"speculative_update": True, "speculative_log": 1000}, "speculative_log 1000 .* is too small"),
    ({"speculative_update": True, "speculative_log": "a lot"}, "is no amount of memory"),
    ({"speculative_update": 1}, "'speculative_update' must be bool")])
def test_settings_that_cannot_work_are_refused_in_one_line(keys, message):
    with pytest.raises(pstar.PstarError, match=message) as error:
        toy.build(near_budget="min", default_chunk_size=5_000, **keys)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------- what it is for

def test_parameters_come_back_near_during_backward_and_no_byte_more_moves():
    """Behind a link the next forward finds them near. Without speculation they are copied after backward."""
    during, moved = [], []
    for speculates in (False, True):
        model, optimizer = build(lambda: toy.Toy(10), speculates, near_budget="30%")
        for number in range(4):
            optimizer.zero_grad()
            loss = model(*toy.batch(number))
            before = model.ledger.moved_bytes["far to near"]
            model.backward(loss)
            now = model.ledger.moved_bytes["far to near"] - before
            optimizer.step()
        during.append(now)
        moved.append(model.ledger.step_bytes)
    assert moved[0] == moved[1]
    assert during[0] == 0 and during[1] > 0.9 * moved[1]["far to near"]


class Uneven(toy.Toy):
    """Every third block is twice as large: chunks of different sizes."""

    def __init__(self):
        super().__init__(9)
        for block in self.blocks[::3]:
            block.up, block.down = nn.Linear(toy.WIDTH, 8 * toy.WIDTH), nn.Linear(8 * toy.WIDTH, toy.WIDTH)


@pytest.mark.parametrize("near", ["12%", "16%"])
def test_what_comes_back_early_pushes_nothing_out_that_backward_still_reads(near):
    """A gradient is created before its group's parameters leave: for a moment near holds both."""
    moved = []
    for speculates in (False, True):
        model, optimizer = build(Uneven, speculates, near_budget=near, default_chunk_size=6_000)
        toy.train(model, optimizer, 4)
        moved.append(model.ledger.step_bytes)
    assert moved[0] == moved[1] and moved[0]["far to near"] > 1.2 * moved[0]["near to far"]


@pytest.mark.parametrize("near", ["17%", "25%"])
def test_each_group_comes_back_as_soon_as_it_is_updated_and_leaves_room_for_the_gradient_under_way(near):
    """The room of gradients that will have left by the next forward is free for it, but not that of the last one: whoever
    took it would wait for its copy. At 17 % near has room for two thirds of the groups: those that this backward still reads
    come first, and the last ones of the next forward stay away."""
    model, optimizer = build(lambda: toy.Toy(10), near_budget=near)
    toy.train(model, optimizer, 3)
    store, gradients, completed, came = model._store, model._chunks.gradients, [], {}
    begin, complete = store._begin, gradients._complete

    def begins(block, tier, *more):
        begin(block, tier, *more)
        group = block.key[1]
        if tier == NEAR and group in completed:    # updated: it comes for the next forward
            came[group] = len(completed)
            under_way = 4 * model.layout.groups[completed[-1]].piece_elems
            assert model.near.used_bytes + under_way <= model.near.budget_bytes

    def completes(unit):
        completed.append(unit.spec.group)
        complete(unit)

    store._begin, gradients._complete = begins, completes
    optimizer.zero_grad()
    model.backward(model(*toy.batch(3)))
    expected = completed[8 if near == "17%" else 1 : -2]    # the last two are the embedding and the last norm
    assert list(came) == expected and len(expected) > 10
    assert all(came[group] == completed.index(group) + 1 for group in expected), "before the next group is complete"


def test_gradients_of_the_first_layers_overtake_those_that_are_needed_later():
    """Behind a slow link: backward ends where the next forward begins. What the program waits for comes before both."""
    model, optimizer = build(lambda: toy.Toy(10), near_budget="60%", optimizer={"params": {"use_hybrid_adam": False}})
    toy.train(model, optimizer, 3)
    links, copies, ran, go = model._store.links, [], [], threading.Event()
    submit = links.submit

    def submits(source, target, job, num_bytes, before, record, needed):
        def held_back():
            assert go.wait(HANGS_S)
            ran.append(needed)
            job()

        if source != NEAR:
            return submit(source, target, job, num_bytes, before, record, needed)
        copies.append(submit(source, target, held_back, num_bytes, before, record, needed))
        if len(copies) == 16:
            go.set()
        return copies[-1]

    links.submit = submits
    optimizer.zero_grad()
    model.backward(model(*toy.batch(3)))
    wait_until(lambda: all(copy.done for copy in copies), "all gradients in far")    # Handle.wait would make one urgent
    optimizer.step()
    waited_for = {copy.urgency[1] for copy in copies if not copy.urgency[0]}
    queued = [copy.urgency[1] for copy in copies[:16] if copy.urgency[1] not in waited_for | {ran[0]}]
    assert len(queued) > 8 and queued == sorted(queued, reverse=True)
    assert [each for each in ran if each in queued] == sorted(queued)


def test_after_wrong_steps_speculation_pauses_and_after_a_right_one_it_does_not():
    model, optimizer = build(gradient_clipping=1e-3)
    begun = []
    for number in range(20):
        run(model, optimizer, steps=range(number, number + 1))
        begun.append(optimizer.speculation.begun)
    steps = [number for number in range(1, 20) if begun[number] > begun[number - 1]]
    assert [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)] == [2, 3, 5]
    optimizer.clip_norm = 1e3
    run(model, optimizer, steps=range(20, 40))
    assert optimizer.speculation.undone == begun[-1] < optimizer.speculation.begun
    optimizer.clip_norm = 1e-3
    run(model, optimizer, steps=range(40, 43))
    assert optimizer.speculation._next_pause == 4, "the first pause after a right step is one step long again"


# ---------------------------------------------------------------------------------------------- models

class Twice(nn.Module):
    """A layer that runs twice, a tied head, a parameter that no step uses, and a detached weight that backward reads."""

    def __init__(self, mode: str):
        super().__init__()
        self.mode = mode
        self.embed = nn.Embedding(toy.VOCAB, toy.WIDTH)
        self.blocks = nn.ModuleList(toy.Block(toy.WIDTH) for _ in range(3))
        self.unused = nn.Linear(toy.WIDTH, toy.WIDTH)
        self.head = nn.Linear(toy.WIDTH, toy.VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        if self.mode == "borrowed":    # a weight of the last block, whose own gradient arrives first
            scale = self.blocks[2].up.weight.detach()[: toy.WIDTH]
            x = torch.tanh(x @ scale) * x
        for block in (*self.blocks, self.blocks[0]) if self.mode != "once" else self.blocks:
            if self.mode in ("reentrant", "recomputed"):
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
            else:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.each
@pytest.mark.parametrize("mode", ["twice", "borrowed", "reentrant", "recomputed"])
@pytest.mark.parametrize("near", ["min", "45%"])
@pytest.mark.parametrize("clipping", ["never", "sometimes"])
def test_parameters_that_backward_reads_again_are_updated_after_that(mode, near, clipping, monkeypatch):
    keys = {"near_budget": near, "gradient_clipping": CLIPPING[clipping]}
    plain = build(lambda: Twice(mode), False, **keys)
    restored: list[int] = []
    restore = BlockLog.restore
    monkeypatch.setattr(BlockLog, "restore", lambda self, group: restored.append(group) or restore(self, group))
    model, optimizer = build(lambda: Twice(mode), **keys)
    same(plain, (model, optimizer), clipping=clipping)
    assert optimizer.speculation.begun > 0
    assert len(restored) == optimizer.speculation.undone, "the trace knows all uses: backward itself undoes nothing"


def test_a_use_that_the_trace_does_not_know_undoes_the_update():
    """A layer that one step uses twice, unlike the recorded one."""
    def make() -> Twice:
        return Twice("once")

    def loop(model, optimizer) -> Any:
        return bits(*(run(model, optimizer, steps=range(number, number + 1), between=lambda step: None)
                      for number in range(4) if not setattr(model.module, "mode", "twice" if number == 2 else "once")))

    plain, early = build(make, False), build(make)
    assert loop(*plain) == loop(*early)
    assert bits(*plain[0].gather_state()) == bits(*early[0].gather_state())


def groups(module: nn.Module) -> list[dict]:
    """Two parameter groups, of which one has no decay and another rate."""
    matrices = [param for param in module.parameters() if param.dim() > 1]
    vectors = [param for param in module.parameters() if param.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]


def grouped(speculates: bool):
    torch.manual_seed(0)
    config = toy.config(near_budget="min", default_chunk_size=5_000, gradient_clipping=100.0) | (WHOLE if speculates else {})
    return pstar.initialize_engine(toy.Toy, 0, config, param_groups=groups)


def test_parameter_groups_and_a_schedule_of_the_rate():
    results = []
    for speculates in (False, True):
        model, optimizer = grouped(speculates)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
        for number in range(5):
            told = run(model, optimizer, steps=range(number, number + 1))
            schedule.step()
        results.append(bits(told, *model.gather_state()))
    assert results[0] == results[1]
    assert optimizer.speculation.undone == 0 < optimizer.speculation.begun


class Mixed(toy.Toy):
    """Some parameters in no chunk, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        pstar.exclude(self.blocks[1])
        self.blocks[0].up.weight.requires_grad_(False)


@pytest.mark.parametrize("clipping", ["never", "sometimes"])
def test_parameters_outside_of_chunks_wait_and_count_in_the_norm(clipping):
    keys = {"gradient_clipping": CLIPPING[clipping]}
    model, optimizer = build(Mixed, **keys)
    same(build(Mixed, False, **keys), (model, optimizer), clipping=clipping)
    assert (optimizer.speculation.undone > 0) == (clipping == "sometimes") and optimizer.speculation.begun > 0


# ---------------------------------------------------------------------------------------------- between backward and step

def change_rate(model, optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def change_decay(model, optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] += 0.1


def change_betas(model, optimizer) -> None:
    group = optimizer.param_groups[0]
    group["betas"] = list(group["betas"])
    group["betas"][0] -= 0.1


def evaluate(model, optimizer) -> list:
    model.eval()
    with torch.no_grad():
        logits = model(toy.batch(99)[0]).clone()
    with torch.inference_mode():
        again = model(toy.batch(99)[0]).clone()
    model.train()
    return [logits, again]


def read_state(model, optimizer) -> list:
    return [*model.gather_state()]


def load_weights(model, optimizer) -> None:
    """Without reading them first."""
    generator = torch.Generator().manual_seed(5)
    model.load_state({name: 0.1 * torch.randn(shape, generator=generator)
                      for name, shape in model._chunks.parameters.shapes.items()})


def drop(model, optimizer) -> None:
    """The step of these gradients never comes: another batch is taken."""
    optimizer.zero_grad()
    assert not model._chunks.log
    model.backward(model(*toy.batch(77)))


BETWEEN = (change_rate, change_decay, change_betas, evaluate, read_state, load_weights, drop)


def loop_with(what: Callable, model, optimizer) -> Any:
    """The bits of a run in which `what` happens between backward and step(), and how many updates were early then."""
    told, early = [], []

    def between(number: int) -> None:
        if number in (3, 4):
            early.append(0 if optimizer.speculation is None else len(model._chunks.log))
            told.append(what(model, optimizer))

    told.append(run(model, optimizer, between=between))
    return bits(told, *model.gather_state()), early


@pytest.mark.parametrize("what", BETWEEN, ids=lambda what: what.__name__)
def test_what_happens_between_backward_and_step_sees_the_old_states(what):
    expected, _ = loop_with(what, *build(speculates=False))
    found, early = loop_with(what, *build())
    assert found == expected and max(early) > 0


def test_a_list_of_betas_that_the_program_changes_in_place():
    def loop(model, optimizer) -> Any:
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]

        def between(number: int) -> None:
            optimizer.param_groups[0]["betas"][0] -= 0.05

        return bits(run(model, optimizer, between=between), *model.gather_state())

    assert loop(*build(speculates=False)) == loop(*build())


def test_a_checkpoint_between_backward_and_step_has_the_old_states(tmp_path):
    def loop(model, optimizer, folder) -> Any:
        run(model, optimizer, between=lambda number: number == 3 and model.save_checkpoint(folder))
        fresh, its_optimizer = build(speculates=False)
        fresh.load_checkpoint(folder)
        states = bits(*fresh.gather_state(), *model.gather_state())
        model.load_checkpoint(folder)
        return states, bits(run(model, optimizer, steps=range(4, 6)), run(fresh, its_optimizer, steps=range(4, 6)))

    assert loop(*build(speculates=False), tmp_path / "plain") == loop(*build(), tmp_path / "early")


def test_an_exception_in_backward_leaves_nothing_behind():
    class Broken(toy.Toy):
        broken = False

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(inputs)
            if self.broken:
                x.register_hook(lambda grad: 1 / 0)    # after all blocks
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    model, optimizer = build(Broken)
    expected = build(Broken, False)
    first = run(model, optimizer, steps=range(3))
    model.module.broken = True
    with pytest.raises(ZeroDivisionError):
        run(model, optimizer, steps=range(3, 4))
    assert len(model._chunks.log) > 0
    model.module.broken = False
    rest = run(model, optimizer, steps=range(3, 6))
    plain = run(*expected, steps=range(3)), run(*expected, steps=range(3, 6))
    assert bits(first, rest) == bits(*plain)
    assert bits(*model.gather_state()) == bits(*expected[0].gather_state())


# ---------------------------------------------------------------------------------------------- each rule is needed

@dataclass(frozen=True)
class Fault:
    """A line whose removal must turn a test red."""

    where: Any
    method: str
    line: str
    without: str
    check: Callable[[], object]

    def __str__(self) -> str:
        return f"{self.method}: {self.line.strip()}"


def between_check(what: Callable) -> Callable[[], None]:
    return lambda: test_what_happens_between_backward_and_step_sees_the_old_states(what)


def matrix(clipping: str, near: str = "min") -> Callable[[], None]:
    return lambda: test_no_bit_depends_on_when_updates_begin(clipping, "fp32", near, 2, 1)


FAULTS = (
    Fault(step.Chunks, "_need", "self._undo_update(unit)", "pass", between_check(evaluate)),
    Fault(state, "read_piece", "optimizer.undo_early(group)", "pass", between_check(read_state)),
    Fault(state, "write_span", "optimizer.undo_early(group)", "pass", between_check(load_weights)),
    Fault(Speculation, "settle", "!= (self._updates", "!= early and (self._updates", between_check(change_rate)),
    Fault(Speculation, "settle", "!= (self._updates", "!= early and (self._updates", between_check(change_decay)),
    Fault(Speculation, "settle", "steps), grad_scale)]", "steps), early[1])]", matrix("always")),
    Fault(ChunkedAdam, "_options", 'tuple(group["betas"])', 'group["betas"]',
          test_a_list_of_betas_that_the_program_changes_in_place),
    Fault(ChunkedAdam, "zero_grad", "self.speculation.undo()", "pass", between_check(drop)),
    Fault(ChunkedAdam, "step", "self.speculation.undo(wrong=True)", "pass", matrix("overflow")),
    Fault(ChunkedAdam, "_apply", "self.speculation.keep(group.index)", "self._update(group, used, options, grad_scale)",
          matrix("never")),
    Fault(BlockLog, "record", "self.store.links.copy(copy, buffers[key])", "pass", matrix("always")),
    Fault(BlockLog, "restore", "self.store.mark_written(key, FAR)", "pass", matrix("overflow", "40%")),
    Fault(BlockLog, "restore", "self.tier.release(copy)", "pass", matrix("always")),
    Fault(BlockLog, "__init__", "budget_bytes)", "2 * budget_bytes)",
          lambda: test_a_full_log_lets_the_other_groups_wait_and_never_exceeds_its_budget(pytest.MonkeyPatch())),
    Fault(Speculation, "_is_used_again", "schedule.trace.next_use(key, schedule.moment) < len(schedule.trace)", "False",
          lambda: test_parameters_that_backward_reads_again_are_updated_after_that("borrowed", "min", "never",
                                                                                  pytest.MonkeyPatch())),
    Fault(Speculation, "_end", "2 * self._next_pause", "1",
          test_after_wrong_steps_speculation_pauses_and_after_a_right_one_it_does_not),
)


@pytest.mark.filterwarnings("ignore:.*gradients were not finite")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_without_a_rule_a_test_fails(fault, monkeypatch):
    original = inspect.getattr_static(fault.where, fault.method)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(fault.line) == 1, f"{fault} is there {source.count(fault.line)} times"
    space: dict = {}
    exec(source.replace(fault.line, fault.without), inspect.getmodule(original).__dict__, space)
    monkeypatch.setattr(fault.where, fault.method, space[fault.method])
    with pytest.raises((AssertionError, pstar.PstarError)):
        fault.check()
