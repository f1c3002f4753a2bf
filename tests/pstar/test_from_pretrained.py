"""from_pretrained inside model_func: BERT, GPT-2 and Llama are fine-tuned by the engine as by plain PyTorch.

One process: the bits of AdamW in torch operations (toy.adamw). torch.optim.AdamW rounds otherwise: losses within 1e-5
relative over these steps, as in optim/test_hybrid_adam.py. Two ranks add gradients in another order, with the tolerances of
test_engine_ranks.py: losses 1e-5 relative, weights 1e-4 absolute.

The checkpoints are small models with random weights: no network is needed.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pstar
from tests import toy
from tests.cover import quick_only
from tests.pstar.test_engine_ranks import global_losses

STEPS, ROWS = 4, 4
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
KINDS = ("bert", "gpt2", "llama")

# Headlines in the form of CLUE's TNEWS (one JSON object a line: label, label_desc, sentence), written for this test.
HEADLINES = [
    {"label": "103", "label_desc": "news_sports", "sentence": "主队加时赛逆转，门将扑出两个点球"},
    {"label": "104", "label_desc": "news_finance", "sentence": "银行下调存款利率，市民排队咨询"},
    {"label": "109", "label_desc": "news_tech", "sentence": "新手机换了电池，充电只要二十分钟"},
    {"label": "103", "label_desc": "news_sports", "sentence": "马拉松开跑，三万人冒雨完成比赛"},
    {"label": "104", "label_desc": "news_finance", "sentence": "粮价连跌三周，农户推迟卖粮"},
    {"label": "109", "label_desc": "news_tech", "sentence": "望远镜拍到一颗更远的星系"},
    {"label": "112", "label_desc": "news_travel", "sentence": "古城免票三天，客栈已经订满"},
    {"label": "112", "label_desc": "news_travel", "sentence": "沿海公路通车，看日出不用早起"},
]
LABELS = sorted({line["label"] for line in HEADLINES})
CHARACTERS = sorted(set("".join(line["sentence"] for line in HEADLINES)))
PAD, WINDOW, LONGEST = 0, 12, max(len(line["sentence"]) for line in HEADLINES)
VOCAB = len(CHARACTERS) + 1


def batch(kind: str, step: int) -> dict[str, torch.Tensor]:
    """For BERT four headlines with a class each, padded to (4, longest); else four windows of the text, (4, 12)."""
    if kind != "bert":    # without padding: the mean over two ranks' tokens is the mean of their means
        text = "".join(line["sentence"] for line in HEADLINES)
        starts = [(ROWS * step + row) * 7 % (len(text) - WINDOW) for row in range(ROWS)]
        ids = torch.tensor([[CHARACTERS.index(one) + 1 for one in text[start : start + WINDOW]] for start in starts])
        return {"input_ids": ids, "labels": ids}
    lines = [HEADLINES[(ROWS * step + row) % len(HEADLINES)] for row in range(ROWS)]
    ids = torch.full((ROWS, LONGEST), PAD)
    for row, line in enumerate(lines):
        ids[row, : len(line["sentence"])] = torch.tensor([CHARACTERS.index(one) + 1 for one in line["sentence"]])
    labels = torch.tensor([LABELS.index(line["label"]) for line in lines])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a pretrained model as the hub has it; of BERT without a classifier, which fine-tuning adds."""
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(1)
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB, **SMALL))
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, **ends)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **SMALL, **ends)
        model = transformers.LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)


def from_folder(kind: str, folder: Path, **keys: Any) -> Callable[[], nn.Module]:
    """A model_func that reads the folder, as a user writes it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if kind == "bert":
        keys["num_labels"], cls = len(LABELS), transformers.AutoModelForSequenceClassification
    else:
        cls = transformers.AutoModelForCausalLM
    return lambda: cls.from_pretrained(folder, **keys).train()


def loss_of(kind: str, model: nn.Module, step: int) -> torch.Tensor:
    return model(**batch(kind, step)).loss


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        save(kind, folder)
    return made


@pytest.mark.parametrize("near", ["min", "40%"])
@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_gives_the_bits_of_plain_pytorch(kind: str, near: str, folders: dict[str, Path]) -> None:
    """Dropout is on; the classifier that BERT's folder lacks begins with the same random numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")    # "lazy start is not possible" would be one
        model = toy.compare(from_folder(kind, folders[kind]), functools.partial(loss_of, kind), STEPS, near_budget=near,
                            default_chunk_size=3_000)
    assert model.schedule.num_traced == 1 and model.near.peak_bytes <= model.near.budget_bytes
    assert model.ledger.moves["near to far"] > 0 and model.module.training


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_follows_adamw_of_torch(kind: str, folders: dict[str, Path]) -> None:
    model_func, num_steps = from_folder(kind, folders[kind]), 8
    model, optimizer = toy.build(model_func, near_budget="min")
    losses = []
    for step in range(num_steps):
        torch.manual_seed(step)    # for dropout
        optimizer.zero_grad()
        loss = loss_of(kind, model, step)
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    for variant in ("foreach", "fused"):
        theirs, _ = toy.plain_run(model_func, functools.partial(loss_of, kind), num_steps,
                                  functools.partial(torch.optim.AdamW, **{variant: True}))
        assert losses == pytest.approx(theirs, rel=1e-5), variant
    assert sum(losses[-2:]) < sum(losses[:2]), "it learns the headlines"


def mapped_from(address: int) -> str:
    """The file whose memory map holds an address of this process, "" for memory of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
    return ""


def in_own_memory(model: nn.Module, file: Path) -> set[str]:
    """The names of the parameters that are not pages of the file."""
    return {name for name, param in model.named_parameters() if mapped_from(param.data_ptr()) != str(file)}


def watched_case(rank: int, num_ranks: int, kind: str, folder: Path) -> dict[str, Any]:
    """Trains on a rank's rows; says which parameters were in the rank's memory when model_func returned."""
    pretrained, own = from_folder(kind, folder), []

    def model_func() -> nn.Module:
        model = pretrained()
        own.append({name for name in in_own_memory(model, folder / "model.safetensors") if "classifier" not in name})
        return model

    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(model_func, 0, toy.config(near_budget="min", default_chunk_size=3_000))
    model.train()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = {key: value[rank::num_ranks] for key, value in batch(kind, step).items()}
        loss = model(**mine).loss
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": global_losses(losses, num_ranks), "weights": model.gather_state()[0], "own": own,
            "held": model.model_data_bytes}


def without_dropout(kind: str, target: Path) -> Path:
    """A folder of a model without dropout: two ranks draw other masks than one process."""
    save(kind, target)
    config = json.loads((target / "config.json").read_text())
    config |= {key: 0.0 for key in config if key.endswith(("dropout", "dropout_prob", "_pdrop"))}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists memory maps")
@pytest.mark.parametrize("kind", quick_only(KINDS, "bert"))
def test_two_ranks_follow_one_process_and_hold_pages_of_the_file_only(ranks, kind, tmp_path) -> None:
    folder = without_dropout(kind, tmp_path / "model")
    results = ranks(2).run(watched_case, kind, folder)
    assert [result["own"] for result in results] == [[set()], [set()]], "model_func ran once, and made no copy"
    losses, plain = toy.plain_run(from_folder(kind, folder), functools.partial(loss_of, kind), STEPS)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in plain.items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=0, atol=1e-4)
    whole = sum(4 * value.numel() for value in plain.values())
    assert all(result["held"] < 0.75 * 3 * whole for result in results), "each has about half of weights and moments"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists memory maps")
def test_another_dtype_than_the_file_s_costs_a_copy(tmp_path) -> None:
    """The page says so; and without a dtype the engine takes fp32 masters from a bf16 file, without a copy."""
    save("llama", tmp_path, torch.bfloat16)
    file = tmp_path / "model.safetensors"
    as_stored, cast = from_folder("llama", tmp_path), from_folder("llama", tmp_path, dtype=torch.float32)
    assert not in_own_memory(as_stored(), file)
    assert in_own_memory(cast(), file) == {name for name, _ in cast().named_parameters()}
    trained = [toy.build(model_func, near_budget="min") for model_func in (as_stored, cast)]
    for step in range(STEPS):
        first, second = (toy_step(model, optimizer, step) for model, optimizer in trained)
        assert first == second, "masters are fp32 either way"


def toy_step(model: pstar.Engine, optimizer: Any, step: int) -> float:
    optimizer.zero_grad()
    loss = loss_of("llama", model, step)
    model.backward(loss)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kind", KINDS)
def test_exported_weights_load_with_from_pretrained(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model_func = from_folder(kind, folders[kind])
    model, optimizer = toy.build(model_func, near_budget="min")
    optimizer.zero_grad()
    model.backward(loss_of(kind, model, 0))
    optimizer.step()
    model.module.config.save_pretrained(tmp_path)
    model.export_weights(tmp_path / "model.safetensors")
    expected = model.gather_state()[0]
    loaded = dict(from_folder(kind, tmp_path)().named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_generate_works_on_the_engine_s_module_and_training_goes_on(folders: dict[str, Path]) -> None:
    model_func, prompt = from_folder("llama", folders["llama"]), batch("llama", 0)["input_ids"][:2, :5]
    plain, (model, optimizer) = model_func().eval(), toy.build(model_func, near_budget="min")
    keys = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    model.eval()
    with torch.no_grad():
        assert torch.equal(model.module.generate(prompt, **keys), plain.generate(prompt, **keys))
    model.train()
    assert toy_step(model, optimizer, 0) == loss_of("llama", plain.train(), 0).item()


class Wrapped(nn.Module):
    """A pretrained model with a layer of the user's own, made before it or after it."""

    def __init__(self, pretrained: Callable[[], nn.Module], first: bool) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8) if first else None
        self.inner = pretrained()
        self.own = self.own or nn.Linear(8, 8)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss = self.inner(**inputs).loss
        return loss + self.own(loss.expand(8)).square().mean()


@pytest.mark.parametrize("first", [True, False])
def test_what_the_file_lacks_draws_its_random_numbers_in_its_turn(first: bool, folders: dict[str, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toy.compare(lambda: Wrapped(from_folder("bert", folders["bert"]), first),
                    lambda model, step: model(**batch("bert", step)), STEPS)


def test_a_larger_embedding_starts_with_a_warning_and_the_bits_of_plain_pytorch(folders: dict[str, Path]) -> None:
    """Transformers draws the new rows around the mean of the old ones, so it reads values."""
    def model_func() -> nn.Module:
        model = from_folder("gpt2", folders["gpt2"])()
        model.resize_token_embeddings(VOCAB + 5)
        return model

    with pytest.warns(UserWarning, match="lazy start is not possible"):
        toy.compare(model_func, functools.partial(loss_of, "gpt2"), STEPS)


@pytest.mark.parametrize("change, reason", [
    (lambda weight: weight.mul_(torch.linspace(0.5, 1.5, weight.shape[1])), "writes a value that it makes into a tensor"),
    (nn.init.normal_, "draws random numbers into a tensor with memory")])
def test_a_change_of_loaded_weights_ends_lazy_start_with_a_warning(change, reason, folders: dict[str, Path]) -> None:
    """Before, the first was lost without a word."""
    def model_func() -> nn.Module:
        model = from_folder("llama", folders["llama"])()
        with torch.no_grad():
            change(model.lm_head.weight)
        return model

    with pytest.warns(UserWarning, match=f"lazy start is not possible .* {reason}"):
        toy.compare(model_func, functools.partial(loss_of, "llama"), STEPS)
