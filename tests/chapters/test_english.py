"""An English folder: converted, a byte-level BPE trained on it, a model trained with it and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpt2_chinese.corpora.__main__ import main as corpora
from gpt2_chinese.evaluate.__main__ import main as evaluate
from gpt2_chinese.vocabulary.__main__ import main as vocabulary
from gpt2_chinese.vocabulary.profiles import knows_chinese, read_vocabulary
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from tests.chapters.program import ROOT, Chapter

# Original sentences; put together they are a small text with the endings and the spelling of English.
WHO = ("The gardener", "An old sailor", "My neighbour's daughter", "The night train's driver", "A quiet teacher")
DID = ("carried a lantern", "repaired the bicycle", "counted 27 swallows", "wrote a long letter", "bought fresh bread")
WHERE = ("beside the harbour", "under the railway bridge", "in the café at noon", "near the frozen lake", "on the hill")


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with books/, text/train, text/valid and tokenizer.json, all made by the commands of the page."""
    folder = tmp_path_factory.mktemp("english")
    (folder / "books").mkdir()
    for number, who in enumerate(WHO):
        paragraphs = [f"{who} {did} {where},\nand {did.split()[0]} nothing else." for did in DID for where in WHERE]
        (folder / "books" / f"{number}.txt").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    corpora(["convert", str(folder / "books"), "--output", str(folder / "text"), "--format", "paragraphs", "--join", " ",
             "--valid-share", "0.2"])  # fmt: skip
    vocabulary(["train", "--kind", "bpe", "--corpus", str(folder / "text" / "train"), "--size", "400", "--output",
                str(folder / "tokenizer.json"), "--held-out", str(folder / "text" / "valid")])  # fmt: skip
    return folder


def test_joined_lines_keep_the_blank_between_words(english: Path) -> None:
    items = [text for part in ("train", "valid") for file in (english / "text" / part).iterdir()
             for text in json.loads(file.read_text(encoding="utf-8"))]  # fmt: skip
    assert len(items) == len(WHO) * len(DID) * len(WHERE)
    assert any("beside the harbour, and carried nothing else." in text for text in items)


def test_every_text_comes_back_unchanged_and_nothing_is_unknown(english: Path, capsys) -> None:
    made = Vocabulary.load(english / "tokenizer.json")
    unseen = "Zoë's 31 naïve clocks — “quarter past eight” — struck; 今天天气很好 🙂\n\tx  y"
    for text in (unseen, "The gardener carried a lantern."):
        assert made.decode(made.encode(text)) == text
    ids = made.encode("The gardener carried a lantern under the railway bridge.")
    assert len(ids) < 20, "its words are merged: 56 bytes"


def test_a_run_on_it_shows_english_samples_and_can_be_evaluated(english: Path, tmp_path: Path) -> None:
    chapter = Chapter("00_single", tmp_path)
    text, vocab = english / "text", english / "tokenizer.json"
    said = chapter.train_forked("--train-data", text / "train", "--valid-data", text / "valid", "--vocab", vocab,
                                "--max-steps", 30, "--lr", "1e-2")  # fmt: skip
    assert "「The weather today」" in said and "--prompt 'The weather today'" in said and "今天" not in said
    assert "unknown 0.00% in training, 0.00% in validation" in said
    assert chapter.losses()[-1] < 0.5 * chapter.losses()[0]
    evaluate(["--model", str(chapter.output), "--corpus", str(text / "valid"), "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["all"]
    assert found["loss"] == pytest.approx(chapter.metrics()[-1]["valid_loss"], abs=1e-6)


def test_a_vocabulary_of_chinese_text_is_told_from_one_of_english(english: Path, tmp_path: Path) -> None:
    vocabulary(["train", "--kind", "bpe", "--corpus", str(ROOT / "data" / "valid"), "--size", "1000", "--output",
                str(tmp_path / "tokenizer.json")])  # fmt: skip
    assert knows_chinese(read_vocabulary(tmp_path / "tokenizer.json").entries)
    assert knows_chinese(read_vocabulary(ROOT / "cache" / "vocab.txt").entries)
    assert not knows_chinese(read_vocabulary(english / "tokenizer.json").entries)
