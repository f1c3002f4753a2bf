"""2,600 broken corpora, vocabularies, configurations and command lines: one line, or success; no traceback, no hang.

A failure names its seed; `one(random.Random(seed))` repeats it. The 400 configurations of pstar: tests/pstar/test_fuzz.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  --init-from loads torch: before the clocks run

from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig, resolve_model_config
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.vocabulary.profiles import vocabulary_size
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from tests.gpt2_chinese.chapter_settings import CHAPTERS, settings_of
from tests.mutations import ODD, SNIPPETS, break_bytes, break_json, judge

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"今天气很好我们去河边走了步，。0123456789abcde", "##a", "##b"]
TEXTS = ["今天天气很好，我们去河边走了17步。", "", "abc 好 [MASK] \u3000\u00a0é😀", "好" * 300]


@pytest.fixture(autouse=True)
def nothing_is_said(capfd: pytest.CaptureFixture[str]):
    """A panic in Rust writes lines of its own."""
    yield
    assert capfd.readouterr().err == ""


def mixed(ended: dict[str, int]) -> bool:
    """Both success and refusal occurred often: the mutations are neither harmless nor all alike."""
    return min(ended.values()) >= 0.05 * sum(ended.values())


def test_corpora(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(ENTRIES), encoding="utf-8")
    vocabulary = Vocabulary.load(tmp_path / "vocab.txt")
    good = json.dumps(TEXTS, ensure_ascii=False, indent=1).encode()

    def one(rng: random.Random) -> None:
        file = tmp_path / "corpus.json"
        file.write_bytes(break_bytes(rng, good) if rng.random() < 0.6 else break_json(rng, TEXTS))
        documents = list(read_paragraphs(file))
        assert all(max(ids) < vocabulary.size for ids in vocabulary.encode_documents(documents))

    assert mixed(judge(600, one, (UserError,)))


def test_vocab_txt(tmp_path: Path) -> None:
    good = "\n".join(ENTRIES).encode()

    def one(rng: random.Random) -> None:
        file = tmp_path / "vocab.txt"
        file.write_bytes(break_bytes(rng, good))
        used(file)

    assert mixed(judge(300, one, (UserError,)))


def used(file: Path) -> None:
    """All that a run does with a vocabulary."""
    size = vocabulary_size(file)
    vocabulary = Vocabulary.load(file)
    assert vocabulary.size == size
    for ids in vocabulary.encode_documents(TEXTS):
        vocabulary.decode(i for i in ids if i < size)
    vocabulary.save(file.parent)


def test_tokenizer_json(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "vocab.txt").write_text("\n".join(ENTRIES), encoding="utf-8")
    Vocabulary.load(source / "vocab.txt").save(source)
    good = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    plain = json.dumps(good, ensure_ascii=False).encode()

    def one(rng: random.Random) -> None:
        file = tmp_path / "tokenizer.json"
        file.write_bytes(break_bytes(rng, plain) if rng.random() < 0.4 else break_json(rng, good))
        used(file)

    assert mixed(judge(500, one, (UserError,)))


def test_model_configurations(tmp_path: Path) -> None:
    good = ModelConfig(vocab_size=60, bos_token_id=2, eos_token_id=3).to_dict() | {"task_specific_params": {"a": [1, {}]}}
    plain = json.dumps(good, indent=2).encode()

    def one(rng: random.Random) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(break_bytes(rng, plain) if rng.random() < 0.5 else break_json(rng, good))
        config, _ = resolve_model_config(str(file))
        config.num_parameters()
        json.dumps(config.to_dict(), ensure_ascii=False).encode()  # as a checkpoint stores it
        again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())), "again")
        assert repr(again.n_layer) == repr(config.n_layer)

    assert mixed(judge(400, one, (UserError,)))


VALUES = [
    *("", " ", "0", "1", "2", "3", "7", "-1", "0.5", "1.5", "1e999", "-1e999", "nan", "inf", "1e308", "9" * 20),
    *("auto", "min", "25%", "-5%", "1000%", "nan%", "64MiB", "1e9GiB", "GiB", "none", "１２", "1_0", "0x10", "fp16", "bf16"),
    *("own", "zh\n行", "'\"$(x)", "\ud800", "../..", "/dev/null", "/dev/zero", ".", "/", "x" * 300, "--", "-", "%s"),
    *("1e-320", "9" * 5000, "torch", "--lr", "true"),
]  # fmt: skip


PLAUSIBLE = ["1", "2", "3", "4", "12", "0", "0.5", "auto", "never", "torch", "cpu", "fp16"]


def test_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Of every chapter: its own flags and the contract's, one to three of them with odd values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(ENTRIES), encoding="utf-8")
    (tmp_path / "corpus.json").write_text(json.dumps(TEXTS[:1] * 400, ensure_ascii=False))
    (tmp_path / "config.json").write_text(json.dumps({"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}))
    base = ["--vocab", "vocab.txt", "--model-config", "config.json"]
    base += ["--train-data", "corpus.json", "--valid-data", "corpus.json"]
    classes = {name: settings_of(name) for name in CHAPTERS}
    before = sorted(tmp_path.iterdir())

    def one(rng: random.Random) -> None:
        name = rng.choice(CHAPTERS)
        flags = rng.choices(list(classes[name].flags()), k=rng.choice((1, 1, 1, 2, 3)))
        values = VALUES if rng.random() < 0.6 else PLAUSIBLE
        given = [word for flag in flags for word in (f"--{flag.replace('_', '-')}", rng.choice(values))]
        if rng.random() < 0.1:
            given.insert(rng.randrange(len(given)), rng.choice(VALUES))
        program = str(ROOT / "chapters" / name / "train.py")
        try:
            resolve(classes[name].from_command_line(program, None, [*base, "--output-dir", "run", *given]))
        except SystemExit as stop:
            said = capfd.readouterr()
            assert (stop.code, said.out) == (2, "") and said.err.startswith("error: "), (given, stop.code, said)
            assert said.err.count("\n") == 1 and len(said.err) < 2100 and said.err[:-1].isprintable(), said.err
            raise UserError(said.err) from None
        finally:
            assert sorted(tmp_path.iterdir()) == before, given

    ended = judge(800, one, (UserError,))
    assert mixed(ended), ended
    assert capfd.readouterr().err == ""


def test_a_reader_that_breaks_is_found() -> None:
    def breaks(rng: random.Random) -> None:
        json.loads(rng.choice(SNIPPETS).decode("latin-1"))

    with pytest.raises(AssertionError, match=r"(?s)seed \d+:\n.*Error"):
        judge(50, breaks, (UserError,))
    assert any(isinstance(value, float) for value in ODD)
