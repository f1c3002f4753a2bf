"""`pstar plan --trainable lora:RANK --frozen-bits BITS`: against the engine's ledger, by hand, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pstar import cli
from pstar.config import load_config
from pstar.errors import ConfigError
from pstar.planner.gpt_shape import MODELS
from pstar.planner.plan import Plan
from pstar.planner.predict import Job, choose_layout, costs_of, predict
from tests.pstar.planner.test_plan_frozen import JOB, SHAPE, adapted, planned, trained
from tests.pstar.planner.test_predict import one_gpu

BITS = (8, 4)
ROWS = {8: 66, 4: 34}


def by_hand(layout, bits: int, size: int) -> int:
    """Bytes of the frozen parameters."""
    return sum(group.elems // 64 * ROWS[bits] if group.coded else size * group.elems for group in layout.frozen)


def test_the_matrices_are_those_of_an_adapted_gpt2():
    shape = replace(MODELS["gpt2"], lora_rank=8)
    with torch.device("meta"):
        model = adapted(shape)
    matrices = {name for name, param in model.named_parameters() if param.dim() > 1}
    assert matrices == set().union(*(module.matrices for module in shape.modules()))


@pytest.mark.parametrize("num_ranks, bits", [pytest.param(1, 8, marks=pytest.mark.deep), (8, 4)])
def test_the_layout_is_the_one_that_the_engine_chooses(num_ranks, bits):
    shape = replace(MODELS["gpt2"], lora_rank=8)
    with torch.device("meta"):
        model = adapted(shape)
    config = load_config({"bf16": {"enabled": True}, "near_budget": 100 * 2**20, "frozen_bits": bits})
    plan, job = Plan(model, config, num_ranks), Job(frozen_bits=bits)
    layout, need, _ = choose_layout(shape, job.costs, num_ranks, 100 * 2**20, job)
    assert layout == plan.layout and need == plan.least_near <= 100 * 2**20 and job.costs == plan.costs
    vectors = sum(group.elems for group in layout.frozen if not group.coded)
    assert 0 < vectors < 0.003 * shape.num_params, "vectors are few, and so is their padding"


@pytest.mark.parametrize("bits", BITS)
def test_all_near_takes_the_bytes_that_the_plan_says(bits):
    plan = planned(10**7, replace(JOB, frozen_bits=bits))
    engine = trained(10**7, frozen_bits=bits)
    assert plan.mode == "near" and plan.layout == engine.layout
    assert plan.frozen_bytes == engine.far.used_bytes == by_hand(engine.layout, bits, 4)
    assert (plan.near_bytes, plan.far_bytes) == (engine.near.peak_bytes, engine.far.peak_bytes)
    for kind in ("far to near", "near to far"):
        assert plan.moved[kind] == engine.ledger.step_bytes[kind] == 0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_states_far_takes_the_bytes_that_the_plan_says(precision, bits):
    job, size = replace(JOB, precision=precision, frozen_bits=bits), 4 if precision == "fp32" else 2
    plan = planned(10**7, job, modes=("far",))
    engine = trained(10**7, hybrid=False, bf16={"enabled": precision == "bf16"}, frozen_bits=bits)
    assert plan.mode == "far" and plan.far_bytes == engine.far.peak_bytes
    assert plan.frozen_bytes == by_hand(engine.layout, bits, size)
    elems = engine.layout.trained_elems
    for kind in ("far to near", "near to far"):
        assert plan.moved[kind] == engine.ledger.step_bytes[kind] == size * elems


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("bits", BITS)
def test_where_near_is_small_the_plan_is_close_and_far_exact(share, bits):
    """As test_plan_frozen.py, with the same limits: whole chunks travel, the plan divides room by elements."""
    job = replace(JOB, frozen_bits=bits)
    layout = choose_layout(SHAPE, job.costs, 1, 10**9, job)[0]
    near = int(share * 4 * layout.total_elems)
    plan, engine = planned(near, job, modes=("far",)), trained(near, hybrid=False, frozen_bits=bits)
    assert plan.moved["near to far"] == engine.ledger.step_bytes["near to far"] == 4 * layout.trained_elems
    real = engine.ledger.step_bytes["far to near"]
    largest = max(engine.costs.param_bytes(group.elems, group.coded) for group in layout.groups)
    assert abs(plan.moved["far to near"] - real) <= max(0.25 * real, 2 * largest)
    assert plan.far_bytes == engine.far.peak_bytes


def test_a_planned_gpt_moves_at_most_three_tenths_of_the_bytes_of_bf16():
    """A GPU with room for 60 % of the weights: codes cross link and collectives."""
    shape = replace(MODELS["medium"], lora_rank=8)
    for num_gpus in (1, 4):
        moved = {}
        for bits in (32, 4):
            job = Job(chunk_elems=2**21, frozen_bits=bits)
            near = int(0.6 * 2 * shape.num_params) + job.activations_of(shape)[0]
            machine = one_gpu(0, 10**11, job).changed(gpu_bytes=near, num_gpus=num_gpus, gpu_link_bytes_per_s=1e9)
            moved[bits] = predict(shape, machine, job, modes=("far",)).moved
        for kind in ("far to near", "gather")[: 1 + (num_gpus > 1)]:
            assert 0.2 < moved[4][kind] / moved[32][kind] <= 0.30    # of a few chunks more or less that stay near


def test_a_model_fits_whose_bf16_does_not():
    for bits, fits in ((32, False), (8, True), (4, True)):
        job = replace(JOB, frozen_bits=bits)
        assert predict(SHAPE, one_gpu(4 * 2**20, 150_000, job), job, modes=("far",)).fits is fits


# ---------------------------------------------------------------- the command


def test_the_command_says_what_is_in_codes(capsys):
    flags = ["plan", "--model", "gpt2", "--trainable", "lora:16", "--frozen-bits", "4", "--chunk-size", str(3 * 4 * 768**2)]
    assert cli.main(flags) == 0    # the chunk size is given, because the search takes seconds
    assert "(14 bytes a trained parameter, 2 a frozen one, 34 for 64 in codes)" in capsys.readouterr().out
    assert cli.main([*flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["configuration"]["frozen_bits"] == answer["job"]["frozen_bits"] == 4
    assert 0.2656 < answer["frozen_bytes"] / (2 * 124_439_808) < 0.29
    load_config(answer["configuration"])


def test_bits_without_frozen_parameters_are_refused(capsys):
    assert cli.main(["plan", "--frozen-bits", "4"]) == 2
    assert capsys.readouterr().err.strip().endswith("--frozen-bits 4: nothing is frozen; give --trainable lora:RANK too")
    with pytest.raises(SystemExit):
        cli.main(["plan", "--frozen-bits", "3"])
    with pytest.raises(ConfigError, match=r"frozen_bits is 3; choose 4, 8 or 32"):
        costs_of("bf16", frozen_bits=3)
