"""Chapter 08's methods beside Hugging Face PEFT: the same losses, the same logits, the same files.

Tolerances: losses of 30 steps and logits differ by at most 1e-5: both compute the same in fp32, in another order of
operations (seen: 2e-6). Files are copies, so tensors that have been through a file are the same bits.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gpt2_chinese.errors import UserError
from tests.chapters.adapters import CHAPTER, IN_PEFT, MERGED, adapted, base, effective, logits, spec, train, trained
from tests.chapters.technique import technique
from tests.cover import quick_only

# Imported by the tests: it takes three seconds, and every worker of the suite imports this file.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

apply = technique(CHAPTER, "methods.apply")
peft_format = technique(CHAPTER, "methods.peft_format")
peft_backend = technique(CHAPTER, "peft_backend")
ONE_EACH = ("rslora", "dora", "ia3", "prefix", "prompt")
FILES = ("adapter_config.json", "adapter_model.safetensors")


def hugging_face(**changes: Any) -> nn.Module:
    """transformers' GPT-2 with the weights of `base`."""
    import transformers

    own = base(**changes)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**own.config.to_dict()))
    model.load_state_dict(own.state_dict())
    return model


class AsOurs(nn.Module):
    """A PEFT model that takes ids (B, T) and returns logits (B, T, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits[:, -ids.shape[1] :]


def backend(name: str, seed: int = 3) -> nn.Module:
    model = base()
    torch.manual_seed(seed)
    return peft_backend.PeftBackend(model, spec(name))


@pytest.mark.parametrize("name", IN_PEFT)
def test_thirty_steps_have_the_losses_of_peft_and_end_with_its_logits(name):
    ours, losses = trained(name)
    theirs = backend(name)
    expected = train(theirs)
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert losses[-1] < losses[0] - 0.02, "nothing was learnt, so nothing was compared"
    theirs.eval()
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(theirs.own_model().eval()), logits(theirs), rtol=0, atol=1e-5)
    if name in MERGED:
        merged = AsOurs(theirs.peft.merge_and_unload()).eval()
        apply.merge(ours)
        torch.testing.assert_close(logits(ours), logits(merged), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", quick_only(IN_PEFT, *ONE_EACH))
def test_both_backends_begin_with_the_same_loss_and_leave_the_generator_alike(name):
    ours = adapted(name)
    after = torch.get_rng_state()
    theirs = backend(name)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    numbers = {n: sum(p.numel() for p in apply.trained_parameters(m).values()) for n, m in (("own", ours), ("peft", theirs))}
    assert numbers["own"] == numbers["peft"]


@pytest.mark.parametrize("name", quick_only(IN_PEFT, *ONE_EACH))
def test_our_adapter_loads_in_peft(name, tmp_path):
    import peft

    ours, _ = trained(name)
    peft_format.save_adapter(tmp_path, ours, spec(name), base="a base")
    theirs = peft.PeftModel.from_pretrained(hugging_face(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(AsOurs(theirs)), logits(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", quick_only(IN_PEFT, *ONE_EACH))
def test_pefts_adapter_loads_here_and_the_files_agree(name, tmp_path):
    theirs = backend(name)
    train(theirs, 3)
    theirs.peft.save_pretrained(str(tmp_path / "peft"))
    model = base()
    assert effective(peft_format.load_adapter(tmp_path / "peft", model)) == effective(spec(name))
    torch.testing.assert_close(logits(model.eval()), logits(theirs.eval()), rtol=0, atol=1e-5)
    peft_format.save_adapter(tmp_path / "own", model, model.method_spec, base="a base")
    written, read = (load_file(tmp_path / folder / FILES[1]) for folder in ("own", "peft"))
    assert written.keys() == read.keys()
    assert all(torch.equal(written[key], read[key]) and written[key].dtype == read[key].dtype for key in read)


@pytest.mark.parametrize(
    "kind, values",
    (
        ("LoraConfig", {"fan_in_fan_out": True}),
        ("LoraConfig", {"fan_in_fan_out": True, "target_modules": ["c_proj"], "r": 2, "lora_alpha": 1}),
        ("LoraConfig", {"fan_in_fan_out": True, "target_modules": "all-linear", "r": 3, "use_rslora": True}),
        ("IA3Config", {"fan_in_fan_out": True}),
        ("PromptTuningConfig", {"num_virtual_tokens": 3}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    ),
    ids=("lora", "c_proj", "all-linear", "ia3", "prompt", "prefix"),
)
def test_an_adapter_that_peft_made_by_itself_loads_here(kind, values, tmp_path):
    import peft

    theirs = peft.get_peft_model(hugging_face(), getattr(peft, kind)(task_type="CAUSAL_LM", **values))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path))
    model = base()
    peft_format.load_adapter(tmp_path, model)
    torch.testing.assert_close(logits(model.eval()), logits(AsOurs(theirs.eval())), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ("adapter", "bitfit"))
def test_a_method_that_peft_lacks_is_refused(name):
    message = f"--backend peft has no --method {name}: give one of lora, dora, prefix, prompt, ia3, or --backend own"
    for refuse in (lambda: peft_backend.check_backend(spec(name)), lambda: peft_backend.PeftBackend(base(), spec(name))):
        with pytest.raises(UserError) as error:
            refuse()
        assert str(error.value) == message


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="^--backend peft needs peft: pip install peft transformers, or use --backend own$"):
        peft_backend.check_backend(spec("lora"))


def test_numbers_that_do_not_fit_are_refused_by_both_backends():
    with pytest.raises(UserError, match="^--rank 25 is above 24"):
        peft_backend.PeftBackend(base(), technique(CHAPTER, "methods.spec").MethodSpec(rank=25))


def test_the_base_is_not_changed_by_the_backend():
    model = base()
    theirs = peft_backend.PeftBackend(model, spec("lora"))
    train(theirs, 2)
    expected = base()
    assert all(p.requires_grad and torch.equal(p, expected.get_parameter(n)) for n, p in model.named_parameters())
