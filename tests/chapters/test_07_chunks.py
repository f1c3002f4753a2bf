"""Chapter 07's own engine (chunk_plan.py, chunks.py, own_engine.py, --backend own): pstar's bits, and its loads.

Compared with pstar: prefetch 0 (a chunk comes when it is needed), next-use eviction, one process, constant room
(near_budget, no near_memory). Then both decide about the same chunks at the same moments. The bytes that are copied near
must be equal in every step, not only on average.

Compared with plain torch: AdamW rounds in another order there (see pstar/kernels/adam_formula.h); seen over 20 steps: 2e-7.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import pstar
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.optim import weight_decay_groups
from pstar.layout.layout import ModuleSpec, make_layout
from pstar.schedule.schedule import Trace
from pstar.schedule.schedule import count_loads as count_loads_of_pstar
from tests.chapters.inside import train
from tests.chapters.law import SHORT, assert_same_curve, flags_of
from tests.chapters.program import ROOT, Chapter, run
from tests.chapters.technique import Odd, Small, rows, settings_error, technique

own = technique("07_patrickstar", "own_engine")
chunks = technique("07_patrickstar", "chunks")
plan = technique("07_patrickstar", "chunk_plan")

CLIP, PEAK, STEPS = 0.5, 1e-2, 20
VOCAB, CHUNK = 200, 4096
EVERYTHING = 1 << 30


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(ModelConfig(n_layer=3, n_embd=32, n_head=2, n_positions=16, vocab_size=VOCAB))


def tokens(step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), (4, 12) int64."""
    ids = torch.randint(0, VOCAB, (4, 13), generator=torch.Generator().manual_seed(100 * step + micro))
    return ids[:, :-1], ids[:, 1:]


def steps_of(model, optimizer, accumulate: int, num_steps: int = STEPS, first: int = 1):
    """Trains on; yields (losses, norm) of each step."""
    for step in range(first, first + num_steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * step / STEPS
        optimizer.zero_grad()
        losses = []
        for micro in range(accumulate):
            loss = model(*tokens(step, micro))
            model.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        yield losses, optimizer.grad_norm


def into_chunks(module: nn.Module, near_bytes: int, chunk_elems: int = CHUNK, accumulate: int = 1):
    model = own.ChunkedModel(module, chunk_elems, near_bytes, micro_steps=accumulate)
    return model, own.ChunkedAdamW(model, weight_decay_groups(module, 0.1), PEAK, CLIP)


def configuration(near: str, accumulate: int = 1, chunk_elems: int = CHUNK) -> dict:
    params = {"lr": PEAK, "betas": [0.9, 0.95], "eps": 1e-8}
    return {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": CLIP, "default_chunk_size": chunk_elems,
            "gradient_accumulation_steps": accumulate, "near_budget": near, "prefetch": 0, "eviction_policy": "next_use"}


def least_bytes(chunk_elems: int = CHUNK) -> int:
    """The near budget of "min"."""
    found = pstar.plan_engine(gpt2, configuration("min", chunk_elems=chunk_elems))
    assert found.layout.chunk_elems - chunk_elems < 32
    return found.near_budget


# ---- the layout and the schedule, on numbers ----------------------------------------------------------------------------


def test_parameters_lie_where_pstar_puts_them() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sizes = [[draw.choice((1, 31, 32, 33, 100, 700, 2000)) for _ in range(draw.randint(0, 3))]
                 for _ in range(draw.randint(1, 12))]  # fmt: skip
        modules = [[(f"{number}.{n}", size) for n, size in enumerate(own_sizes)] for number, own_sizes in enumerate(sizes)]
        if not any(modules):
            continue
        chunk_elems = draw.choice((32, 100, 512, 1000, 4096))
        layout = make_layout([ModuleSpec("", tuple(own)) for own in modules], chunk_elems)
        expected = [(group.elems, {slot.name: slot.offset for slot in group.slots}) for group in layout.groups]
        assert plan.pack(modules, chunk_elems) == expected


def test_next_uses_are_pstar_s() -> None:
    draw = random.Random(1)
    for _ in range(100):
        trace = [draw.randrange(5) for _ in range(draw.randint(1, 12))]
        for moment in range(-1, len(trace)):
            for chunk in range(6):
                assert plan.next_use(trace, chunk, moment) == Trace(trace).next_use(chunk, moment)


def test_loads_of_a_trace_are_the_formula_s_and_pstar_s() -> None:
    for num in range(1, 9):
        there_and_back = [*range(num), *reversed(range(num))]
        for room in range(1, num + 2):
            assert plan.count_loads(there_and_back, room) == 2 * max(0, num - room)
    draw = random.Random(2)
    for _ in range(200):
        trace = [draw.randrange(6) for _ in range(draw.randint(1, 15))]
        assert plan.count_loads(trace, room := draw.randint(1, 6)) == count_loads_of_pstar(trace, room)


def test_a_step_that_differs_from_the_trace_is_not_run_on_it() -> None:
    schedule = plan.Schedule()
    for chunk in (0, 1, 2, 2, 1, 0):
        schedule.touch(chunk)
    schedule.end_step()
    schedule.touch(0)
    schedule.touch(1)
    assert schedule.victim([0, 2]) == 0, "next uses are 5 and 2"
    schedule.touch(1)  # the trace said 2
    assert schedule.victim([0, 2]) == 2, "the trace is no longer valid: 2 was used longest ago"
    schedule.end_step()
    assert schedule.trace == [0, 1, 1], "this step is the trace of the next one"


# ---- the same bits and the same loads as pstar --------------------------------------------------------------------------


def assert_as_pstar(near: str, accumulate: int, chunk_elems: int, loads: bool = True) -> int:
    """20 steps of both, losses, norms, weights and moments equal to the last bit; returns the bytes copied near in all."""
    config = configuration(near, accumulate, chunk_elems)
    found = pstar.plan_engine(gpt2, config)
    engine, its_optimizer = pstar.initialize_engine(
        gpt2, config=config, device="cpu", param_groups=lambda module: weight_decay_groups(module, 0.1)
    )
    model, optimizer = into_chunks(gpt2(), found.near_budget, chunk_elems, accumulate)
    assert len(model.data.chunks) == len(found.layout.groups) > 3
    assert [chunk.index for chunk in model.data.chunks if chunk.lives_near] == found.near_state_groups
    moved = 0
    both = zip(steps_of(model, optimizer, accumulate), steps_of(engine, its_optimizer, accumulate), strict=True)
    for step, (ours, theirs) in enumerate(both, start=1):
        assert ours == theirs, f"step {step}"
        moved += (bytes_near := model.data.step_bytes["far to near"])
        if loads:
            assert bytes_near == engine.ledger.step_bytes["far to near"], f"bytes copied near in step {step}"
    for ours, theirs in zip(model.data.gather_state(), engine.gather_state(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
    return moved


@pytest.mark.each
@pytest.mark.parametrize("chunk_elems", [CHUNK, 2000, 7000])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("near", ["min", "25%", "30%", "100%"])
def test_the_same_bits_and_loads_as_pstar(near: str, accumulate: int, chunk_elems: int) -> None:
    moved = assert_as_pstar(near, accumulate, chunk_elems)
    assert (moved == 0) == (near == "100%")


@pytest.mark.parametrize("near", ["50%", "75%"])
def test_with_some_chunks_at_home_near_the_bits_are_pstar_s(near: str) -> None:
    """Loads are not compared: in pstar such chunks are far until the first step, here they begin near."""
    assert assert_as_pstar(near, 1, CHUNK, loads=False) > 0


# ---- numbers never depend on where bytes are ----------------------------------------------------------------------------


def final_weights(module: nn.Module, near_bytes: int, chunk_elems: int, accumulate: int = 1, num_steps: int = 5):
    model, optimizer = into_chunks(module, near_bytes, chunk_elems, accumulate)
    return list(steps_of(model, optimizer, accumulate, num_steps)), model.data.gather_state()


def assert_equal_runs(ours, theirs) -> None:
    assert ours[0] == theirs[0]
    for state, expected in zip(ours[1], theirs[1], strict=True):
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_budget_and_chunk_size_change_no_bit(accumulate: int) -> None:
    expected = final_weights(gpt2(), EVERYTHING, CHUNK, accumulate)
    for chunk_elems in (1, 1000, CHUNK, 30_000):
        least = least_bytes(chunk_elems)
        for near_bytes in (least, least + 20_000, 4 * least):
            assert_equal_runs(final_weights(gpt2(), near_bytes, chunk_elems, accumulate), expected)


def follows_torch(module: nn.Module, plain: nn.Module, model, optimizer, data, accumulate: int = 1) -> None:
    """The same as torch.optim.AdamW and clip_grad_norm_ on a copy."""
    reference = torch.optim.AdamW(weight_decay_groups(plain, 0.1), lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, STEPS + 1):
        for group in [*reference.param_groups, *optimizer.param_groups]:
            group["lr"] = PEAK * step / STEPS
        reference.zero_grad()
        optimizer.zero_grad()
        for micro in range(accumulate):
            module.uses = plain.uses = micro == 0
            loss, expected = model(*data(step, micro)), plain(*data(step, micro))
            model.backward(loss)
            (expected / accumulate).backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        reference.step()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    weights, moments = model.data.gather_state()
    for name, parameter in plain.named_parameters():
        if not name.endswith("c_attn.bias"):  # the softmax ignores the keys' bias: its gradient is only rounding
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-5)
        assert (f"step.{name}" in moments) == (parameter in reference.state), f"{name}: updated, or left alone"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_follows_torch_s_adamw(accumulate: int) -> None:
    module, plain = gpt2(), gpt2()
    model, optimizer = into_chunks(module, least_bytes(), CHUNK, accumulate)
    follows_torch(module, plain, model, optimizer, tokens, accumulate)


@pytest.mark.parametrize("frozen", [False, True])
def test_unused_and_frozen_parameters_keep_their_values(frozen: bool) -> None:
    """One layer is used by one of two micro-batches, one by none, one is frozen; all share chunks with others."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Odd())
        modules[-1].layers[0].requires_grad_(not frozen)
    model, optimizer = into_chunks(modules[0], 16_000, 700, accumulate=2)
    follows_torch(*modules, model, optimizer, lambda step, micro: rows(step, micro=micro, num_micros=2), accumulate=2)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    expected = final_weights(gpt2(), least_bytes(), CHUNK)
    model, optimizer = into_chunks(gpt2(), least_bytes())
    losses = []
    for step in range(1, 6):
        losses += steps_of(model, optimizer, 1, 1, first=step)
        with torch.no_grad():
            model.eval()
            model(tokens(0)[0])
            model.train()
        with torch.inference_mode():
            model(tokens(0)[0])
    assert_equal_runs((losses, model.data.gather_state()), expected)
    before = model.memory_table()
    with torch.no_grad():
        model(tokens(0)[0])
    assert model.memory_table() == before, "what an evaluation moves is in no step"


def test_state_goes_on_in_other_chunks() -> None:
    expected = final_weights(gpt2(), EVERYTHING, CHUNK, num_steps=6)
    model, optimizer = into_chunks(gpt2(), least_bytes())
    losses = list(steps_of(model, optimizer, 1, 3))
    state = model.data.gather_state()
    torch.manual_seed(1)
    model, optimizer = into_chunks(GPT2LMHeadModel(gpt2().config), least_bytes(1000), 1000)
    model(*tokens(1))  # near copies are out of date once the state is loaded
    model.data.load_state(*state)
    losses += steps_of(model, optimizer, 1, 3, first=4)
    assert_equal_runs((losses, model.data.gather_state()), expected)
    with pytest.raises(chunks.ChunkError, match="the weights do not fit the model: other"):
        model.data.load_state({**state[0], "other": torch.zeros(1)}, state[1])


def test_a_step_without_finite_gradients_is_skipped() -> None:
    model, optimizer = into_chunks(gpt2(), least_bytes())
    list(steps_of(model, optimizer, 1, 2))
    before = model.data.gather_state()
    model.backward(model(*tokens(3)) * float("inf"))
    optimizer.step()
    assert optimizer.grad_norm != optimizer.grad_norm or optimizer.grad_norm == float("inf")
    after = model.data.gather_state()
    assert all(torch.equal(ours[name], theirs[name]) for ours, theirs in zip(after, before, strict=True) for name in theirs)


# ---- states, budget and loads -------------------------------------------------------------------------------------------


class Tower(nn.Sequential):
    """Layers of equal size, each a chunk of its own with `chunk_elems` = 32 * 32; returns a loss."""

    def __init__(self, num_layers: int) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(32, 32, bias=False) for _ in range(num_layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("num, room", [(2, 1), (4, 1), (4, 2), (6, 4), (6, 6)])
def test_loads_of_chunks_in_memory_are_the_formula_s(num: int, room: int) -> None:
    """2 (n - C) loads where nothing changes the chunks; n + (n - C) after an update far: forward then finds none near."""
    module = Tower(num)
    model, optimizer = into_chunks(module, room * 4096, 32 * 32)
    data, x = model.data, torch.randn(2, 32).requires_grad_()
    for _ in range(3):
        data.begin_step()
        for slot in [*data.slots.values(), *reversed(data.slots.values())]:
            data.acquire([slot], in_step=True)
            assert slot.state is chunks.State.COMPUTE
            data.release([slot])
        data.end_step()
    assert data.moved_bytes == {"far to near": 2 * (num - room) * 4096} or room == num
    for _ in range(3):
        optimizer.zero_grad()
        model.backward(model(x))
        optimizer.step()
        assert data.near.used_bytes == 0, "near copies are out of date"
    assert data.moved_bytes == {"far to near": (2 * num - room) * 4096, "near to far": num * 4096}


def test_the_states_of_a_parameter() -> None:
    module = Tower(3)
    model, _ = into_chunks(module, 2 * 4096, 32 * 32)
    slots, seen = list(model.data.slots.values()), []

    def look(*_) -> None:
        seen.append("".join(slot.state.name[0] for slot in slots))

    for layer in module:
        layer.register_forward_hook(look)
    look()
    loss = model(torch.randn(2, 32).requires_grad_())
    look()
    assert seen == ["RRR", "HRR", "HHR", "RHH", "RHH"], "after each layer; the third evicts the first, whose use is oldest"
    assert module[0].weight.shape == (32, 32) and module[0].weight.isnan().all(), "no old numbers where none are near"
    with pytest.raises(chunks.ChunkError, match="is released, but HOLD"):
        model.data.release([slots[2]])
    model.backward(loss)
    assert all(slot.summed and not slot.uses for slot in slots)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_near_tensors_are_counted_and_stay_within_the_budget(accumulate: int) -> None:
    """After each operation on chunks, the bytes of all near tensors add up to `near.used_bytes`."""
    kind, looked = chunks.Chunks, [0]

    def looking(operation):
        def operate(data, *args):
            done = operation(data, *args)
            held = [tensor for chunk in data.chunks for tensor in (chunk.near, chunk.grad) if tensor is not None]
            held += [chunk.home[name] for chunk in data.chunks if chunk.lives_near for name in chunks.KINDS[1:]]
            real = sum(tensor.untyped_storage().nbytes() for tensor in held)
            assert real == data.near.used_bytes <= data.near.budget_bytes
            looked[0] += 1
            return done

        return operate

    names = ("acquire", "release", "_bring", "_drop", "_make_room", "add_gradient", "_send_gradients", "end_backward",
             "end_step")
    with mock.patch.multiple(kind, **{name: looking(getattr(kind, name)) for name in names}):
        for near_bytes in (least_bytes(), least_bytes() + 20_000, 2 * least_bytes(), EVERYTHING):
            model, optimizer = into_chunks(gpt2(), near_bytes, CHUNK, accumulate)
            list(steps_of(model, optimizer, accumulate, 3))
            largest = max(chunk.num_bytes for chunk in model.data.chunks)
            assert near_bytes == EVERYTHING or model.data.near.peak_bytes > near_bytes - largest, "and it is used"
    assert looked[0] > 1000


def test_a_budget_that_is_too_small_is_one_line() -> None:
    model, _ = into_chunks(gpt2(), 20_000)
    with pytest.raises(chunks.ChunkError) as raised:
        model(*tokens(1))
    assert str(raised.value) == "near_bytes 20000 is too small: 0 are in use, and 25600 more are needed: give at least 25600"
    assert raised.value.one_line


class Three(nn.Module):
    """Computes with three parameters at once, each a chunk of its own with `chunk_elems` = 32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((32,), number)) for number in (1.0, 2.0, 3.0))

    def forward(self) -> torch.Tensor:
        return (self.a + self.b * self.c).sum()


def test_a_chunk_in_use_never_leaves() -> None:
    assert into_chunks(Three(), 3 * 128, 32)[0]().item() == 32 * 7
    model, _ = into_chunks(Three(), 2 * 128, 32)
    with pytest.raises(chunks.ChunkError, match="near_bytes 256 is too small: 256 are in use, and 128 more are needed"):
        model()
    model, _ = into_chunks(Three(), 3 * 128, 32)
    model.data.acquire([model.data.slots["b"]], in_step=True)
    with pytest.raises(chunks.ChunkError, match=r"chunk 1 cannot leave near: it is in use \(COMPUTE\)"):
        model.data._drop(model.data.chunks[1])


# ---- the tests can fail -------------------------------------------------------------------------------------------------


def test_a_chunk_in_use_that_is_evicted_is_seen() -> None:
    model, _ = into_chunks(Three(), 2 * 128, 32)
    with mock.patch.object(chunks.Chunk, "may_leave", property(lambda chunk: chunk.is_near)):
        assert model().isnan(), "no error, but NaN, which no reader takes for a result"


@pytest.mark.parametrize("wrong", [min, lambda resident, key: list(resident)[-1]], ids=["nearest use", "last"])
def test_evicting_another_chunk_than_the_farthest_next_use_is_noticed(wrong) -> None:
    with mock.patch.object(plan, "max", wrong, create=True), pytest.raises(AssertionError, match="bytes copied near in"):
        assert_as_pstar("25%", 1, 2000)


def test_missing_sums_over_micro_batches_are_noticed() -> None:
    with mock.patch.object(chunks, "_put", lambda place, value, add: place.copy_(value)), pytest.raises(AssertionError):
        assert_as_pstar("50%", 3, CHUNK)


def test_a_stale_near_copy_after_the_update_is_noticed() -> None:
    with mock.patch.object(chunks.Chunks, "end_step", lambda data: data.schedule.end_step()), pytest.raises(AssertionError):
        assert_as_pstar("50%", 1, CHUNK)


# ---- as a program -------------------------------------------------------------------------------------------------------

NAME = "07_patrickstar"


@pytest.mark.parametrize("near, accumulate", [("min", 1), ("50%", 4)])
def test_the_program_follows_the_curve_on_pstar_s_bits(ranks, curve, tmp_path: Path, near: str, accumulate: int) -> None:
    found = {}
    for backend in ("own", "pstar"):
        chapter = Chapter(NAME, tmp_path / backend)
        chapter.folder.mkdir()
        flags = (*flags_of(SHORT), "--near-budget", near, "--grad-accum", accumulate, "--prefetch", 0)
        flags = flags if backend == "pstar" else (*flags[:-2], "--backend", "own")
        train(ranks, 1, chapter, *flags)
        found[backend] = chapter.metrics()
    assert_same_curve(found["own"], curve(SHORT, accumulate), rel=1e-4)
    for ours, theirs in zip(found["own"], found["pstar"], strict=True):
        for key in ("loss", "grad_norm", "lr", "far_to_near_bytes"):
            assert ours[key] == theirs[key], f"{key} at step {ours['step']}"
    assert found["own"][-1]["valid_loss"] == found["pstar"][-1]["valid_loss"]


def test_it_resumes_its_own_pstar_s_and_chapter_00_s_runs(ranks, tmp_path: Path) -> None:
    steps = ("--max-steps", 10, "--save-every", 5, "--eval-every", 5, "--lr", "1e-2")
    kinds = {"own": (NAME, ("--backend", "own", "--near-budget", "min")), "pstar": (NAME, ("--near-budget", "min")),
             "00": ("00_single", ())}  # fmt: skip
    whole = {}
    for kind, (name, flags) in kinds.items():
        whole[kind] = Chapter(name, tmp_path / kind)
        whole[kind].folder.mkdir()
        train(ranks, 1, whole[kind], *steps, *flags)
    assert whole["own"].losses() == whole["pstar"].losses()
    for before, after in (("own", "own"), ("pstar", "own"), ("own", "pstar"), ("00", "own"), ("own", "00")):
        folder = tmp_path / f"{before} to {after}"
        shutil.copytree(whole[before].output, folder / "run")
        shutil.rmtree(folder / "run/checkpoints/step_000010")
        shutil.rmtree(folder / "run/final")
        name, flags = kinds[after]
        chapter = Chapter(name, folder)
        train(ranks, 1, chapter, *steps, *flags)
        assert chapter.metrics()[:5] == whole[before].metrics()[:5], "not begun anew"
        exact = "00" not in (before, after)
        assert chapter.losses() == pytest.approx(whole[before].losses(), rel=0 if exact else 1e-5, abs=0)
        assert (chapter.output / "final/model.safetensors").exists()


@pytest.mark.parametrize("flags, line", [
    (("--nproc", 2), "--nproc 2 needs --backend pstar: --backend own (chunks.py) is one process"),
    (("--precision", "bf16"), "--precision bf16 needs --backend pstar: --backend own (chunks.py) is for fp32"),
    (("--precision", "fp16"), "--precision fp16 needs --backend pstar"),
    (("--policy", "lru"), "--policy lru needs --backend pstar: --backend own (chunks.py) does not support it"),
    (("--prefetch", 4), "--prefetch 4 needs --backend pstar"),
    (("--far-budget", "2GiB"), "--far-budget 2GiB needs --backend pstar"),
    (("--overlap-update",), "--overlap-update needs --backend pstar"),
    (("--activation-checkpointing",), "--activation-checkpointing needs --backend pstar"),
    (("--config", "nowhere.json"), "--config nowhere.json needs --backend pstar"),
    (("--near-budget", "100KiB"), "near budget 100KiB (102400 bytes) is too small: module 'transformer.wte'"),
    (("--chunk-size", "big"), "--chunk-size big is not a number of elements"),
    (("--backend", "torch"), "--backend"),
])
def test_wrong_flags_with_backend_own_are_refused_in_one_line(capsys, tmp_path: Path, flags, line: str) -> None:
    given = Chapter(NAME, tmp_path).command("--backend", "own", *flags)[2:]
    assert line in settings_error(NAME, "engine_settings", capsys, *given)


def test_backend_own_refuses_two_processes_before_torch_is_loaded(tmp_path: Path) -> None:
    given = Chapter(NAME, tmp_path).command("--backend", "own", "--nproc", 2)[1:]
    program = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = {given!r}; runpy.run_path(sys.argv[0])"
    environment = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'chapters' / NAME)!r}); {program}"]
    assert run(environment, 2) == "error: --nproc 2 needs --backend pstar: --backend own (chunks.py) is one process\n"


def test_small_models_with_tied_weights_train() -> None:
    """The model of the other chapters' tests: a buffer, a tied head."""
    torch.manual_seed(0)
    module = Small()
    model, optimizer = into_chunks(module, 9_000, 300)
    first = model(*rows(1)).item()
    for step in range(1, 6):
        optimizer.zero_grad()
        model.backward(model(*rows(step)))
        optimizer.step()
    assert model(*rows(1)).item() < first - 0.1
