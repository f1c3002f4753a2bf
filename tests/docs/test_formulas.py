"""Compares every formula of docs/generate's formulas.py with what the repository's own programs count."""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpt2_chinese.model.config import PRESETS, ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from tests.chapters.technique import technique


@pytest.fixture(scope="module")
def formulas():
    from docs.generate.arithmetic import formulas

    return formulas


SMALL = {"n_layer": 4, "n_embd": 24, "n_head": 4, "n_positions": 16, "vocab_size": 101, "strategy": "single",
         "precision": "fp32", "ranks": 1, "batch": 24, "seq_len": 16, "micro_batches": 1, "checkpointing": False,
         "virtual_stages": 2, "near_percent": 100}  # fmt: skip


def job(**changes) -> dict:
    return {**SMALL, **changes}


def model(which: dict | None = None) -> GPT2LMHeadModel:
    which = which or SMALL
    return GPT2LMHeadModel(ModelConfig(**{name: which[name] for name in (
        "n_layer", "n_embd", "n_head", "n_positions", "vocab_size")}))  # fmt: skip


# ---- the model


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_configuration(formulas, name: str) -> None:
    config = replace(PRESETS[name], vocab_size=50257)
    numbers = {key: getattr(config, key) for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")}
    assert formulas.num_parameters(job(**numbers)) == config.num_parameters()
    if name == "small":
        assert config.num_parameters() == 124_439_808


def test_tensors_are_those_of_the_model(formulas) -> None:
    assert formulas.num_tensors(SMALL) == len(list(model().parameters()))
    assert formulas.num_parameters(SMALL) == sum(p.numel() for p in model().parameters())


# ---- states


def test_costs_of_the_levels_are_those_of_chapter_04(formulas) -> None:
    """Counts tensors after backward and after a first step. The tolerance covers the norms, which O2 leaves in fp32."""
    amp = technique("04_apex", "amp")
    settings = type("S", (), {"apex": False, "backend": "own", "half": "bf16", "loss_scale": "1", "scale_window": 9,
                              "lr": 1e-3, "weight_decay": 0.1})  # fmt: skip
    ranks = type("R", (), {"max": staticmethod(lambda value: value)})
    for level in ("O0", "O1", "O2", "O3"):
        settings.opt_level, net = level, model(job(vocab_size=2000))
        masters, scaler = amp.initialize(net, ranks, settings)
        optimizer = amp.optimizer_for(masters, settings)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            scaler.scale(net(tokens, tokens)).backward()
            gradients = sum(p.grad.nbytes for p in net.parameters())
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        number = sum(p.numel() for p in net.parameters())
        moments = sum(s[key].nbytes for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
        own = {p.data_ptr() for p in net.parameters()}
        extra = sum(p.nbytes for p in masters.parameters() if p.data_ptr() not in own)
        costs = formulas.parameter_costs("ddp", "fp32" if level == "O0" else level)
        cast = 2 if level == "O1" else 0  # 16-bit copies: freed after backward, so not found here
        found = {"parameters": sum(p.nbytes for p in net.parameters()) + cast * number, "gradients": gradients,
                 "masters": extra, "moments": moments}  # fmt: skip
        for kind, num_bytes in found.items():
            assert num_bytes / number == pytest.approx(costs[kind], rel=0.02, abs=0.02), (level, kind)


@pytest.mark.parametrize("stage, precision, offload", [*itertools.product((1, 2, 3), ("fp32", "bf16"), (False, True))])
def test_zero_states_and_traffic_are_those_of_chapter_06(formulas, stage: int, precision: str, offload: bool) -> None:
    """Chapter 06's tests compare the chapter's formulas with the live tensors and with the kernel's counter."""
    ledger = technique("06_zero", "zero.ledger")
    outside, block = formulas.outside_parameters(SMALL), formulas.block_parameters(SMALL["n_embd"])
    units = [outside] + [block] * SMALL["n_layer"]
    for p, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 5)):
        case = job(strategy=f"zero{stage}{'_offload' if offload else ''}", precision=precision, ranks=p, micro_batches=m)
        where = ("optimizer,params" if stage == 3 else "optimizer") if offload else "none"
        num_bytes = 4 if precision == "fp32" else 2
        expected = ledger.state_formula(units, stage, p, num_bytes, where)
        found = formulas.states(case)
        for prefix, ours in (("", ""), ("host ", "host_")):
            for kind in ("parameters", "gradients"):
                assert found[ours + kind] == expected.get(prefix + kind, 0), (p, kind)
            both = expected.get(prefix + "masters", 0) + expected.get(prefix + "moments", 0)
            assert found[ours + "optimizer"] == both
        assert formulas.sent_bytes(formulas.traffic(case)) == ledger.sent_formula(units, stage, p, num_bytes, m)


def test_pstar_states_are_those_of_its_budgets(formulas) -> None:
    from pstar.planner.predict import costs_of

    for precision in ("fp32", "bf16", "fp16"):
        costs, ours = costs_of(precision), formulas.parameter_costs("pstar", precision)
        assert (ours["parameters"], ours["gradients"], ours["masters"] + ours["moments"]) == (
            costs.param, costs.grad, costs.states)  # fmt: skip
        for p, share in itertools.product((1, 2, 4), (0, 10, 25, 60, 100)):
            found = formulas.states(job(strategy="pstar", precision=precision, ranks=p, near_percent=share))
            own = -(-formulas.num_parameters(SMALL) // p)
            assert sum(found.values()) - found["buffers"] == costs.total * own, "every byte is near or far"
            near = share * costs.total * formulas.num_parameters(SMALL) // 100
            assert formulas.device_bytes(found) <= near


def test_traffic_of_pstar_lies_where_its_own_prediction_does(formulas) -> None:
    """With room for all parameters, each is gathered once; without room, again in each pass. Chunks add some per cent."""
    from pstar.layout.layout import make_layout
    from pstar.planner.gpt_shape import GptShape
    from pstar.planner.predict import Job, moved_bytes

    shape = GptShape(12, 256, 4, vocab=2000, positions=128)
    numbers = {"n_layer": 12, "n_embd": 256, "n_head": 4, "vocab_size": 2000, "n_positions": 128, "strategy": "pstar"}
    for p, m in itertools.product((2, 4), (1, 3)):
        work = Job(precision="fp32", micro_steps=m)
        layout = make_layout(shape.modules(), 300_000, p)
        padding = layout.total_elems / layout.num_params
        for percent, near in ((100, 10**12), (0, 0)):
            moved = moved_bytes(layout, [], near, work.costs, work)
            found = formulas.traffic(job(**numbers, ranks=p, micro_batches=m, near_percent=percent))
            assert found["received_parameters"] * padding == pytest.approx(moved["gather"], rel=0.001)
            assert found["received_gradients"] * padding == pytest.approx(moved["reduce"], rel=0.001)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tensor_parallel_holds_and_sends_the_bytes_of_chapter_05(formulas, monkeypatch, t: int, checkpointing: bool) -> None:
    tensor, parallel = technique("05_model_parallel", "tensor"), technique("05_model_parallel", "parallel")
    case = job(strategy="tensor", ranks=t, vocab_size=104, micro_batches=2, checkpointing=checkpointing)
    group = tensor.TensorGroup(None)
    group.num_ranks = t
    monkeypatch.setattr(tensor.dist, "all_reduce", lambda *_, **__: None)
    net = model(case)
    technique("05_model_parallel", "tensor_apply").apply_tensor_parallel(net, group)
    assert sum(p.numel() for p in net.parameters()) == formulas.held_parameters(case, 0)
    if checkpointing:
        for block in net.transformer.h:
            block.forward = parallel.partial(parallel.checkpoint, block.forward, use_reentrant=False)
    tokens = torch.zeros(case["batch"] // 2, case["seq_len"], dtype=torch.int64)
    for _ in range(2):
        net(tokens, tokens).backward()
    assert sum(group.sent.values()) == formulas.traffic(case)["sent_activations"]


@pytest.mark.parametrize("name, p, m, v", [("naive", 2, 3, 1), ("gpipe", 4, 6, 1), ("1f1b", 4, 6, 1), ("1f1b", 2, 1, 1),
                                           ("interleaved", 2, 4, 2)])  # fmt: skip
def test_pipeline_holds_sends_and_keeps_the_bytes_of_chapter_05(formulas, name: str, p: int, m: int, v: int) -> None:
    schedules, pipeline = technique("05_model_parallel", "schedules"), technique("05_model_parallel", "pipeline")
    case = job(strategy="layer_split" if name == "naive" else name, ranks=p, micro_batches=m)
    order = schedules.orders(name, p, m, v)
    assert formulas.bubble_fraction(case["strategy"], p, m, v) == schedules.bubble_formula(name, p, m, v)
    each = 4 * case["batch"] // m * case["seq_len"] * case["n_embd"]
    for rank, program in enumerate(schedules.with_transfers(order)):
        net = model()
        pipeline.cut_into_stages(net, rank, p, v)
        assert formulas.held_parameters(case, rank) == sum(q.numel() for q in net.parameters())
        assert formulas.live_micro_batches(case, rank) == schedules.peak_live(order[rank])
        found = formulas.traffic(case, rank)
        for way, kind in (("sent", "send"), ("received", "recv")):
            number = sum(isinstance(what, schedules.Transfer) and what.kind == kind for what in program)
            assert found[f"{way}_activations"] == number * each


def test_the_server_s_bytes_are_those_of_chapter_01(formulas) -> None:
    """Except for two small parts of a worker's messages: one value per tensor (was it used?) and four numbers."""
    server = technique("01_parameter_server", "server")
    for p in (1, 2, 5):
        own = server.ParameterServer(model(), 0, 1)
        own.num_ranks = p
        case, small = job(strategy="server", ranks=p), 4 * (p - 1) * (formulas.num_tensors(SMALL) + 4)
        found = [formulas.traffic(case, rank) for rank in range(p)]
        through = formulas.sent_bytes(found[0]) + formulas.received_bytes(found[0])
        assert through == own.formula_bytes() - small
        assert sum(map(formulas.sent_bytes, found)) == sum(map(formulas.received_bytes, found))


def test_the_ring_is_that_of_chapter_02(formulas) -> None:
    ring = technique("02_ddp", "ring")
    for p, precision in itertools.product((1, 2, 3, 8), ("fp32", "O1", "O2", "O3")):
        found = formulas.traffic(job(strategy="ddp", ranks=p, precision=precision))
        gradients = formulas.parameter_costs("ddp", precision)["gradients"] * formulas.num_parameters(SMALL)
        assert found["sent_gradients"] == int(ring.ring_bytes(gradients, p)) == found["received_gradients"]


# ---- activations


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_those_that_pstar_plans_with(formulas, precision: str, checkpointing: bool) -> None:
    from pstar.planner.gpt_shape import GptShape

    shape = GptShape(4, 24, 4, 101, 16)
    expected = shape.activation_bytes(6, 16, 4 if precision == "fp32" else 2, checkpointing)
    case = job(strategy="pstar", precision=precision, ranks=4, checkpointing=checkpointing)
    assert formulas.activations(case) == expected
    one = {**case, "strategy": "zero3"}
    assert formulas.activations(one) == expected, "the same rows on the same rank"


def saved_bytes(net: nn.Module, context, tokens: torch.Tensor) -> int:
    """Bytes of the storages that autograd keeps for backward, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with context(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(tokens, tokens)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3"])
def test_blocks_keep_the_bytes_of_the_formula(formulas, precision: str) -> None:
    """Measures how much more autograd saves with two more blocks. The formula also counts two dropout masks."""
    casts = technique("04_apex", "casts")
    kept, weights = [], []
    for layers in (2, 4):
        case = job(n_layer=layers, n_embd=64, n_positions=128, seq_len=128)
        net = model(case)
        context = contextlib.nullcontext
        if precision == "O1":
            context = lambda: casts.CastByOperation(torch.bfloat16)  # noqa: E731
        elif precision != "fp32":
            casts.round_weights(net, torch.bfloat16, keep_norms=precision == "O2")
        kept.append(saved_bytes(net, context, torch.zeros(4, 128, dtype=torch.int64)))
        weights.append(sum(p.numel() for p in net.parameters()))
    copies = 2 * (weights[1] - weights[0]) if precision == "O1" else 0  # of weights; the formula counts them as parameters
    costs = formulas.activation_costs(precision)
    per_block = (kept[1] - kept[0] - copies) / 2 / (4 * 128 * 64)
    assert per_block == pytest.approx(costs["whole"] + costs["cut"], rel=0.1), per_block


def test_usable_bytes_are_those_that_pstar_counts_with(formulas) -> None:
    from pstar.planner.machines import MACHINES

    for gib in (8, 16, 24, 40, 80):
        machine = replace(MACHINES["superpod"], gpu_bytes=gib * 2**30)
        assert formulas.usable_bytes(gib) == pytest.approx(machine.usable_gpu_bytes, abs=1)


def test_work_is_that_of_the_planner(formulas) -> None:
    from pstar.planner.gpt_shape import GptShape

    blocks, head = GptShape(4, 24, 4, 101, 16).forward_flops(24, 16)
    assert formulas.step_flops(SMALL) == 3 * (blocks + head)
    assert formulas.step_flops(job(checkpointing=True)) == 4 * blocks + 3 * head


# ---- jobs that the course does not run


@pytest.mark.parametrize("changes, reason", [
    ({}, ""), ({"ranks": 2}, "ranks"), ({"precision": "bf16"}, "precision"), ({"seq_len": 17}, "length"),
    ({"strategy": "ddp", "ranks": 5}, "batch"), ({"strategy": "gpipe", "ranks": 3}, "layers"),
    ({"strategy": "tensor", "ranks": 3}, "heads"), ({"strategy": "tensor", "ranks": 4}, ""),
    ({"strategy": "interleaved", "ranks": 2, "micro_batches": 3}, "micros"),
    ({"strategy": "interleaved", "ranks": 4, "micro_batches": 4}, "layers"), ({"strategy": "1f1b", "ranks": 4}, ""),
])  # fmt: skip
def test_a_job_that_no_program_takes_is_refused(formulas, changes: dict, reason: str) -> None:
    assert formulas.refusal(job(**changes)) == reason


def test_a_wrong_formula_is_found(formulas, monkeypatch) -> None:
    monkeypatch.setattr(formulas, "block_parameters", lambda c: 12 * c**2)
    with pytest.raises(AssertionError):
        test_tensors_are_those_of_the_model(formulas)
    monkeypatch.undo()
    monkeypatch.setattr(formulas, "ring_bytes", lambda n, p: n * (p - 1) // p)
    with pytest.raises(AssertionError):
        test_the_ring_is_that_of_chapter_02(formulas)
    assert "docs.generate.arithmetic.formulas" in sys.modules
