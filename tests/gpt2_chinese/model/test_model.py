"""The model against Hugging Face's: same names, same weights, same numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from gpt2_chinese.checkpoint.final import export_final
from gpt2_chinese.checkpoint.model_state import load_weights, weights_of
from gpt2_chinese.checkpoint.trained_model import find_model, load_model, read_weights
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import PRESETS, ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SIZE = 97


def config(**changes) -> ModelConfig:
    return ModelConfig(**{"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": SIZE, **changes})


def spread(model: torch.nn.Module) -> None:
    """Makes every parameter random and large enough that a mistake anywhere shows in the logits."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    made = GPT2LMHeadModel(config())
    spread(made)
    return made


@pytest.fixture
def theirs(model: GPT2LMHeadModel):
    transformers = pytest.importorskip("transformers")
    keys = {k: v for k, v in model.config.to_dict().items() if v is not None}
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys))
    assert set(other.state_dict()) == set(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=True)
    return other


def ids(rows: int = 3, length: int = 32) -> torch.Tensor:
    return torch.randint(0, SIZE, (rows, length), generator=torch.Generator().manual_seed(3))


def test_logits_loss_and_every_gradient_are_hugging_faces(model, theirs) -> None:
    inputs, targets = ids(), ids().roll(-1, 1)
    targets[0, :5] = -100
    mine, other = model(inputs), theirs(inputs).logits
    assert (mine - other).abs().max() < 1e-5
    loss = model(inputs, targets)
    reference = torch.nn.functional.cross_entropy(other.flatten(0, 1), targets.flatten())
    assert abs(loss.item() - reference.item()) < 1e-6
    loss.backward()
    reference.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        scale = gradients[name].grad.abs().max()
        assert (parameter.grad - gradients[name].grad).abs().max() <= 1e-5 * scale + 1e-8, name


def test_weights_come_back_from_hugging_face(model, theirs, tmp_path: Path) -> None:
    spread(theirs)
    theirs.save_pretrained(tmp_path)
    fresh = GPT2LMHeadModel(ModelConfig.from_file(tmp_path))
    load_weights(fresh, read_weights(tmp_path))
    assert (fresh(ids()) - theirs(ids()).logits).abs().max() < 1e-5


def test_final_loads_in_transformers_with_the_same_logits_and_tokens(tmp_path: Path, vocab: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(vocab)
    torch.manual_seed(2)
    mine = GPT2LMHeadModel(config(vocab_size=vocabulary.size))
    final = export_final(tmp_path / "final", mine.config, weights_of(mine), vocab, {"step": 3})
    other, info = transformers.GPT2LMHeadModel.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    prompt = torch.tensor([vocabulary.encode_prompt("今天天气很好，1918年的A计划。")])
    assert (mine(prompt) - other(prompt).logits).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    assert tokenizer("今天天气很好，1918年的A计划。").input_ids == [*prompt[0].tolist(), vocabulary.end_id]
    assert (other.config.bos_token_id, other.config.eos_token_id) == (vocabulary.begin_id, vocabulary.end_id)
    again, _ = load_model(tmp_path)
    assert torch.equal(again(prompt), mine(prompt))


def test_old_files_without_prefix_and_with_mask_buffers_load(model, tmp_path: Path) -> None:
    old = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    for layer in range(3):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32)
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(old, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    assert find_model(tmp_path / "pytorch_model.bin") == tmp_path
    found = read_weights(tmp_path)
    assert set(found) == set(weights_of(model))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(model).items())


def test_the_head_is_the_embedding(model) -> None:
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in weights_of(model)
    assert len(model.state_dict()) == 12 * 3 + 5


@pytest.mark.parametrize("preset", ["tiny"])
def test_number_of_parameters_is_the_formulas(preset: str) -> None:
    chosen = ModelConfig(**{**vars(PRESETS[preset]), "vocab_size": 3980})
    made = GPT2LMHeadModel(chosen)
    assert chosen.num_parameters() == sum(p.numel() for p in made.parameters())


def test_a_vocabulary_set_in_a_preset_stays_out_of_the_next_one() -> None:
    PRESETS["tiny"].vocab_size = 7
    assert PRESETS["tiny"].vocab_size is None


@pytest.mark.parametrize("preset, count", [("small", 102_068_736), ("medium", 324_995_072), ("xl", 1_511_004_800)])
def test_presets_have_the_known_sizes(preset: str, count: int) -> None:
    assert ModelConfig(**{**vars(PRESETS[preset]), "vocab_size": 21128}).num_parameters() == count


def test_initial_weights_follow_the_seed_and_gpt2s_spread() -> None:
    torch.manual_seed(5)
    one = GPT2LMHeadModel(config(n_embd=256, n_layer=2))
    torch.manual_seed(5)
    two = GPT2LMHeadModel(config(n_embd=256, n_layer=2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    block = one.transformer.h[0]
    assert abs(block.mlp.c_fc.weight.std() - 0.02) < 1e-3
    assert abs(block.mlp.c_proj.weight.std() - 0.02 / 2) < 1e-3
    assert abs(one.transformer.wte.weight.std() - 0.02) < 1e-3
    assert block.ln_1.weight.eq(1).all() and block.attn.c_attn.bias.eq(0).all()
    assert one(ids(), ids().roll(-1, 1)).item() == pytest.approx(torch.log(torch.tensor(float(SIZE))).item(), abs=0.15)


def test_bf16_logits_give_a_float32_loss(model) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids(), ids())
    assert loss.dtype == torch.float32


def test_weights_that_do_not_fit_are_all_named(model) -> None:
    wrong = weights_of(model)
    wrong["transformer.extra"] = wrong.pop("transformer.wpe.weight")
    wrong["transformer.ln_f.bias"] = torch.zeros(3)
    with pytest.raises(UserError, match="wpe.weight is missing.*extra is unknown.*ln_f.bias is \\(3,\\) instead"):
        load_weights(model, wrong)


def test_unknown_keys_of_a_config_survive_the_round_trip() -> None:
    content = {**config().to_dict(), "task_specific_params": {"text-generation": {"max_length": 320}}}
    assert ModelConfig.from_dict(content, "x").to_dict() == content


@pytest.mark.parametrize(
    "change, line",
    [
        ({"n_head": 5}, "n_embd 48 is not divisible by n_head 5"),
        ({"n_layer": "3"}, "n_layer must be a whole number"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"resid_pdrop": 1.5}, "resid_pdrop must be"),
    ],
)
def test_configs_of_other_models_are_refused(change: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ModelConfig.from_dict({**config().to_dict(), **change}, "config.json")
