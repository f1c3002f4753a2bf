"""The vocabulary: shipped file, training, decoding, foreign formats."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary.profiles import vocabulary_size
from gpt2_chinese.vocabulary.training import KINDS, train, train_bpe
from gpt2_chinese.vocabulary.vocabulary import SPECIAL_TOKENS, Vocabulary, tidy

ROOT = Path(__file__).resolve().parents[3]


def test_make_vocab_makes_the_shipped_vocabulary(vocab: Path) -> None:
    shipped = vocab.read_text(encoding="utf-8").splitlines()
    assert train(ROOT / "data/train", 4096) == shipped
    assert shipped[:5] == SPECIAL_TOKENS
    assert len(set(shipped)) == len(shipped) == vocabulary_size(vocab)
    assert math.log(len(shipped)) == pytest.approx(8.3, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_in_every_process(corpus: Path, kind: str) -> None:
    trained = "train_bpe(sys.argv[1], 300)" if kind == "bpe" else f"train(sys.argv[1], 30, {kind!r})"
    program = f"import sys; from gpt2_chinese.vocabulary.training import train, train_bpe; print({trained})"
    said = set()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(corpus)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(done.stdout)
    assert len(said) == 1


def test_a_small_vocabulary_keeps_the_most_frequent_characters(corpus: Path) -> None:
    entries = train(corpus, 12)
    assert len(entries) == 12 and entries[:5] == SPECIAL_TOKENS and "，" in entries and "天" in entries


def test_characters_are_the_alphabet_alone_and_bpe_loses_nothing(corpus: Path, tmp_path: Path) -> None:
    single = [e for e in train(corpus, 4096) if len(e.removeprefix("##")) == 1 or e in SPECIAL_TOKENS]
    assert train(corpus, 4096, "characters") == single
    (tmp_path / "tokenizer.json").write_text(train_bpe(corpus, 300), encoding="utf-8")
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.size == 300 and vocabulary.profile == "own" and vocabulary.layout == "<s> text </s>"
    assert [vocabulary.entries[i] for i in (vocabulary.pad_id, vocabulary.unk_id)] == ["<pad>", "<unk>"]
    for text in ("今天 的 天气  很好，\nHello World 2019 \U0001f600", "第3段，今天的天气很好"):
        assert vocabulary.decode(vocabulary.encode_prompt(text)) == text
    assert len(vocabulary.encode("今天的天气很好")) < len("今天的天气很好".encode()) / 2, "nothing was merged"
    with pytest.raises(UserError, match="--size 259 is too small for --kind bpe: bytes and special tokens alone are 260"):
        train_bpe(corpus, 259)


def test_unknown_tokens_of_the_shipped_corpus_are_few(vocab: Path) -> None:
    assert load_tokens(ROOT / "data/train", vocab).unknown == 0
    valid = load_tokens(ROOT / "data/valid", vocab)
    assert valid.unknown < 0.005 * len(valid)


def test_decoding_gives_the_text_back(vocab: Path) -> None:
    vocabulary = Vocabulary.load(vocab)
    for text in read_paragraphs(ROOT / "data/train/news.json"):
        assert vocabulary.decode(vocabulary.encode(text)) == tidy(text.lower())
    ids = vocabulary.encode_documents(["今天1918年"])[0]
    assert ids[0] == vocabulary.begin_id and ids[-1] == vocabulary.end_id and len(ids) == 9
    assert vocabulary.decode(ids) == "今天1918年"


@pytest.mark.parametrize(
    "left, text",
    [
        ("今 天 的 天 气", "今天的天气"),
        ("1 9 1 8 年", "1918年"),
        ("用 hello world 写", "用hello world写"),
        ("a 4 纸", "a4纸"),
        ("well , it is . yes", "well, it is. yes"),
        ("3 . 5", "3.5"),
    ],
)
def test_blanks_stand_only_between_latin_words(left: str, text: str) -> None:
    assert tidy(left) == text


def test_a_tokenizer_json_reads_like_its_vocab_txt(vocab: Path, tmp_path: Path) -> None:
    plain = Vocabulary.load(vocab)
    plain.save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        other = Vocabulary.load(path)
        text = "今天天气很好，1918年。"
        assert other.encode_prompt(text) == plain.encode_prompt(text)
        assert (other.size, other.begin_id, other.end_id) == (plain.size, plain.begin_id, plain.end_id)
        assert other.decode(plain.encode(text)) == text


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        vocabulary_size(tmp_path / "none.txt")
    (tmp_path / "words.txt").write_text("一\n二\n")
    with pytest.raises(UserError, match=r"lacks \[UNK\], \[MASK\], \[CLS\]: profile gpt2_chinese"):
        vocabulary_size(tmp_path / "words.txt")
    (tmp_path / "t.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        vocabulary_size(tmp_path / "t.json")


def test_special_ids_are_read_not_assumed(vocab: Path, tmp_path: Path) -> None:
    entries = vocab.read_text(encoding="utf-8").splitlines()
    moved = [*entries[5:300], "[SEP]", "[CLS]", "[UNK]", "[PAD]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(moved), encoding="utf-8")  # no newline at the end, as some have it
    vocabulary = Vocabulary.load(tmp_path / "vocab.txt")
    assert (vocabulary.size, vocabulary.begin_id, vocabulary.end_id, vocabulary.unk_id) == (300, 299, 296, 297)
    uer = Vocabulary.load(tmp_path / "vocab.txt", "uer")
    assert (uer.begin_id, uer.end_id, uer.pad_id) == (296, 295, 298)
