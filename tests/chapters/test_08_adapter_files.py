"""Adapters on disk, without PEFT: what is saved loads bit for bit, and what does not fit is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_chinese.errors import UserError
from tests.chapters.adapters import CASES, CHAPTER, CONFIG, adapted, base, effective, logits, spec, trained
from tests.chapters.technique import technique

apply = technique(CHAPTER, "methods.apply")
peft_config = technique(CHAPTER, "methods.peft_config")
peft_format = technique(CHAPTER, "methods.peft_format")
MethodSpec = technique(CHAPTER, "methods.spec").MethodSpec
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def saved(folder: Path, name: str = "lora") -> Path:
    peft_format.save_adapter(folder, adapted(name), spec(name), base="runs/base/final")
    return folder


def refused(folder: Path, model: Any = None) -> str:
    """The error of load_adapter: one line, and the model is as it was."""
    model = model or base()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        peft_format.load_adapter(folder, model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) and value.requires_grad == before[key].requires_grad
               for key, value in model.state_dict().items())  # fmt: skip
    assert all(parameter.requires_grad for parameter in model.parameters())
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message.replace(str(folder), "DIR")


def edited(folder: Path, **changes: Any) -> Path:
    """An adapter whose configuration was changed by hand."""
    content = json.loads((folder / CONFIG_FILE).read_text()) | changes
    (folder / CONFIG_FILE).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_saved_adapter_loads_bit_for_bit(name, tmp_path):
    model, _ = trained(name)
    peft_format.save_adapter(tmp_path, model, spec(name), base="runs/base/final")
    again = base()
    read = peft_format.load_adapter(tmp_path, again)
    assert effective(read) == effective(spec(name))
    assert torch.equal(logits(again.eval()), logits(model))
    expected = apply.trained_parameters(model)
    assert apply.trained_parameters(again).keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in apply.trained_parameters(again).items())
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["base_model_name_or_path"] == "runs/base/final"


def test_the_file_of_a_lora_has_pefts_names(tmp_path):
    shapes = {key: tuple(value.shape) for key, value in load_file(saved(tmp_path) / WEIGHTS_FILE).items()}
    assert shapes == {
        f"base_model.model.transformer.h.{block}.attn.c_attn.lora_{part}.weight": shape
        for block in range(2)
        for part, shape in (("A", (4, 24)), ("B", (72, 4)))
    }


def test_a_full_model_has_no_adapter(tmp_path):
    model = base()
    apply.apply_method(model, MethodSpec("full"))
    with pytest.raises(ValueError, match="no adapter to save"):
        peft_format.save_adapter(tmp_path, model, MethodSpec("full"), base="")


def test_an_adapter_saved_with_a_rounded_base_loads(tmp_path):
    model = base().bfloat16()
    apply.apply_method(model, spec("lora"))
    peft_format.save_adapter(tmp_path, model, spec("lora"), base="")
    peft_format.load_adapter(tmp_path, base())  # the same base in float32


def test_the_adapter_of_another_model_is_refused(tmp_path):
    folder = saved(tmp_path)
    other = "DIR is the adapter of another model: "
    assert refused(folder, base(n_embd=32)) == (
        f"{other}transformer.h.0.attn.c_attn.lora_A.weight is (4, 24) instead of (4, 32), and 3 more")
    assert refused(folder, base(n_layer=1)) == (
        f"{other}transformer.h.1.attn.c_attn.lora_A.weight is unknown, and 1 more")
    assert refused(folder, base(n_layer=3)) == (
        f"{other}transformer.h.2.attn.c_attn.lora_A.weight is missing, and 1 more")
    assert refused(folder, base(n_embd=2, n_head=2)) == f"{other}--rank 4 is above 2: c_attn is 2 x 6"
    # of the same shape, but with another embedding
    model = base()
    with torch.no_grad():
        model.transformer.wte.weight[3, 5] += 0.1
    assert refused(folder, model) == f"{other}it was trained on runs/base/final, whose embedding differs"
    prefix = saved(tmp_path / "prefix", "prefix")
    assert refused(prefix, base(n_layer=3)) == f"{other}prompt_embeddings is (5, 96) instead of (5, 144)"
    assert "needs" not in refused(prefix, base(n_positions=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"target_modules": ["q_proj"]},
         "target_modules names 'q_proj', no layer of a GPT-2 block: it has c_attn, attn.c_proj, c_fc, mlp.c_proj"),
        ({"target_modules": ".*c_attn"}, "target_modules must be a list of names, not the pattern '.*c_attn'"),
        ({"rank_pattern": {"c_attn": 2}}, "rank_pattern is set, which this chapter lacks: train the adapter without it"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set, which this chapter lacks: train the adapter without it"),
        ({"bias": "all"}, "bias is 'all': only adapters that train no bias are read"),
        ({"peft_type": "VERA"}, "peft_type 'VERA' is none of LORA, PREFIX_TUNING, PROMPT_TUNING, IA3, ADAPTER, BITFIT"),
    ),
)  # fmt: skip
def test_a_configuration_that_this_chapter_lacks_is_refused(changes, message, tmp_path):
    assert refused(edited(saved(tmp_path), **changes)) == f"DIR/{CONFIG_FILE}: {message}"


def test_ia3_on_other_sides_is_refused(tmp_path):
    message = refused(edited(saved(tmp_path, "ia3"), feedforward_modules=["c_attn"]))
    assert message == f"DIR/{CONFIG_FILE}: feedforward_modules must be mlp.c_proj for these target_modules"


def test_what_is_no_adapter_is_refused(tmp_path):
    message = f"DIR has no {CONFIG_FILE}: give the folder of an adapter, such as final/ of a run of chapter 08"
    assert refused(tmp_path) == message
    assert "has no adapter_config.json" in refused(tmp_path / "nothing")
    folder = saved(tmp_path / "a")
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-9])
    assert refused(folder).startswith(f"cannot read the weights DIR/{WEIGHTS_FILE}: ")
    (folder / WEIGHTS_FILE).unlink()
    assert refused(folder) == f"DIR has no {WEIGHTS_FILE}: the copy is not complete"
    save_file({key: value.to(torch.int64) for key, value in tensors.items()}, folder / WEIGHTS_FILE)
    assert "holds torch.int64" in refused(folder)
    (folder / CONFIG_FILE).write_text("[]")
    assert refused(folder) == f"DIR/{CONFIG_FILE} has no peft_type: give the adapter_config.json of an adapter"
    (folder / CONFIG_FILE).write_text("{")
    assert "cannot read the adapter" in refused(folder)


@pytest.mark.parametrize("name", CASES)
def test_any_value_in_a_configuration_gives_a_method_or_one_line(name):
    content = peft_config.peft_config(spec(name), CONFIG)
    results = {True: 0, False: 0}
    for key in content:
        for value in (None, [], {}, "x", ["x"], [1], -1, 0, 1e99, 10**400, True, {"a": [1]}):
            try:
                peft_config.spec_of(content | {key: value}, "a file").check(CONFIG)
                results[True] += 1
            except UserError as error:
                assert "\n" not in str(error)
                results[False] += 1
    assert results[True] and results[False]
