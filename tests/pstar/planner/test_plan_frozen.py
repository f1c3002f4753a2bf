"""`pstar plan --trainable lora:RANK`: numbers by hand, against the engine's ledger on an adapted GPT-2, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import pstar
from gpt2_chinese.model.gpt2 import Conv1D
from pstar import cli
from pstar.config import load_config
from pstar.errors import ConfigError
from pstar.planner.gpt_shape import MODELS, find_model, parse_trainable
from pstar.planner.plan import Plan
from pstar.planner.predict import Job, Prediction, choose_layout, costs_of, predict
from tests.pstar.planner.test_predict import TINY, model_of, one_gpu

RANK = 4
SHAPE = replace(TINY, lora_rank=RANK)
JOB = Job(batch=2, seq_len=16, precision="fp32", recompute=False, chunk_elems=2048)


class Adapted(Conv1D):
    """A linear layer, its weight (in, out), whose children are the two trained matrices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x))


def adapted(shape=SHAPE) -> nn.Module:
    model = model_of(replace(shape, lora_rank=0)).requires_grad_(False)
    for block in model.transformer.h:
        for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            layer.__class__ = Adapted
            inputs, outputs = layer.weight.shape
            layer.lora_A = nn.Linear(inputs, shape.lora_rank, bias=False)
            layer.lora_B = nn.Linear(shape.lora_rank, outputs, bias=False)
    return model


def trained(budget: int, hybrid: bool = True, micro_steps: int = 1, **keys: object) -> pstar.Engine:
    """The engine after four steps."""
    torch.manual_seed(0)
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "use_hybrid_adam": hybrid}}
    model, optimizer = pstar.initialize_engine(
        adapted, 0, keys | {"default_chunk_size": 2048, "near_budget": budget, "gradient_accumulation_steps": micro_steps,
                            "optimizer": adam}, device="cpu")
    tokens = torch.arange(32).view(2, 16) % 97
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            model.backward(model(tokens, tokens))
        optimizer.step()
    return model


def planned(near: int, job: Job = JOB, modes: tuple[str, ...] = ("near", "hybrid", "far")) -> Prediction:
    return predict(SHAPE, one_gpu(near, 10**9, job), job, modes)


def test_the_parameters_are_those_of_an_adapted_gpt2():
    shape = replace(MODELS["gpt2"], lora_rank=8)
    with torch.device("meta"):
        model = adapted(shape)
    real = {name: (param.numel(), not param.requires_grad) for name, param in model.named_parameters()}
    assert real == {name: (numel, name in module.frozen) for module in shape.modules() for name, numel in module.parameters}
    width = 768    # of a layer: 768 to 2304 and to 768, 768 to 3072 and back
    assert shape.num_trained == 12 * 8 * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1)) * width
    assert MODELS["gpt2"].num_trained == MODELS["gpt2"].num_params


def test_flops_by_hand():
    layers, head = TINY.forward_flops(2, 16)
    assert TINY.step_flops(2, 16) == 3 * (layers + head) and TINY.step_flops(2, 16, True) == 4 * layers + 3 * head
    matrices = 2 * 32 * SHAPE.num_trained    # no gradients of frozen weights, all three products of the small matrices
    assert SHAPE.step_flops(2, 16) == 2 * (layers + head) + 3 * matrices
    assert SHAPE.step_flops(2, 16, True) == 3 * layers + 2 * head + 4 * matrices


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_the_layout_is_the_one_that_the_engine_chooses(num_ranks):
    shape = replace(MODELS["gpt2"], lora_rank=8)
    with torch.device("meta"):
        model = adapted(shape)
    for budget in (100 * 2**20, 10**9):
        plan = Plan(model, load_config({"bf16": {"enabled": True}, "near_budget": budget}), num_ranks)
        layout, need, _ = choose_layout(shape, costs_of("bf16"), num_ranks, budget, Job())
        assert layout == plan.layout and need == plan.least_near <= budget
        frozen, own = (sum(slot.numel for group in part for slot in group.slots) for part in (layout.frozen, layout.trained))
        assert (frozen, own) == (shape.num_params - shape.num_trained, shape.num_trained)
        most = {1: 1.02, 8: 1.3}[num_ranks]    # whole matrices of up to 24,576 elements in 40 chunks of 36,864
        assert layout.trained_elems < most * own, "little padding, which costs 14 bytes there"


def test_all_near_takes_the_bytes_that_the_plan_says():
    plan = planned(10**7)
    engine = trained(10**7)
    frozen = sum(4 * group.elems for group in engine.layout.frozen)
    assert plan.mode == "near" and plan.layout == engine.layout and plan.frozen_bytes == frozen == engine.far.used_bytes
    assert (plan.near_bytes, plan.far_bytes) == (engine.near.peak_bytes, engine.far.peak_bytes)
    for kind in ("far to near", "near to far"):
        assert plan.moved[kind] == engine.ledger.step_bytes[kind] == 0


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_states_far_takes_the_bytes_that_the_plan_says(precision, micro_steps):
    """Frozen parameters stay near, if it has room: only trained ones and their gradients cross the link."""
    job, size = replace(JOB, precision=precision, micro_steps=micro_steps), 4 if precision == "fp32" else 2
    plan = planned(10**7, job, modes=("far",))
    engine = trained(10**7, hybrid=False, micro_steps=micro_steps, bf16={"enabled": precision == "bf16"})
    assert plan.mode == "far" and plan.far_bytes == engine.far.peak_bytes
    assert engine.near.peak_bytes <= plan.near_bytes
    elems = engine.layout.trained_elems
    assert plan.moved["far to near"] == engine.ledger.step_bytes["far to near"] == size * elems
    assert plan.moved["near to far"] == engine.ledger.step_bytes["near to far"] == micro_steps * size * elems


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_where_near_is_small_the_plan_is_close_and_nothing_more_goes_far(share):
    """The plan divides room by the elements of frozen chunks as if they were one long chunk; whole chunks travel, so it may
    be wrong by some of them: here by a quarter, or two of the largest."""
    layout = choose_layout(SHAPE, costs_of("fp32"), 1, 10**9, JOB)[0]
    near = int(share * 4 * layout.total_elems)
    plan, engine = planned(near, modes=("far",)), trained(near, hybrid=False)
    assert plan.moved["near to far"] == engine.ledger.step_bytes["near to far"] == 4 * layout.trained_elems
    real = engine.ledger.step_bytes["far to near"]
    largest = 4 * max(group.elems for group in layout.groups)
    assert abs(plan.moved["far to near"] - real) <= max(0.25 * real, 2 * largest)
    assert plan.far_bytes == engine.far.peak_bytes


def test_ranks_gather_frozen_parameters_once_where_near_holds_all():
    machine = one_gpu(10**9, 10**9, JOB).changed(num_gpus=4, gpu_link_bytes_per_s=1e9)
    plan = predict(SHAPE, machine, JOB, modes=("far",))
    assert plan.moved["gather"] == plan.moved["reduce"] == 4 * plan.layout.trained_elems * 3 // 4
    waiting = 4 * max(group.elems for group in plan.layout.trained)    # gradients of one group, until they are reduced
    assert plan.far_bytes == (plan.frozen_bytes + 16 * plan.layout.trained_elems) // 4 + waiting


def test_lora_fits_where_training_all_does_not():
    machine = one_gpu(4 * 2**20, 10**6, JOB)
    assert not predict(TINY, replace(machine, host_bytes=500_000), JOB, modes=("far",)).fits
    assert predict(SHAPE, replace(machine, host_bytes=500_000), JOB, modes=("far",)).fits


# ---------------------------------------------------------------- the command


def test_the_command_says_what_is_frozen(capsys):
    assert cli.main(["plan", "--model", "medium", "--trainable", "lora:16"]) == 0
    text = capsys.readouterr().out
    assert "6,291,456 of them trained (LoRA of rank 16)" in text
    assert "(14 bytes a trained parameter, 2 a frozen one)" in text and "\nfrozen  " in text
    assert cli.main(["plan", "--model", "medium", "--trainable", "lora:16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trained_parameters"] == 6_291_456 and answer["model"]["lora_rank"] == 16
    assert 2 * 354_823_168 <= answer["frozen_bytes"] < 1.03 * 2 * 354_823_168
    assert cli.main(["plan", "--model", "medium"]) == 0
    assert "frozen" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["lora", "lora:", "lora:0", "lora:-1", "lora:8.5", "adapter:8", ""])
def test_what_no_plan_knows_is_refused(text, capsys):
    with pytest.raises(ConfigError, match=r"--trainable .*: give all, or lora:RANK"):
        parse_trainable(text)
    assert cli.main(["plan", "--trainable", text]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_rank_larger_than_the_model_is_refused():
    assert (parse_trainable("all"), parse_trainable("lora:768")) == (0, 768)
    with pytest.raises(ConfigError, match=r"LoRA rank is 769 \(--trainable\); give 0 to the width, 768"):
        replace(find_model("gpt2"), lora_rank=769)
