"""The table of DeepSpeed's and PatrickStar's keys, and the rules that need several of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pstar
from pstar.cli import main
from pstar.config import reference
from pstar.deepspeed.keys import FATES, IGNORED, KEYS, REFUSED, TRANSLATED
from pstar.deepspeed.translate import batches
from tests import toy
from tests.pstar.deepspeed.published import PUBLISHED

ZERO = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("train, micro, steps, num_ranks, found", [
    (24, 2, 3, 4, (24, 2, 3)), (24, 2, None, 4, (24, 2, 3)), (24, None, 3, 4, (24, 2, 3)), (None, 2, 3, 4, (24, 2, 3)),
    (24, None, None, 4, (24, 6, 1)), (None, 6, None, 4, (24, 6, 1)), (24, 2, 4, 4, None), (24, 5, None, 1, None),
    (7, None, None, 2, None), (1, None, None, 2, None), (65536, 64, None, 3, None),
])
def test_the_rule_of_batches(train, micro, steps, num_ranks, found) -> None:
    """The cases in which DeepSpeed derives a size, and those that it refuses."""
    if found is not None:
        answer = batches(train, micro, steps, num_ranks)
        assert (answer.train, answer.micro, answer.steps) == found
        return
    with pytest.raises(pstar.ConfigError, match=f"train_batch_size is {train}, but train_micro_batch_size_per_gpu"):
        batches(train, micro, steps, num_ranks)


def ranks_case(rank: int, num_ranks: int, folder: str) -> dict:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model, optimizer = toy.build(train_batch_size=12, train_micro_batch_size_per_gpu=3, **ZERO)
    steps = model.config.gradient_accumulation_steps
    losses = toy.train(model, optimizer, 2, rank, num_ranks, steps)
    return {"said": said.getvalue(), "steps": steps, "losses": losses}


def test_two_processes_accumulate_twice_and_only_the_first_says_so(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(ranks_case, str(tmp_path))
    assert [each["steps"] for each in found] == [2, 2]
    assert "pstar: translated: zero_optimization.stage 3: " in found[0]["said"] and found[1]["said"] == ""
    expected = toy.oracle(2)[0]    # 1e-5: two processes and two micro-steps add in another order
    for step in range(2):
        assert sum(each["losses"][step] for each in found) / 2 == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.parametrize("params, kind", [
    ({}, "AdamW"), ({"adam_w_mode": True}, "AdamW"), ({"adam_w_mode": False}, "Adam"),
])
def test_deepspeeds_adam_decouples_weight_decay_unless_told_otherwise(params: dict, kind: str) -> None:
    optimizer = {"type": "Adam", "params": {"weight_decay": 0.1} | params}
    assert pstar.load_config({"optimizer": optimizer} | ZERO).optimizer.type == kind
    assert pstar.load_config({"optimizer": {"type": "AdamW", "params": params}} | ZERO).optimizer.type == "AdamW"
    if not params:    # pstar's own file, and PatrickStar's, mean what they say
        assert pstar.load_config({"optimizer": optimizer}).optimizer.type == "Adam"


def test_torchs_adamw_brings_its_own_weight_decay() -> None:
    found = pstar.load_config({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}} | ZERO)
    assert found.optimizer.params.weight_decay == 0.01


@pytest.mark.parametrize("values, line", [
    ({"zero_optimization": {"stages": 3}}, "'zero_optimization.stages'; did you mean 'zero_optimization.stage'?"),
    ({"zero_optimisation": {"stage": 3}}, "unknown key 'zero_optimisation'; did you mean 'zero_optimization'?"),
    ({"zero_optimization": 3}, "'zero_optimization' must be a JSON object, found 3"),
    ({"client": {"opts": {"with_mem_cash": True}}}, "did you mean 'client.opts.with_mem_cache'?"),
    ({"zero_optimization": {"stage": 4}}, "'zero_optimization.stage' is 4: Give a stage from 0 to 3."),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "to nvme without nvme_path: give the folder"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                            "offload_param": {"device": "nvme", "nvme_path": "/b"}}}, "two folders for nvme, /a and /b"),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "'zero_optimization.zero_quantized_gradients' is true:"),
    ({"curriculum_learning": {"enabled": True}}, "'curriculum_learning.enabled' is true: pstar makes no batches"),
    ({"amp": {"enabled": True}}, "'amp.enabled' is true: Write bf16.enabled or fp16.enabled"),
    ({"optimizer.type": "Adam"}, "unknown key 'optimizer.type': write nested objects"),
    ({"train_batch_size": 0}, "train_batch_size is 0; give at least 1"),
    ({"train_batch_size": "many"}, "'train_batch_size' must be int or NoneType, found 'many'"),
    ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "max_grad_norm' is 1: Write it as gradient_clipping"),
])
def test_a_file_that_cannot_be_followed_is_refused_with_one_line(values: dict, line: str) -> None:
    with pytest.raises(pstar.ConfigError) as error:
        pstar.load_config(values)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_the_old_name_of_bf16() -> None:
    assert pstar.load_config({"bfloat16": {"enabled": True}}).bf16.enabled
    found = pstar.load_config({"bfloat16": {"enabled": "auto"}, "communication_data_type": "auto"})
    assert not found.bf16.enabled and found.notes[0].keys == ("bfloat16.enabled", "communication_data_type")


def test_off_is_off() -> None:
    found = pstar.load_config({"curriculum_learning": {"enabled": False, "min_difficulty": 8}, "amp": {}, "fp16": {},
                               "flops_profiler": {"enabled": True}, "zero_optimization": {}})
    assert {(note.fate, note.keys) for note in found.notes} == {
        (IGNORED, ("curriculum_learning",)), (IGNORED, ('flops_profiler {"enabled": true}',))}
    assert pstar.load_config({"near_budget": "min"}).notes == (), "pstar's own keys need no line"


def test_a_ratio_leaves_states_near_whatever_the_order_of_the_keys() -> None:
    for keys in (("device", "ratio"), ("ratio", "device")):
        offload = {key: {"device": "cpu", "ratio": 0.3}[key] for key in keys}
        found = pstar.load_config({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
        assert found.optimizer.params.use_hybrid_adam


def test_the_table_translates_into_keys_that_exist() -> None:
    own = {key for key, _, _ in reference()}
    for row in KEYS:
        assert row.fate in FATES and row.sentence.endswith("."), row.name
        assert set(row.into) <= own and (row.fate == TRANSLATED or not row.into), row.name
        assert len(row.sentence.split()) <= 25, row.sentence
    assert len({(row.name, row.on) for row in KEYS}) == len(KEYS), "two rows for the same values of a key"


def test_the_command_prints_what_becomes_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PUBLISHED["BLOOM's Megatron-DeepSpeed, bf16"][1]))
    assert main(["config", str(path), "--ranks", "4"]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"{path}: a valid configuration, translated for 4 processes\ntaken: train_batch_size 16,")
    assert "translated: zero_optimization.stage 1\n    Every stage becomes" in said
    assert '"gradient_accumulation_steps": 4' in said.splitlines()[-1] and '"bf16.enabled": true' in said.splitlines()[-1]
    for arguments, line in ((["--ranks", "3"], "error: train_batch_size is 16, "), (["--ranks", "0"], "--ranks 0: give")):
        try:
            status = main(["config", str(path), *arguments])
        except SystemExit as ended:
            status = ended.code
        said = capfd.readouterr()
        assert status == 2 and line in said.err and said.err.count("\n") == 1 and not said.out


def test_every_refused_key_names_what_to_do_or_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command ends with status 2 and one line for each refused row that has values."""
    for number, row in enumerate(row for row in KEYS if row.fate == REFUSED and row.on):
        value: object = row.on[0]
        for part in reversed(row.name.split(".")):
            value = {part: value}
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(value))
        assert main(["config", str(path)]) == 2, row.name
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and row.name in said and row.sentence in said
