"""Chapter 08's methods beside Hugging Face PEFT: the same losses, the same logits, the same files.

Tolerances: losses of 30 steps and logits differ by at most 1e-5: both compute the same in fp32, in another order of
operations (seen: 2e-6). Files are copies, so tensors that have been through a file are the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gpt2_chinese.errors import UserError
from tests.chapters.adapters import CASES, CHAPTER, CONFIG, IN_PEFT, MERGED, adapted, base, logits, spec, train, trained
from tests.chapters.technique import technique

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

apply = technique(CHAPTER, "methods.apply")
peft_format = technique(CHAPTER, "methods.peft_format")
peft_backend = technique(CHAPTER, "peft_backend")
FILES = ("adapter_config.json", "adapter_model.safetensors")


def hugging_face(**changes: Any) -> nn.Module:
    """transformers' GPT-2 with the weights of `base`."""
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


@pytest.mark.parametrize("name", IN_PEFT)
def test_both_backends_begin_with_the_same_loss_and_leave_the_generator_alike(name):
    ours = adapted(name)
    after = torch.get_rng_state()
    theirs = backend(name)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    numbers = {n: sum(p.numel() for p in apply.trained_parameters(m).values()) for n, m in (("own", ours), ("peft", theirs))}
    assert numbers["own"] == numbers["peft"]


@pytest.mark.parametrize("name", IN_PEFT)
def test_our_adapter_loads_in_peft(name, tmp_path):
    ours, _ = trained(name)
    peft_format.save_adapter(tmp_path, ours, spec(name), base="a base")
    theirs = peft.PeftModel.from_pretrained(hugging_face(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(AsOurs(theirs)), logits(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", IN_PEFT)
def test_pefts_adapter_loads_here_and_the_files_agree(name, tmp_path):
    theirs = backend(name)
    train(theirs, 3)
    theirs.peft.save_pretrained(str(tmp_path / "peft"))
    model = base()
    read = peft_format.load_adapter(tmp_path / "peft", model)
    assert (read.method, read.targets, read.virtual_tokens) == (spec(name).method, spec(name).targets, spec(name).virtual_tokens)
    assert read.method not in ("lora", "dora") or read.scaling == spec(name).scaling
    torch.testing.assert_close(logits(model.eval()), logits(theirs.eval()), rtol=0, atol=1e-5)
    peft_format.save_adapter(tmp_path / "own", model, model.method_spec, base="a base")
    written, read = (load_file(tmp_path / folder / FILES[1]) for folder in ("own", "peft"))
    assert written.keys() == read.keys()
    assert all(torch.equal(written[key], read[key]) and written[key].dtype == read[key].dtype for key in read)
