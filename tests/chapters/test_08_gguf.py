"""Chapter 08, quantize/gguf.py: blocks, names, keys and bytes against the gguf package, and a forward pass from the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt2_chinese import GPT2LMHeadModel, ModelConfig, Vocabulary, load_model, weights_of
from gpt2_chinese.checkpoint.final import export_final
from gpt2_chinese.errors import UserError
from tests.chapters.llama_cpp import continued
from tests.chapters.program import ROOT, run
from tests.chapters.technique import technique

CHAPTER = "08_param_efficient"
blocks, writer, words = (technique(CHAPTER, f"quantize.{name}") for name in ("ggml_blocks", "gguf", "gguf_vocabulary"))
compress = technique(CHAPTER, "compress")
gguf = pytest.importorskip("gguf")
VOCAB = ROOT / "cache/vocab.txt"
KINDS = ("F16", "Q8_0", "Q4_0")
SHAPE = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "n_inner": 128}


def make_model(**more: object) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = Vocabulary.load(VOCAB).size
    model = GPT2LMHeadModel(ModelConfig(**{**SHAPE, "vocab_size": size, "initializer_range": 0.1, **more})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "ln_" in name:  # all zeros or ones would hide a mistaken name
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return make_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """A model on disk, as final/ of a run."""
    return export_final(tmp_path_factory.mktemp("model") / "final", model.config, weights_of(model), VOCAB, {})


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory) -> dict[str, Path]:
    """The model as GGUF of each type, written by the command."""
    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp("gguf") / f"{kind}.gguf"
        compress.main(["--model", str(folder), "--gguf", str(found[kind]), "--type", kind])
    return found


# ---- blocks


def hard_rows() -> torch.Tensor:
    """Rows of one block each: normal, zeros, equal magnitudes of both signs, halves of a step, tiny, large, a single one."""
    rows = torch.randn(64, 32)
    rows[1] = 0
    rows[2] = 0.8 * (-1.0) ** torch.arange(32)
    rows[3] = -rows[2]
    rows[4] = torch.arange(-16, 16) + 0.5
    rows[4, 0] = 127  # the scale is 1, so every other weight is halfway between two codes of Q8_0
    rows[5] *= 1e-7  # the scale is a subnormal number in float16
    rows[6] *= 1e4
    rows[7] = 0
    rows[7, 9] = -3
    rows[8] = torch.arange(32) / 4 - 8  # Q4_0: scale 1, codes exact, halves and quarters
    return rows


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_blocks_are_those_of_the_gguf_package_bit_for_bit(kind) -> None:
    rows = torch.cat([hard_rows(), hard_rows().flip(0)], 1)
    number = gguf.GGMLQuantizationType[kind]
    theirs = gguf.quants.quantize(rows.numpy(), number)
    ours = blocks.encode(rows, kind)
    assert np.array_equal(ours.numpy(), theirs.view(np.uint8).reshape(len(rows), -1))
    assert np.array_equal(blocks.decode(ours, kind).numpy(), gguf.quants.dequantize(theirs, number))


@pytest.mark.parametrize("kind, steps", [("Q8_0", 127), ("Q4_0", 8)])
def test_the_error_of_a_block_is_half_a_step(kind, steps) -> None:
    rows = torch.randn(500, 32)
    error = (blocks.decode(blocks.encode(rows, kind), kind) - rows).abs()
    step = rows.abs().amax(1, keepdim=True) / steps
    # Q4_0 has no code for the largest magnitude with the other sign: there a whole step; float16 rounds the scale by 2**-11
    assert (error <= step * (0.5 if kind == "Q8_0" else 1.0) + rows.abs() * 2**-10 + 1e-6).all()
    assert (error / step).max() > 0.45


# ---- files


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_read_by_gguf_holds_our_dequantised_weights_bit_for_bit(model, files, kind) -> None:
    reader = gguf.GGUFReader(files[kind])
    read = {each.name: each for each in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, model.config.n_layer)
    exported = dict(writer.exported_weights(model, kind))
    assert len(read) == len(exported) == len(list(model.named_parameters()))
    for name, ours in exported.items():
        tensor = read.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        theirs = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        inner = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        assert torch.equal(ours, theirs.t() if inner else theirs.view(ours.shape)), name
        matrix = inner or name.endswith("wte.weight")
        wanted = ("Q8_0" if kind == "Q4_0" and not inner else kind) if matrix else "F32"
        assert tensor.tensor_type.name == wanted, name
        if not matrix:
            assert torch.equal(ours, dict(model.named_parameters())[name]), "vectors and positions are not rounded"
    assert not read


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_file_are_the_formula(model, files, kind) -> None:
    reader = gguf.GGUFReader(files[kind])
    width, inner, layers = SHAPE["n_embd"], SHAPE["n_inner"], SHAPE["n_layer"]
    per = {"F16": 16, "Q8_0": 8.5, "Q4_0": 4.5}
    weights = layers * (4 * width * width + 2 * width * inner)
    vectors = layers * (4 * width + 3 * width + width + inner + width) + 2 * width + SHAPE["n_positions"] * width
    head = model.config.vocab_size * width * per["Q8_0" if kind == "Q4_0" else kind]
    assert sum(int(each.n_bytes) for each in reader.tensors) == (weights * per[kind] + head) // 8 + 4 * vectors
    assert all(int(each.data_offset) % 32 == 0 for each in reader.tensors)
    last = reader.tensors[-1]
    end = int(last.data_offset) + int(last.n_bytes)
    assert files[kind].stat().st_size == -(-end // 32) * 32


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_are_those_that_llama_cpp_reads_for_gpt2(model, files, kind) -> None:
    reader, keys = gguf.GGUFReader(files[kind]), gguf.Keys
    vocabulary, config = Vocabulary.load(VOCAB), model.config
    wanted = {
        keys.General.ARCHITECTURE: gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GPT2],
        keys.General.FILE_TYPE: int(gguf.LlamaFileType[f"MOSTLY_{kind}"]),
        keys.LLM.VOCAB_SIZE: vocabulary.size, keys.LLM.CONTEXT_LENGTH: config.n_positions,
        keys.LLM.EMBEDDING_LENGTH: config.n_embd, keys.LLM.FEED_FORWARD_LENGTH: config.inner,
        keys.LLM.BLOCK_COUNT: config.n_layer, keys.Attention.HEAD_COUNT: config.n_head,
        keys.Tokenizer.MODEL: "bert", keys.Tokenizer.BOS_ID: vocabulary.begin_id, keys.Tokenizer.EOS_ID: vocabulary.end_id,
        keys.Tokenizer.SEP_ID: vocabulary.end_id, keys.Tokenizer.UNK_ID: vocabulary.unk_id,
        keys.Tokenizer.PAD_ID: vocabulary.pad_id, keys.Tokenizer.ADD_BOS: True, keys.Tokenizer.ADD_EOS: False,
    }  # fmt: skip
    for key, value in wanted.items():
        assert reader.get_field(key.format(arch="gpt2")).contents() == value, key
    epsilon = reader.get_field(keys.Attention.LAYERNORM_EPS.format(arch="gpt2")).contents()
    assert epsilon == pytest.approx(config.layer_norm_epsilon, rel=1e-7)
    assert (keys.General.QUANTIZATION_VERSION in reader.fields) == (kind != "F16")
    tokens = reader.get_field(keys.Tokenizer.LIST).contents()
    types = reader.get_field(keys.Tokenizer.TOKEN_TYPE).contents()
    assert len(tokens) == len(types) == len(set(tokens)) == vocabulary.size
    assert tokens[vocabulary.begin_id] == vocabulary.entries[vocabulary.begin_id]
    assert types[vocabulary.begin_id] == gguf.TokenType.CONTROL and types[vocabulary.unk_id] == gguf.TokenType.UNKNOWN


def forward(path: Path, ids: list[int]) -> torch.Tensor:
    """Logits (T, V) as llama.cpp computes them: from the file's names, keys and rows alone, a row of a matrix per output."""
    reader = gguf.GGUFReader(path)
    read = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    w = {name: torch.from_numpy(np.array(values)) for name, values in read.items()}

    def key(name: str) -> int | float:
        return reader.get_field(f"gpt2.{name}").contents()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], key("attention.layer_norm_epsilon"))

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

    x = w["token_embd.weight"][ids] + w["position_embd.weight"][: len(ids)]
    for i in range(key("block_count")):
        q, k, v = linear(norm(x, f"blk.{i}.attn_norm"), f"blk.{i}.attn_qkv").chunk(3, dim=-1)
        heads = [each.view(len(ids), key("attention.head_count"), -1).transpose(0, 1) for each in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(1, 2) / heads[0].shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        x = x + linear((scores.softmax(-1) @ heads[2]).transpose(0, 1).flatten(1), f"blk.{i}.attn_output")
        up = F.gelu(linear(norm(x, f"blk.{i}.ffn_norm"), f"blk.{i}.ffn_up"), approximate="tanh")
        x = x + linear(up, f"blk.{i}.ffn_down")
    return norm(x, "output_norm") @ w["token_embd.weight"].t()


@pytest.mark.parametrize("kind, most", [("F16", 0.002), ("Q8_0", 0.03), ("Q4_0", 0.4)])
def test_a_forward_pass_from_the_file_gives_the_logits_of_the_model(model, files, folder, kind, most) -> None:
    ids = torch.randint(0, model.config.vocab_size, (20,)).tolist()
    same, _ = load_model(folder)
    writer.load_exported(same, kind)
    with torch.no_grad():
        ours, exact = same(torch.tensor([ids]))[0], model(torch.tensor([ids]))[0]
    found = forward(files[kind], ids)
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)  # the same fp32 numbers, added in another order
    assert 0 < (found - exact).norm() / exact.norm() < most


@pytest.mark.deep
@pytest.mark.parametrize("kind, most", [("F16", 0.01), ("Q8_0", 0.1), ("Q4_0", 0.1)])
def test_llama_cpp_continues_a_text_from_the_file_as_we_do(model, files, folder, kind, most) -> None:
    """ggml rounds activations, to float16 or to 8 bits, so log-probabilities differ a little: seen 0.001, 0.016, 0.014."""
    pytest.importorskip("xllamacpp")
    same, vocabulary = load_model(folder)
    writer.load_exported(same, kind)
    ids = vocabulary.encode_prompt("今天天气很好")
    found = continued(files[kind], ids, 12)
    assert len(found) == 12
    for place, (token, logprob) in enumerate(found):
        before = torch.tensor([ids + [each for each, _ in found[:place]]])
        with torch.no_grad():
            ours = same(before)[0, -1].log_softmax(-1)
        assert logprob == pytest.approx(float(ours[token]), abs=most)
        assert float(ours.max() - ours[token]) <= 2 * most, "the likeliest token, or one as likely"


# ---- vocabularies


def longest_matches(text: str, tokens: list[str]) -> list[int]:
    """llama.cpp's WPM on words that blanks separate: each with the mark of a beginning, then the longest entries."""
    ids, found = {token: i for i, token in enumerate(tokens)}, []
    for word in text.split():
        rest = "\u2581" + word
        while rest:
            length = next(n for n in range(len(rest), 0, -1) if rest[:n] in ids)
            found.append(ids[rest[:length]])
            rest = rest[length:]
    return found


def test_longest_matches_of_the_exported_entries_are_our_ids() -> None:
    vocabulary = Vocabulary.load(VOCAB)
    tokens = words.vocabulary_keys(vocabulary)["tokenizer.ggml.tokens"][1]
    for text in ("今 天 天 气 很 好 ， 我 们 去 公 园 。", "hello world 你 好", "这 家 小 店 gpt model"):
        ours = vocabulary.encode(text)
        assert vocabulary.unk_id not in ours and longest_matches(text, tokens) == ours, text


def own_vocabulary(folder: Path, model: dict[str, object]) -> Vocabulary:
    """A tokenizer.json with this model."""
    bytes_as_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
               "pre_tokenizer": bytes_as_letters, "post_processor": None, "decoder": bytes_as_letters, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Vocabulary.load(folder / "tokenizer.json")


def test_a_byte_level_bpe_keeps_its_merges_and_other_vocabularies_get_no_tokenizer(tmp_path) -> None:
    entries = {token: i for i, token in enumerate(["<|endoftext|>", "a", "b", "ab"])}
    bpe = own_vocabulary(tmp_path, {"type": "BPE", "vocab": entries, "merges": [["a", "b"]]})
    keys = words.vocabulary_keys(bpe)
    assert keys["tokenizer.ggml.model"] == ("str", "gpt2") and keys["tokenizer.ggml.merges"] == ("[str]", ["a b"])
    assert keys["tokenizer.ggml.tokens"][1] == ["<|endoftext|>", "a", "b", "ab"]
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", 0.0], ["a", -1.0]]}
    assert words.vocabulary_keys(own_vocabulary(tmp_path, unigram)) == {"tokenizer.ggml.model": ("str", "no_vocab")}


def test_equal_and_empty_entries_get_names_of_their_own(tmp_path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\n[MASK]\n[CLS]\n一\n\n一\n##a\n")
    keys = words.vocabulary_keys(Vocabulary.load(tmp_path / "vocab.txt"))
    tokens = ["[UNK]", "[MASK]", "[CLS]", "[unused id 3]", "[unused id 4]", "\u2581一", "a"]
    assert keys["tokenizer.ggml.tokens"][1] == tokens and keys["tokenizer.ggml.token_type"][1] == [2, 3, 3, 5, 5, 1, 1]


# ---- the command


def refused(capsys, *flags: object) -> str:
    """The line on stderr of a command that ends with status 2."""
    with pytest.raises(SystemExit) as end:
        compress.main([str(flag) for flag in flags])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


def test_what_the_command_refuses(capsys, folder, tmp_path) -> None:
    there = ("--model", folder)
    for flags, line in [
        (("--model", tmp_path / "none"), "does not exist: give a run"),
        (("--model", tmp_path), "no trained model in"),
        ((*there, "--gguf", tmp_path / "a.gguf", "--type", "Q5_K"), "--type Q5_K is not a type that this exporter writes"),
        ((*there, "--type", "Q8_0"), "--type Q8_0 is for --gguf"),
        ((*there, "--gguf", tmp_path / "no" / "a.gguf"), "cannot be written: give a file in a folder that exists"),
        ((*there, "--json", tmp_path), "cannot be written"),
        ((*there, "--formats", "int3"), "--formats"),
        ((*there, "--block", 0), "--block must be at least 1"),
        ((*there, "--threshold", "nan"), "--threshold must be above 0"),
        ((*there, "--valid-data", tmp_path / "none"), "none"),
        ((*there, "--seq-len", 33), "--seq-len 33 is above the context"),
        ((*there, "--formats", "gptq", "--block", 40, "--calibration", 1), "--block 40 does not divide the 64 inputs"),
    ]:  # fmt: skip
        assert line in refused(capsys, *flags), flags
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize("more, name", [({"n_embd": 48}, "n_embd 48"), ({"n_inner": 100}, "n_inner 100")])
def test_a_width_that_blocks_do_not_divide_is_one_line(capsys, tmp_path, more, name) -> None:
    odd = make_model(**more)
    folder = export_final(tmp_path / "final", odd.config, weights_of(odd), VOCAB, {})
    for kind in ("Q8_0", "Q4_0"):
        line = refused(capsys, "--model", folder, "--gguf", tmp_path / "a.gguf", "--type", kind)
        assert f"--type {kind} has blocks of 32 weights, and {name}" in line and "--type F16" in line
    assert not (tmp_path / "a.gguf").exists()
    assert "--type Q4_0" in refused(capsys, "--model", folder, "--formats", "gguf-q4_0")
    compress.main(["--model", str(folder), "--gguf", str(tmp_path / "a.gguf"), "--type", "F16"])
    assert len(gguf.GGUFReader(tmp_path / "a.gguf").tensors) == len(list(odd.parameters()))


def test_a_disk_that_fails_leaves_no_file(model, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "encode", full)
    with pytest.raises(UserError, match="a.gguf cannot be written: No space left on device"):
        writer.write_gguf(tmp_path / "a.gguf", model, Vocabulary.load(VOCAB), "Q8_0", "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.deep
def test_the_program_starts_as_a_user_starts_it(folder, tmp_path) -> None:
    program = str(ROOT / "chapters" / CHAPTER / "compress.py")
    said = run([sys.executable, program, "--model", str(folder), "--gguf", str(tmp_path / "a.gguf")])
    assert "GPT-2 as GGUF Q8_0" in said and "Warning" not in said and (tmp_path / "a.gguf").exists()


def test_a_table_that_cannot_be_written_leaves_the_old_one(folder, tmp_path, monkeypatch) -> None:
    table = technique(CHAPTER, "compress_table")
    monkeypatch.setattr(table, "measure", lambda arguments: [])

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "rows").write_text("old")
    monkeypatch.setattr("durable.files.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        compress.main(["--model", str(folder), "--json", str(tmp_path / "rows")])
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_command_measures_every_format(folder, tmp_path, capsys) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(json.loads((ROOT / "data/valid/comments.json").read_text())[:8]))
    flags = ("--model", folder, "--json", tmp_path / "rows", "--valid-data", texts, "--plant-outliers", 3,
             "--train-data", ROOT / "data/valid/comments.json", "--calibration", 8)  # fmt: skip
    compress.main([str(flag) for flag in flags])
    said = capsys.readouterr().out
    rows = {row["format"]: row for row in json.loads((tmp_path / "rows").read_text())}
    formats = technique(CHAPTER, "compress_formats").FORMATS
    assert list(rows) == list(formats) and all(name in said for name in formats)
    bits = {name: row["bits"] for name, row in rows.items()}
    assert bits["fp32"] == 32 and bits["nf4"] == bits["gptq"] == bits["int4"] == bits["gguf-q4_0"] == 4.5
    assert bits["gguf-q8_0"] == 8.5 and bits["gguf-f16"] == 16 and 4.12 < bits["nf4-double"] < 4.2
    errors = {name: row["logit_error"] for name, row in rows.items()}
    assert errors["fp32"] == 0 and errors["int8"] < errors["int8-plain"] and errors["gptq"] < errors["int4"]
    assert 0 < errors["gguf-f16"] < errors["gguf-q8_0"] < errors["gguf-q4_0"]
    assert all(abs(row["perplexity"] / rows["fp32"]["perplexity"] - 1) < 0.5 for row in rows.values())
