"""Chapter 08's methods by themselves: what they train, count, merge and generate. test_08_peft.py has PEFT as oracle."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.checkpoint.huggingface import shapes_of
from gpt2_chinese.errors import UserError
from gpt2_chinese.generate.decoding import generate
from gpt2_chinese.generate.kv_cache import Cached, Plain
from gpt2_chinese.generate.sampling import Sampling
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from tests.chapters import adapters
from tests.chapters.adapters import CASES, CHAPTER, CONFIG, MERGED, adapted, base, batch, logits, spec, train, trained
from tests.chapters.technique import ROOT, technique
from tests.cover import quick_only
from tests.layers import floor_plan

apply = technique(CHAPTER, "methods.apply")
counts = technique(CHAPTER, "methods.counts")
wrap = technique(CHAPTER, "methods.wrap")
MethodSpec = technique(CHAPTER, "methods.spec").MethodSpec
METHODS = technique(CHAPTER, "methods.spec").METHODS
EPS = torch.finfo(torch.float32).eps
GREEDY = Sampling(greedy=True)
WITHOUT_TORCH = ("__init__", "spec", "counts", "peft_config")
ONE_EACH = ("lora", "dora", "ia3", "prefix", "prompt", "adapter", "bitfit")
SMALL = {"rank": 3, "bottleneck": 5, "num_virtual_tokens": 4}


# ---- what is trained

# the names of all trained parameters, as ends of names in one block, and outside of blocks
TRAINED = {
    "lora": ({"attn.c_attn.lora_A.weight", "attn.c_attn.lora_B.weight"}, set()),
    "dora": ({f"{layer}.{part}" for layer in ("attn.c_attn", "mlp.c_proj")
              for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")}, set()),
    "ia3": ({"attn.c_attn.ia3_l", "mlp.c_proj.ia3_l"}, set()),
    "bitfit": ({f"{layer}.bias" for layer in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
               {"transformer.ln_f.bias"}),
    "adapter": ({f"{layer}.adapter.{part}" for layer in ("attn.c_proj", "mlp.c_proj")
                 for part in ("down.weight", "down.bias", "up.weight", "up.bias")}
                | {f"{norm}.{part}" for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
                {"transformer.ln_f.weight", "transformer.ln_f.bias"}),
    "prefix": ({"attn.prefix"}, set()),
    "prompt": (set(), {"transformer.prompt_embeddings"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_only_what_should_be_trained_moves(name):
    model = adapted(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    named = set(apply.trained_parameters(model))
    if name in TRAINED:
        of_block, outside = TRAINED[name]
        blocks = {f"transformer.h.{number}.{end}" for number in range(CONFIG.n_layer) for end in of_block}
        assert {wrap.plain_name(key) for key in named} == blocks | outside
    train(model, 3)
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key]) != (key in named), key
    original = dict(base().named_parameters())
    assert apply.base_parameters(model).keys() == original.keys()
    for key, value in apply.base_parameters(model).items():
        assert value.requires_grad or torch.equal(value, original[key]), key


def test_full_trains_all_and_changes_nothing_in_the_model():
    model, plain = base(), base()
    apply.apply_method(model, MethodSpec("full"))
    assert train(model, 3) == train(plain, 3)
    assert apply.trained_parameters(model).keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(value, plain.get_parameter(key)) for key, value in apply.merged_weights(model).items())


@pytest.mark.parametrize("config", (CONFIG, ModelConfig(n_layer=3, n_embd=16, n_head=2, n_positions=31, vocab_size=29)))
@pytest.mark.parametrize("modules", (None, ("attn.c_proj",), adapters.MODULES))
def test_counts_of_models_are_those_of_the_formulas(config, modules):
    for row in counts.trained_rows(config, MethodSpec(modules=modules, **SMALL)):
        model = GPT2LMHeadModel(dataclasses.replace(config))
        spec = MethodSpec(row.method, modules=modules, **SMALL)
        apply.apply_method(model, spec)
        assert sum(p.numel() for p in apply.trained_parameters(model).values()) == row.count, row.method
        assert eval(row.formula, {}, counts.symbols(config, spec)) == row.count, f"{row.method}: the text of the formula"
        assert row.share == row.count / config.num_parameters()


def test_the_table_has_a_row_for_each_method():
    assert tuple(row.method for row in counts.trained_rows(CONFIG)) == METHODS
    assert counts.trained_rows(CONFIG)[0].share == 1


@pytest.mark.parametrize("name", quick_only(CASES, *ONE_EACH))
def test_a_seed_decides_the_first_numbers(name):
    first, same, other = (apply.trained_parameters(adapted(name, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(first[key], same[key]) for key in first)
    draws = CASES[name]["method"] not in ("ia3", "bitfit")
    assert any(not torch.equal(first[key], other[key]) for key in first) == draws


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["method"] in ("lora", "dora", "ia3", "bitfit")])
def test_the_first_step_computes_what_the_base_computes(name):
    # dora divides and multiplies by the same lengths: two roundings a layer
    torch.testing.assert_close(logits(adapted(name)), logits(base()), rtol=0, atol=1e-5 if name == "dora" else 0)


def test_the_files_of_flags_import_no_torch():
    folder = Path("chapters") / CHAPTER / "methods"
    for file in WITHOUT_TORCH:
        for line, name in floor_plan.imports(ROOT, folder / f"{file}.py"):
            known = name.split(".")[:2] in [["methods", quick] for quick in WITHOUT_TORCH]
            light = name.startswith(("gpt2_chinese.errors", "gpt2_chinese.model.config", "__future__")) or known
            light = light or name.split(".")[0] in ("math", "re", "dataclasses", "typing", "collections", "importlib")
            assert light, f"{file}.py:{line}: {name}"


# ---- each method against its definition


def test_bitfit_has_the_bias_gradients_of_the_full_model():
    full, bitfit = base(), adapted("bitfit")
    for model in (full, bitfit):
        model(*batch(0)).backward()
    for key, parameter in bitfit.named_parameters():
        if key.endswith(".bias"):
            assert torch.equal(parameter.grad, full.get_parameter(key).grad), key
        else:
            assert parameter.grad is None, key


def test_adapters_compute_the_formula_of_houlsby():
    model, _ = trained("adapter")
    plain = base()
    plain.load_state_dict({key: value.detach() for key, value in apply.base_parameters(model).items()}, strict=False)
    for number, block in enumerate(plain.transformer.h):
        for path in ("attn.c_proj", "mlp.c_proj"):
            get = lambda part, prefix=f"transformer.h.{number}.{path}.adapter.": model.get_parameter(prefix + part)  # noqa: E731
            tensors = [get(part).detach() for part in ("down.weight", "down.bias", "up.weight", "up.bias")]

            def bottleneck(_, __, h, tensors=tensors):
                down, down_bias, up, up_bias = tensors
                x = h @ down.t() + down_bias
                gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
                return h + gelu @ up.t() + up_bias

            block.get_submodule(path).register_forward_hook(bottleneck)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)


def test_adapters_begin_near_the_identity():
    model = adapted("adapter")
    for layer in (m for m in model.modules() if type(m).__name__ == "Bottleneck"):
        for weight in (layer.down.weight, layer.up.weight):
            assert 0 < weight.abs().max() <= 2e-2
            assert 0.5e-2 < weight.std() < 1.2e-2
        assert not layer.down.bias.any() and not layer.up.bias.any()
    assert (logits(model) - logits(base())).abs().max() < 0.05


def test_dora_keeps_the_length_of_each_output_in_its_magnitude():
    model, _ = trained("dora")
    weights = apply.merged_weights(model)
    for number, block in enumerate(model.transformer.h):
        length = weights[f"transformer.h.{number}.attn.c_attn.weight"].norm(dim=0)
        torch.testing.assert_close(length, block.attn.c_attn.lora_magnitude_vector.detach().abs(), rtol=1e-5, atol=0)


def test_a_prefix_of_a_prompts_keys_and_values_computes_the_same():
    prompt, prefix = trained("prompt")[0], adapted("prefix").eval()
    with torch.no_grad():
        for block, (keys, values) in zip(prefix.transformer.h, prompt.transformer.virtual_keys_values(), strict=True):
            both = [part[0].transpose(0, 1).flatten(1) for part in (keys, values)]  # (v, C) each
            block.attn.prefix.copy_(torch.cat(both, dim=1))
    torch.testing.assert_close(logits(prefix), logits(prompt), rtol=0, atol=1e-5)


def test_a_prompt_is_what_its_words_are():
    ids = torch.tensor([7, 1, 30, 2, 2])
    model = adapted("prompt").eval()
    with torch.no_grad():
        model.transformer.prompt_embeddings.copy_(model.transformer.wte(ids))
    text = batch(0)[0]
    with torch.no_grad():
        expected = base().eval()(torch.cat([ids.expand(len(text), -1), text], dim=1))[:, len(ids) :]
    torch.testing.assert_close(model(text), expected, rtol=0, atol=1e-5)


def test_dropout_acts_on_the_small_matrices_alone():
    model = base()
    torch.manual_seed(3)
    apply.apply_method(model, MethodSpec("lora", rank=4, dropout=0.5))
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.lora_B.weight.normal_()
    ids = batch(0)[0]
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))
    with torch.no_grad():
        for block in model.train().transformer.h:
            block.attn.c_attn.lora_B.weight.zero_()
    assert torch.equal(model(ids), logits(base()))


@pytest.mark.parametrize("name", quick_only(CASES, *ONE_EACH))
def test_a_method_trains_in_bf16(name):
    model, text = adapted(name), batch(0)
    expected = model(*text)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*text)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=0.02)  # bf16 has 8 bits: 0.4 % of activations near 1
    assert all(parameter.grad is not None for parameter in apply.trained_parameters(model).values())


# ---- merge and unmerge


@pytest.mark.parametrize("name", MERGED)
def test_merged_logits_are_those_of_the_adapter_and_unmerging_gives_the_base(name):
    model, _ = trained(name)
    before, start = logits(model), {key: value.detach().clone() for key, value in apply.base_parameters(model).items()}
    weights = {key: value.clone() for key, value in apply.merged_weights(model).items()}
    apply.merge(model)
    merged = {key: value.detach().clone() for key, value in apply.base_parameters(model).items()}
    assert all(torch.equal(merged[key], weights[key]) for key in weights)
    assert any(not torch.equal(merged[key], start[key]) for key in merged)
    assert all(torch.equal(apply.merged_weights(model)[key], weights[key]) for key in weights)  # not merged twice
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    apply.unmerge(model)
    # An operation rounds by at most EPS / 2 of its result. lora: a sum and a difference; ia3: a product and a quotient: EPS.
    # dora: all four, of a direction that is at most twice the merged weight here: 2 EPS
    factor = 2 if name == "dora" else 1
    for key, value in apply.base_parameters(model).items():
        size = torch.maximum(start[key].abs(), factor * merged[key].abs())
        assert ((value - start[key]).abs() <= factor * EPS * size).all(), key
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", (*MERGED, "bitfit"))
def test_merged_weights_are_a_plain_model(name):
    model, _ = trained(name)
    weights = apply.merged_weights(model)
    assert {key: tuple(value.shape) for key, value in weights.items()} == shapes_of(CONFIG)
    assert list(weights) == list(shapes_of(CONFIG))
    plain = GPT2LMHeadModel(CONFIG)
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-5)


class Half(nn.Module):
    """A Conv1D that stores its weight in 16 bit, as a quantised layer: codes, and dequantize()."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.num_in, self.num_out = layer.weight.shape
        self.register_buffer("codes", layer.weight.detach().t().contiguous().bfloat16())
        self.bias = layer.bias

    def dequantize(self) -> Tensor:
        return self.codes.float().t()  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize().t(), self.bias)


@pytest.mark.parametrize("name", quick_only(CASES, *ONE_EACH))
def test_a_method_wraps_quantised_layers_as_it_wraps_plain_ones(name):
    quantised, rounded = base(), base()
    for model in (quantised, rounded):
        for block in model.transformer.h:
            for path in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
                half = Half(block.get_submodule(path))
                if model is quantised:
                    block.set_submodule(path, half)
                else:
                    block.get_submodule(path).weight.data = half.dequantize()
        torch.manual_seed(3)
        apply.apply_method(model, spec(name))
    assert train(quantised, 4) == train(rounded, 4)
    if name in (*MERGED, "bitfit"):
        expected = apply.merged_weights(rounded)
        assert all(torch.equal(value, expected[key]) for key, value in apply.merged_weights(quantised).items())
        assert all(value.is_contiguous() for value in apply.merged_weights(quantised).values())  # as files need it
    if name in MERGED:
        with pytest.raises(UserError, match="--bits"):
            apply.merge(quantised)


# ---- generation


def continued(model: nn.Module, cache: bool, new: int) -> list[list[int]]:
    return generate(model, [[5, 9, 2], [30], [1, 2, 3, 4, 5, 6]], new, GREEDY, cache=cache)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_the_same_with_and_without_the_cache_and_merged(name):
    model, _ = trained(name)
    text = continued(model, cache=True, new=30)  # rows outgrow the 24 positions, and begin anew
    assert text == continued(model, cache=False, new=30)
    assert text != continued(base().eval(), cache=True, new=30), "the method changed nothing"
    if name in (*MERGED, "bitfit"):
        apply.merge(model)
        assert text == continued(model, cache=True, new=30) == continued(model, cache=False, new=30)


@pytest.mark.parametrize("name", ("prefix", "prompt", "lora", "adapter"))
def test_the_cache_gives_the_logits_of_rows_of_any_length(name):
    model, _ = trained(name)
    cached, plain = Cached(model, 19), Plain(model)
    rows = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]
    for new in range(6):
        torch.testing.assert_close(cached(rows), plain(rows), rtol=0, atol=1e-5)
        if new == 3:
            rows = [rows[0], rows[2]]
            cached.keep([0, 2])
        rows = [[*row, new] for row in rows]


@pytest.mark.parametrize("name", ("prefix", "prompt"))
def test_virtual_tokens_take_positions_from_the_text(name):
    model, _ = trained(name)
    assert model.config.n_positions == 24 - 5
    assert model(torch.zeros(1, 19, dtype=torch.int64)).shape == (1, 19, 53)
    with pytest.raises(IndexError):
        model(torch.zeros(1, 20, dtype=torch.int64))


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"method": "lore"}, "--method lore: give one of full, lora, dora, adapter, prefix, prompt, ia3, bitfit"),
        ({"rank": 25}, "--rank 25 is above 24: c_attn is 24 x 72"),
        ({"rank": 0}, "--rank 0: give a whole number of at least 1"),
        ({"rank": "4"}, "--rank 4: give a whole number of at least 1"),
        ({"method": "dora", "rank": 25, "modules": ("mlp.c_proj",)}, "--rank 25 is above 24: mlp.c_proj is 80 x 24"),
        ({"alpha": 0.0}, "--alpha 0.0: give a number above 0 and below 1e9"),
        ({"alpha": float("nan")}, "--alpha nan: give a number above 0 and below 1e9"),
        ({"dropout": 1.0}, "--dropout 1.0: give a number of at least 0 and below 1"),
        ({"modules": ("c_attn", "q_proj")},
         "--modules q_proj: a block has the layers c_attn, attn.c_proj, c_fc, mlp.c_proj"),
        ({"method": "ia3", "modules": ()}, "--modules is empty: give some of c_attn, attn.c_proj, c_fc, mlp.c_proj"),
        ({"method": "adapter", "bottleneck": 25}, "--bottleneck 25 is above 24: the model's width is 24"),
        ({"method": "prefix", "num_virtual_tokens": 24},
         "--virtual-tokens 24 is above 23: the model has 24 positions for them and the text"),
        ({"method": "prompt", "num_virtual_tokens": 0}, "--virtual-tokens 0: give a whole number of at least 1"),
    ),
)  # fmt: skip
def test_numbers_that_do_not_fit_are_one_line_that_names_the_flag(fields, message):
    model = base()
    for refuse in (lambda: MethodSpec(**fields).check(CONFIG), lambda: apply.apply_method(model, MethodSpec(**fields))):
        with pytest.raises(UserError) as error:
            refuse()
        assert str(error.value) == message
    assert all(parameter.requires_grad for parameter in model.parameters()), "a refused method changes nothing"


def test_a_method_ignores_the_numbers_of_others():
    MethodSpec("ia3", rank=-1, alpha=0, bottleneck=0, num_virtual_tokens=999).check(CONFIG)
    MethodSpec("bitfit", modules=("nothing",)).check(CONFIG)


def test_virtual_tokens_and_text_need_enough_positions():
    MethodSpec("prefix", num_virtual_tokens=8).check(CONFIG, seq_len=16)
    with pytest.raises(UserError) as error:
        MethodSpec("prefix", num_virtual_tokens=8).check(CONFIG, seq_len=17)
    assert str(error.value) == ("--seq-len 17 and --virtual-tokens 8 need 25 positions, the model has 24: "
                                "give --seq-len 16 or less")  # fmt: skip


@pytest.mark.parametrize("name", ("adapter", "prefix", "prompt"))
def test_what_no_weight_holds_is_not_merged(name):
    model = adapted(name)
    for refuse in (apply.merge, apply.unmerge, apply.merged_weights):
        with pytest.raises(UserError, match=f"^--merge: no weight of a plain GPT-2 can hold what {name} adds"):
            refuse(model)


def test_a_second_method_is_refused():
    model = adapted("lora")
    with pytest.raises(ValueError, match="already has the method lora"):
        apply.apply_method(model, MethodSpec("ia3"))


def test_a_factor_of_zero_cannot_be_unmerged():
    model = adapted("ia3")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.ia3_l[0] = 0
    apply.merge(model)
    with pytest.raises(ValueError, match="is 0"):
        apply.unmerge(model)
