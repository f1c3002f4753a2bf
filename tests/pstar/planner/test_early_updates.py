"""What pstar plan says about speculative_update: the numbers follow from those of the plan."""

from __future__ import annotations

import json

import pytest

from pstar.cli import main
from pstar.planner.early_updates import predict_early
from pstar.planner.gpt_shape import find_model
from pstar.planner.machines import find_machine
from pstar.planner.predict import Job, predict

SHAPE = find_model("40x5120")


def plan(host_gib: int = 400, **job):
    machine = find_machine("h200").changed(host_bytes=host_gib * 2**30)
    return predict(SHAPE, machine, Job(**{"batch": 8} | job), modes=("hybrid", "far"))


def test_updates_that_fit_into_backward_vanish_from_the_step():
    """At a batch of 32 backward is longer than the host's updates."""
    answer = plan(batch=32, offload_activations=True)
    early = predict_early(answer)
    seconds = answer.seconds
    assert early.share == 1
    gradients = answer.moved["near to far"] - answer.offloaded_bytes    # 2 bytes a parameter, which has 12 others
    assert early.log_bytes == pytest.approx(6 * gradients, rel=1e-3)
    assert early.step_seconds == pytest.approx(seconds["passes"] + seconds["adam near"])
    assert early.repair_seconds == pytest.approx(answer.adam.host_seconds * (1 + 2 * 12 / 26))
    assert early.worth_below == pytest.approx((seconds["step"] - early.step_seconds) / early.repair_seconds)
    assert 0.2 < early.worth_below < 1


def test_a_short_backward_and_a_small_host_hide_less():
    long, short, small = plan(batch=32, offload_activations=True), plan(batch=1), plan(100)
    shares = [predict_early(answer).share for answer in (long, short, small)]
    assert shares[0] == 1 and 0 < shares[1] < 0.5 and 0 < shares[2] < 1
    small_log = predict_early(small).log_bytes
    assert small_log <= small.far_room - small.far_bytes
    several, one = plan(batch=2, micro_steps=4), plan(batch=8)
    assert predict_early(several).share < 0.5 * predict_early(one).share, "only the last backward counts"


def test_no_answer_where_nothing_is_updated_far():
    assert predict_early(predict(find_model("gpt2"), find_machine("h200"))) is None
    assert predict_early(predict(find_model("96x12288"), find_machine("h200"))) is None, "it does not fit"


def test_the_command_says_when_it_pays(capsys):
    arguments = ["plan", "--model", "40x5120", "--batch", "8"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("speculative_update"))
    assert "pays while less than" in line and "GiB a rank" in line
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["speculative_update"]["step_seconds"] < told["seconds"]["step"]
    assert main(["plan", "--model", "gpt2"]) == 0
    assert "speculative_update" not in capsys.readouterr().out
