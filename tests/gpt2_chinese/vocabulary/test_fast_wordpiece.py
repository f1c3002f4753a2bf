"""The table of single characters against the tokenizers library alone: the same ids for any text."""

from __future__ import annotations

import unicodedata
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from gpt2_chinese.vocabulary import fast_wordpiece
from gpt2_chinese.vocabulary.fast_wordpiece import FastWordPiece, is_covered
from gpt2_chinese.vocabulary.profiles import PROFILES
from gpt2_chinese.vocabulary.training import train_bpe
from gpt2_chinese.vocabulary.vocabulary import Vocabulary, wordpiece

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = (ROOT / "cache/vocab.txt").read_text(encoding="utf-8").splitlines()
# pieces that show which neighbours were joined: accented, combining, Hangul as jamo, kana, half of a Greek word, an emoji
ODD = "éä\u0301\u0327\u0323かガ\u3099\u1112\u1161\u11abσςßİı\u0307ﬃ①½٣𝟗😀𠀀"
PIECES = [f"{mark}{c}" for mark in ("", "##") for c in ODD]
RICH = [*SHIPPED, *(piece for piece in PIECES if piece not in SHIPPED), "abc", "2019", "##00", "hello", "##lo"]
OPTIONS = [dict(zip(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), chosen, strict=True))
           for chosen in product((True, False), (True, False), (True, False, None), (True, False))]  # fmt: skip
MARKS = (3, 2)


def tokenizer_of(entries: list[str], profile: str, options: dict[str, bool | None]) -> Tokenizer:
    tokenizer = wordpiece(entries, profile)
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    return tokenizer


def reference(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = chain.from_iterable((MARKS[0], *encoding.ids, MARKS[1]) for encoding in encodings)
    return np.fromiter(ids, np.int64)


def sweep(tokenizer: Tokenizer, codes: list[int]) -> None:
    """Each code point alone, and in neighbourhoods: Chinese, letters, digits, marks before and after, itself."""
    fast = FastWordPiece(tokenizer, *MARKS)
    for begin in range(0, len(codes), 8192):
        some = [chr(code) for code in codes[begin : begin + 8192]]
        texts = some + [f"中{c}中a{c}b中{c}c{c}中 {c} 1{c}2,{c}\u0301a\u0323{c}\u0301{c}{c}" for c in some]
        got, wanted = fast.encode_documents(texts), reference(tokenizer, texts)
        if not np.array_equal(got, wanted):
            pairs = ((text, fast.encode_documents([text]), reference(tokenizer, [text])) for text in texts)
            wrong = [text for text, got, wanted in pairs if not np.array_equal(got, wanted)]
            raise AssertionError(f"{len(wrong)} texts, the first {wrong[0]!r}, U+{ord(wrong[0][-1]):04X}")


ALL = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
ASSIGNED = [code for code in ALL if unicodedata.category(chr(code)) not in ("Cn", "Co")]


# of Chinese characters and Hangul syllables, which follow one rule each, the first thousand
NAMES = ("CJK UNIFIED", "HANGUL SYLLABLE")
ONE_RULE = [[code for code in ASSIGNED if name in unicodedata.name(chr(code), "")] for name in NAMES]
DIFFERENT = sorted({*ASSIGNED} - {code for codes in ONE_RULE for code in codes[1000:]})


@pytest.mark.parametrize("profile", PROFILES)
def test_every_character_gives_the_ids_of_the_library_among_all_neighbours(profile: str) -> None:
    sweep(wordpiece(RICH, profile), DIFFERENT)


@pytest.mark.deep
@pytest.mark.parametrize("number, options", list(enumerate(OPTIONS)))
def test_the_same_under_all_options_of_the_normalizer(number: int, options: dict[str, bool | None]) -> None:
    sweep(tokenizer_of(RICH, list(PROFILES)[number % 2], options), DIFFERENT)


@pytest.mark.deep
@pytest.mark.parametrize("profile", PROFILES)
def test_all_of_unicode_with_the_shipped_vocabulary(profile: str) -> None:
    sweep(wordpiece(SHIPPED, profile), ALL)


FASTS = [FastWordPiece(tokenizer_of(RICH, profile, options), *MARKS)
         for profile in PROFILES for options in (OPTIONS[0], {**OPTIONS[0], "strip_accents": False, "lowercase": False})]
TEXT = st.text(st.one_of(st.sampled_from("中，。 a1A\u0301\u200b\x00\n é[#]UNK"), st.characters(exclude_categories=["Cs"])))


@given(texts=st.lists(TEXT, max_size=5))
@example(texts=["", "", "[CLS]今天[UNK]", "##a", "\u0301", "ａｂ１２", "ÀÉ\u0328\u0301ô", "a" * 101 + "中" + "a" * 100])
@example(texts=["中\u0301a\u0323\u0301", "a\u200bb", "a\u00adb中\ufffd国", "한국어ABC", "ガﾊﾞ", "😀\u200d👧", "\U00020000"])
def test_any_texts_give_the_ids_of_the_library(texts: list[str]) -> None:
    for fast in FASTS:
        assert np.array_equal(fast.encode_documents(texts), reference(fast.tokenizer, texts))


def test_the_library_is_asked_about_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for profile in PROFILES:
        fast = FastWordPiece(wordpiece(RICH, profile), *MARKS)
        real = fast._encoded
        monkeypatch.setattr(fast, "_encoded", lambda runs, real=real: asked.extend(runs) or real(runs))
        fast.encode_documents(["今天，hello 天气\u3000很好！\n龘 1918年", "（中）。"])
    assert asked == ["hello", "hello", "1918"], "profile uer takes a number for one word"


def test_runs_are_remembered_up_to_a_limit_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_wordpiece, "_MOST_RUNS", 20)
    fast = FastWordPiece(wordpiece(RICH), *MARKS)
    for number in range(30):
        texts = [f"word{'abcdefgh'[number % 8] * (i % 40)} 中 hello" for i in range(number)]
        assert np.array_equal(fast.encode_documents(texts), reference(fast.tokenizer, texts))
        assert len(fast._runs) <= 20 + 40 and all(len(run) <= fast_wordpiece._LONGEST_RUN for run in fast._runs)


def test_a_long_text_without_a_boundary(vocab: Path) -> None:
    fast = FastWordPiece(wordpiece(RICH), *MARKS)
    texts = ["a" * 200_000, "か" * 99 + "\u0301" * 5000 + "中"]
    assert np.array_equal(fast.encode_documents(texts), reference(fast.tokenizer, texts))


def test_only_rules_that_look_at_one_character_are_covered(corpus: Path, tmp_path: Path) -> None:
    for profile in PROFILES:
        assert is_covered(wordpiece(SHIPPED, profile))
    assert not is_covered(Tokenizer.from_str(train_bpe(corpus, 300)))
    with_special = wordpiece(SHIPPED)
    with_special.add_special_tokens(["[CLS]"])
    assert not is_covered(with_special), "it finds [CLS] inside a text"
    without_normalizer = wordpiece(SHIPPED)
    without_normalizer.normalizer = normalizers.NFKC()
    assert not is_covered(without_normalizer)


def test_documents_of_a_vocabulary_have_equal_ids_from_both_functions(corpus: Path, tmp_path: Path, vocab: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(corpus, 300), encoding="utf-8")
    texts = ["今天天气很好，hello 2019", "", "İstanbul ĲĲ \U0001f600"]
    for vocabulary in (Vocabulary.load(vocab), Vocabulary.load(vocab, "uer"), Vocabulary.load(tmp_path)):
        ids = vocabulary.document_ids(texts)
        assert ids.dtype == np.uint32 and ids.tolist() == list(chain.from_iterable(vocabulary.encode_documents(texts)))
        assert len(vocabulary.document_ids([])) == 0
