"""Weights in and out: files as transformers of any age writes them, and what is refused, always in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.load import initial_state, load
from gpt2_chinese.checkpoint.model_state import weights_of
from gpt2_chinese.checkpoint.trained_model import begin_from, check_initial, find_weights, load_model, read_weights
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from gpt2_chinese.weights import export, main

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
SIZES = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24}
# as the config.json of uer/gpt2-chinese-cluecorpussmall: ids outside the vocabulary, fields that are not ours
FIELDS = {"bos_token_id": 50256, "eos_token_id": 50256, "gradient_checkpointing": False, "output_past": True,
          "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 320}},
          "summary_type": "cls_index"}  # fmt: skip


@pytest.fixture
def theirs(vocab: Path):
    torch.manual_seed(1)
    size = len(vocab.read_text(encoding="utf-8").splitlines())
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=size, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def folder(theirs, vocab: Path, tmp_path: Path) -> Path:
    """A folder as it is downloaded, without weights: a test writes those."""
    made = tmp_path / "hf"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({**theirs.config.to_dict(), **FIELDS, "n_ctx": 24}))
    shutil.copy(vocab, made)
    return made


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def without_prefix(found: dict) -> dict:
    return {name.removeprefix("transformer."): tensor for name, tensor in found.items() if name != "lm_head.weight"}


def with_float_masks(found: dict) -> dict:
    """As transformers 2 and UER's converter write it."""
    return found | {f"transformer.h.{i}.attn.bias": torch.ones(24, 24).tril().view(1, 1, 24, 24) for i in range(3)}


def with_bool_masks(found: dict) -> dict:
    """As transformers 4.26 writes it."""
    more = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool).tril() for i in range(3)}
    return found | more | {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}


FORMS = {
    "now": lambda found: found,
    "no head": lambda found: {n: t for n, t in found.items() if n != "lm_head.weight"},
    "no prefix": without_prefix,
    "float masks": with_float_masks,
    "bool masks": with_bool_masks,
    "bool masks, no prefix": lambda found: without_prefix(with_bool_masks(found)),
}


def write(found: dict, folder: Path, kind: str) -> Path:
    """Writes weights as one file or two with an index; returns the one file or the index."""
    if kind == "legacy":
        torch.save(found, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        return folder / "pytorch_model.bin"
    name, form = ("model", "safetensors") if "safetensors" in kind else ("pytorch_model", "bin")

    def save(part: dict, file: Path) -> Path:
        save_file(part, file, metadata={"format": "pt"}) if form == "safetensors" else torch.save(part, file)
        return file

    if "sharded" not in kind:
        return save(found, folder / f"{name}.{form}")
    names = sorted(found)
    places = {n: f"{name}-0000{1 + (i > len(names) // 2)}-of-00002.{form}" for i, n in enumerate(names)}
    for file in sorted(set(places.values())):
        save({n: found[n] for n in names if places[n] == file}, folder / file)
    index = folder / f"{name}.{form}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin", "legacy", "sharded safetensors", "sharded bin"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_any_age_have_the_same_bits_and_logits(theirs, folder: Path, form: str, kind: str) -> None:
    file = write(FORMS[form](state(theirs)), folder, kind)
    wanted = dict(theirs.named_parameters())
    for path in (folder, file):
        found = read_weights(path)
        assert set(found) == set(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model, vocabulary = load_model(folder)
    ids = torch.tensor([vocabulary.encode_prompt("今天天气很好")])
    assert (model(ids) - theirs(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_folder_goes_in_and_out_unchanged(theirs, folder: Path, tmp_path: Path, form: str, dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in without_prefix(state(theirs)).items()}
    write(stored, folder, "bin")
    before = json.loads((folder / "config.json").read_text())
    main(["export", str(folder), "--output", str(tmp_path / "out"), "--format", form])
    file = find_weights(tmp_path / "out")
    assert begin_from(tmp_path / "out") == (file, tmp_path / "out" / "vocab.txt"), "training can begin from an export"
    written = load_file(file) if form == "safetensors" else torch.load(file, weights_only=True)
    assert set(written) - {"lm_head.weight"} == {f"transformer.{name}" for name in stored}
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    assert all(torch.equal(written[f"transformer.{name}"], stored[name]) for name in stored)
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    vocabulary = Vocabulary.load(folder / "vocab.txt")
    ids = {"bos_token_id": vocabulary.begin_id, "eos_token_id": vocabulary.end_id, "pad_token_id": vocabulary.pad_id}
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= ids.keys() | {"architectures", "model_type", "tie_word_embeddings"} and before["model_type"] == "gpt2"
    assert {key: after[key] for key in ids} == ids and after["n_ctx"] == after["n_positions"] == 24
    again, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert all(torch.equal(p.float(), stored[n.removeprefix("transformer.")].float()) for n, p in again.named_parameters())
    assert read_weights(export(tmp_path / "out", tmp_path / "twice")).keys() == dict(theirs.named_parameters()).keys()


def test_export_converts_to_another_dtype_and_refuses_numbers_out_of_its_range(theirs, folder: Path, tmp_path: Path) -> None:
    found = state(theirs)
    write(found, folder, "bin")
    out = export(folder, tmp_path / "half", dtype="float16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert all(torch.equal(t, found[n].half()) for n, t in load_file(out / "model.safetensors").items())
    with pytest.raises(UserError, match="half exists already"):
        export(folder, tmp_path / "half")
    found["transformer.wpe.weight"][0, 0] = 1e6
    write(found, folder, "bin")
    with pytest.raises(UserError, match=r"--dtype float16 cannot hold the numbers of transformer\.wpe\.weight"):
        export(folder, tmp_path / "again", dtype="float16")
    assert not (tmp_path / "again").exists()


def test_a_checkpoint_and_its_run_are_exported(tmp_path: Path, vocab: Path) -> None:
    config = ModelConfig(**SIZES, vocab_size=Vocabulary.load(vocab).size, extra={"summary_type": "mean"})
    model = GPT2LMHeadModel(config)
    told = {"model": config.to_dict(), "settings": {"vocab": str(vocab)}, "extra": {}}
    step = step_folder.save(tmp_path / "run" / "checkpoints", 5, weights_of(model), {}, told)
    for path in (tmp_path / "run", step, step / "model.safetensors"):
        out = export(path, tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        assert transformers.AutoConfig.from_pretrained(out).summary_type == "mean"
        assert all(torch.equal(t, weights_of(model)[n]) for n, t in load_file(out / "model.safetensors").items())


def test_weights_to_begin_with_are_float32_and_of_step_0(theirs, folder: Path) -> None:
    write({name: tensor.half() for name, tensor in state(theirs).items()}, folder, "bin")
    file, vocab = begin_from(folder)
    weights, moments, told = load(file)
    assert vocab == folder / "vocab.txt" and moments == {} and (told["step"], told["extra"]) == (0, {})
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert initial_state(file)[0].keys() == weights.keys()


# ---- what is refused ---------------------------------------------------------------------------------------------------


def other_head(found: dict) -> dict:
    return found | {"lm_head.weight": found["lm_head.weight"] + 1e-6}


def wrong_shapes(found: dict) -> dict:
    return found | {"transformer.wpe.weight": torch.zeros(25, 32), "transformer.ln_f.bias": torch.zeros(3)}


REFUSED = {
    "head": (other_head, "lm_head.weight is not the embedding"),
    "shapes": (wrong_shapes, r"wpe.weight is \(25, 32\) instead of \(24, 32\).*ln_f.bias is \(3,\) instead of \(32,\)"),
    "unknown": (lambda found: found | {"transformer.h.0.attn.rotary": torch.zeros(2)}, "h.0.attn.rotary is unknown"),
    "a bias that is no mask": (lambda found: found | {"transformer.h.0.attn.bias": torch.zeros(96)}, "attn.bias is unknown"),
    "missing": (lambda found: {n: t for n, t in found.items() if "h.1.mlp" not in n}, "h.1.mlp.c_fc.weight is missing"),
    "twice": (lambda found: found | {"wte.weight": torch.zeros(2)}, "wte.weight twice|twice, with and without"),
    "whole numbers": (lambda found: found | {"transformer.ln_f.bias": torch.ones(32).int()}, "holds torch.int32"),
    "no tensors": (lambda found: {"model": found, "step": 3}, "model is no plain tensor"),
    "a list": (lambda found: list(found), "holds no weights by name"),
    "sparse": (lambda found: found | {"transformer.ln_f.bias": torch.ones(32).to_sparse()}, "is no plain tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_are_not_this_models_are_refused(theirs, folder: Path, case: str) -> None:
    change, line = REFUSED[case]
    write(change(state(theirs)), folder, "bin")
    config = ModelConfig.from_file(folder)
    for door in (read_weights, load_model, lambda path: check_initial(find_weights(path), config),
                 lambda path: export(path, path / "out")):
        with pytest.raises(UserError, match=line):
            door(folder)


def test_another_vocabulary_is_refused_with_both_sizes(theirs, folder: Path, tmp_path: Path) -> None:
    write(state(theirs), folder, "safetensors")
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    other = tmp_path / "other.txt"
    other.write_text("\n".join(lines[:-7]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"has {len(lines) - 7} entries, the model in .* {len(lines)}"):
        load_model(folder, vocab=other)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"n_embd": 36, "n_layer": 5}, r"ln_1\.weight is missing \(2 layers\).*wte.*wpe.*h\.\*\.ln_1\.weight is \(32,\) "
                                       r"instead of \(36,\) \(3 layers\).*ln_f.bias is \(32,\) instead of \(36,\)$"),
        ({"n_inner": 100}, r"c_fc.weight is \(32, 128\) instead of \(32, 100\)"),
        ({"n_layer": 10**9}, "n_layer 1000000000 is above 1,000"),
        ({"n_positions": 10**6}, r"wpe.weight is \(24, 32\) instead of \(1000000, 32\)"),
        ({"n_embd": 10**60}, "n_embd a number of more than 50 digits is above"),
        ({"n_head": -4}, "n_head must be a whole number of at least 1, not -4"),
        ({"n_layer": [3]}, r"n_layer must be a whole number of at least 1, not \[3\]"),
        ({"n_layer": True}, "n_layer must be a whole number"),
        ({"vocab_size": "many" * 99}, "vocab_size must be a whole number .*[.]{3}$"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a positive number"),
        ({"resid_pdrop": {"a": 1}}, "resid_pdrop must be at least 0"),
        ({"model_type": ["gpt2"]}, "model_type is"),
    ],
)
def test_configurations_that_the_model_cannot_be_are_refused(theirs, folder: Path, change: dict, line: str) -> None:
    write(state(theirs), folder, "safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=line) as told:
        load_model(folder)
    assert "\n" not in str(told.value) and len(str(told.value)) < 3000


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[]", "null", '{"n_layer": ' + "9" * 5000 + "}", "\ud800"])
def test_a_file_that_is_no_configuration_is_refused(theirs, folder: Path, text: str) -> None:
    write(state(theirs), folder, "safetensors")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="config"):
        load_model(folder)


INDEXES = {
    "elsewhere": ({"weight_map": {"a": "../model.safetensors"}}, "of the same folder"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "of the same folder"),
    "no shard": ({"weight_map": {"a": "model-9.safetensors"}}, "names model-9.safetensors, which is missing"),
    "no map": ({"weights": {}}, "no index of weights"),
    "numbers": ({"weight_map": {"a": 3}}, "no index of weights"),
    "empty": ({"weight_map": {}}, "must name"),
    "a list": ([1, 2], "no index of weights"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_wrong_indexes_of_weights_are_refused(theirs, folder: Path, case: str) -> None:
    content, line = INDEXES[case]
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=line):
        load_model(folder)


def test_a_shard_that_lacks_a_name(theirs, folder: Path) -> None:
    index = write(state(theirs), folder, "sharded safetensors")
    content = json.loads(index.read_text())
    content["weight_map"]["transformer.lost"] = sorted(content["weight_map"].values())[0]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"transformer\.lost, which its files do not hold"):
        load_model(folder)


@pytest.mark.parametrize("kind", ["safetensors", "bin", "legacy"])
def test_damaged_files_are_refused_in_one_line(theirs, folder: Path, kind: str) -> None:
    file = write(state(theirs), folder, kind)
    whole = file.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 100, b"<html>not found</html>"):
        file.write_bytes(part)
        with pytest.raises(UserError, match="cannot read the weights|is refused") as told:
            load_model(folder)
        assert "\n" not in str(told.value) and "weights_only" not in str(told.value)


# ---- pickles with a payload --------------------------------------------------------------------------------------------


class Payload:
    """Unpickling it writes a file, as any pickle may do on an unsafe load."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"echo done > {self.file}",)


def poison(folder: Path, target: Path, kind: str) -> None:
    content = {"transformer.wte.weight": Payload(target)}
    if kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip")
    if kind == "shard":
        (folder / "pytorch_model.bin").rename(folder / "evil.bin")
        index = {"weight_map": {"transformer.wte.weight": "evil.bin"}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_an_unsafe_load_runs_the_payload(folder: Path, tmp_path: Path) -> None:
    """An unsafe load writes the file; otherwise the tests below would prove nothing."""
    poison(folder, tmp_path / "written", "zip")
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "written").exists()


def refused(call, capsys, target: Path) -> str:
    with pytest.raises(SystemExit) as end:
        call()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    assert not target.exists(), "the payload has run"
    return said


def train(folder: Path, *flags: object) -> None:
    program = str(Path(__file__).resolve().parents[3] / "chapters" / "00_single" / "train.py")
    resolve(Settings.from_command_line(program, "", [str(flag) for flag in flags]))


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "shard"])
def test_every_door_refuses_a_pickle_with_a_payload(folder: Path, tmp_path: Path, capsys, kind: str) -> None:
    from gpt2_chinese.generate.__main__ import main as generate

    target = tmp_path / "written"
    poison(folder, target, kind)
    doors = {
        "generate": lambda: generate(["--model", str(folder)]),
        "export": lambda: main(["export", str(folder), "--output", str(tmp_path / "out")]),
        "init": lambda: train(folder, "--init-from", folder, "--output-dir", tmp_path / "run"),
    }
    for name, door in doors.items():
        said = refused(door, capsys, target)
        wanted = "could run code" if kind == "pickle" else "is a pickle that names posix.system"
        assert wanted in said, f"{name}: {said}"


def test_a_checkpoint_in_parts_with_a_payload_is_refused(folder: Path, tmp_path: Path, capsys, vocab: Path) -> None:
    """Its metadata are a pickle too; the manifest matches them, as an attacker would make it."""
    from gpt2_chinese.generate.__main__ import main as generate

    target = tmp_path / "written"
    config = ModelConfig(**SIZES, vocab_size=Vocabulary.load(vocab).size)
    staging = step_folder.begin(tmp_path / "checkpoints", 5, 0)
    (staging / "parts").mkdir()
    (staging / "parts" / ".metadata").write_bytes(pickle.dumps(Payload(target)))
    (staging / "parts" / "state.json").write_text('{"steps": {}}')
    step = step_folder.complete(staging, 5, {"model": config.to_dict(), "settings": {"vocab": str(vocab)}, "extra": {}})
    flags = ("--model-config", step, "--vocab", vocab, "--seq-len", 24, "--output-dir", tmp_path / "run")
    for door in (
        lambda: generate(["--model", str(step)]),
        lambda: train(folder, *flags, "--init-from", step),
        lambda: train(folder, *flags, "--resume", step),
    ):
        assert "does not belong there" in refused(door, capsys, target)
