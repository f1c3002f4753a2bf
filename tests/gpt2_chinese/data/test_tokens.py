"""The token cache: shared, checked, rebuilt when it must be. And the reader of array-JSON below it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_chinese import corpus as corpus_module
from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.data.token_cache import Tokens, load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from tests.limits import HANGS_S


def reference(corpus: Path, vocab: Path) -> list[int]:
    vocabulary = Vocabulary.load(vocab)
    ids = []
    for file in sorted(corpus.glob("*.json")):
        for text in json.loads(file.read_text(encoding="utf-8")):
            ids += [vocabulary.begin_id, *vocabulary.encode(text), vocabulary.end_id]
    return ids


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPT2_CHINESE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def built(before: Tokens, corpus: Path, vocab: Path) -> bool:
    """True when loading again makes the files anew."""
    stamp = before.path.stat().st_ino
    return load_tokens(corpus, vocab).path.stat().st_ino != stamp


def test_ids_are_documents_with_their_marks(folder: Path, corpus: Path, vocab: Path) -> None:
    tokens = load_tokens(corpus, vocab)
    assert tokens.ids.dtype == np.uint16 and isinstance(tokens.ids, np.memmap)
    assert tokens.ids.tolist() == reference(corpus, vocab)
    assert tokens.unknown == 0
    assert {p.suffix for p in folder.iterdir()} == {".bin", ".json", ".lock"}


def test_a_whole_cache_is_used_and_not_made_again(folder: Path, corpus: Path, vocab: Path) -> None:
    tokens = load_tokens(corpus, vocab)
    assert not built(tokens, corpus, vocab)
    moved = corpus.rename(corpus.with_name("elsewhere"))
    assert not built(tokens, moved, vocab), "the key is content, not place"


def test_changed_content_gets_a_cache_of_its_own(folder: Path, corpus: Path, vocab: Path, tmp_path: Path) -> None:
    tokens = load_tokens(corpus, vocab)
    (corpus / "b.json").write_text('["换了一段文字。"]', encoding="utf-8")
    changed = load_tokens(corpus, vocab)
    assert changed.path != tokens.path and changed.ids.tolist() == reference(corpus, vocab)
    smaller = tmp_path / "vocab.txt"
    smaller.write_text("".join(vocab.read_text().splitlines(keepends=True)[:60]))
    other = load_tokens(corpus, smaller)
    assert other.path != changed.path and other.unknown > 0


@pytest.mark.parametrize("part", [".bin", ".json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_a_damaged_or_incomplete_file_is_made_again(
    folder: Path, corpus: Path, vocab: Path, part: str, harm: str
) -> None:
    good = load_tokens(corpus, vocab)
    wanted = good.ids.tolist()
    file = good.path.with_suffix(part)
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif harm == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif harm == "remove":
        file.unlink()
    else:
        file.write_bytes(b"")
    assert load_tokens(corpus, vocab).ids.tolist() == wanted
    again = load_tokens(corpus, vocab)
    assert again.ids.tolist() == wanted and not built(again, corpus, vocab)


def test_many_builders_at_once(folder: Path, corpus: Path, vocab: Path) -> None:
    program = (
        "import sys; from gpt2_chinese.data.token_cache import load_tokens\n"
        "for _ in range(3): ids = load_tokens(sys.argv[1], sys.argv[2]).ids\n"
        "print(len(ids), int(ids.astype('int64').sum()))"
    )
    command = [sys.executable, "-c", program, str(corpus), str(vocab)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate(timeout=HANGS_S)[0].splitlines()[-1] for process in running}  # waiting builders print so
    ids = reference(corpus, vocab)
    assert said == {f"{len(ids)} {sum(ids)}"}
    assert len(list(folder.iterdir())) == 3, "no leftovers"


def test_a_large_vocabulary_takes_uint32(folder: Path, corpus: Path, vocab: Path, tmp_path: Path) -> None:
    large = tmp_path / "vocab.txt"
    large.write_text(vocab.read_text() + "".join(f"[more{i}]\n" for i in range(70_000)))
    tokens = load_tokens(corpus, large)
    assert tokens.ids.dtype == np.uint32 and tokens.ids.tolist() == reference(corpus, vocab)


# -- the reader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 1 << 20])
def test_reading_in_pieces_gives_the_items_that_json_gives(tmp_path: Path, monkeypatch, piece: int) -> None:
    monkeypatch.setattr(corpus_module, "_PIECE_BYTES", piece)
    items = ["一", "", 'a"b\\c\n', "\U0001f600尾", "x" * 100, "\\", "]", "，"]
    for ascii_only in (True, False):
        for indent in (None, 2):
            file = tmp_path / "x.json"
            text = json.dumps(items, ensure_ascii=ascii_only, indent=indent)
            file.write_text("\ufeff  " + text + " \n", encoding="utf-8")
            assert list(read_paragraphs(file)) == items


@pytest.mark.parametrize(
    "content, line",
    [
        ('{"text": "一"}', 'is not a JSON array of strings: it begins with \'{"text": '),
        ('["一", 2, "三"]', "item 2 is no string: '2, \"三\"]'"),
        ('["一", {"text": "二"}]', 'item 2 is no string: \'{"text": "二"}]\''),
        ('["一", null]', "item 2 is no string"),
        ('["一" "二"]', "after item 1 a comma or ] is missing"),
        ('["一",]', "item 2 is missing"),
        ('["一", "二', "item 2 is broken"),
        ('["一"] x', "something follows the array"),
        ('["一"', "after item 1 a comma or ] is missing"),
        ("", "is not a JSON array of strings"),
        ("[]", "is empty: it holds no paragraph"),
        ('["a\tb"]', "item 1 is broken"),
    ],
)
def test_a_corpus_that_is_no_array_of_strings_is_named(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        list(read_paragraphs(file))
    assert line in str(error.value) and str(file) in str(error.value)


def read_all(file: Path) -> tuple[list[str], str]:
    """The items up to an error, and the error."""
    items: list[str] = []
    try:
        for item in corpus_module.read_file(file):
            items.append(item)
    except UserError as error:
        return items, str(error)
    return items, ""


TOKENS = ['"', '"天"', '"a\\"', '\\"', ",", '",', '","', " ", "\n", "]", "[", "\\",
          "\\u00e9", '"\\ud83d"', '"\\ud83d\\ude00"', "1", "null",
          "{}", '"\t"', "中文。", "\u2028", "\x00", "NaN", '["x"]', '{"a": "b"}']  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.sampled_from(TOKENS) | st.text(max_size=3).map(json.dumps), max_size=12), st.sampled_from((1, 5, 99)))
def test_windows_of_items_are_the_items_one_by_one_and_so_are_their_errors(tokens: list[str], piece: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_PIECE_BYTES", piece)
        file = Path(folder, "x.json")
        for text in ("[" + "".join(tokens), "[" + ",".join(tokens) + "]", "[" + ", \n".join(tokens) + ', "尾"]'):
            file.write_text(text, encoding="utf-8", errors="replace")
            found = read_all(file)
            with pytest.MonkeyPatch.context() as without:
                without.setattr(corpus_module, "_many_items", lambda reader: [])
                assert found == read_all(file)


def test_one_item_that_no_window_ends_with_costs_no_second_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window whose last comma after a quotation mark is inside a string is read item by item, and tried once."""
    items = ["天地"] * 5000 + ['人",。']
    (tmp_path / "x.json").write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    tried = []
    real = corpus_module._many_items
    monkeypatch.setattr(corpus_module, "_many_items", lambda reader: tried.append(1) or real(reader))
    assert list(read_paragraphs(tmp_path)) == items and len(tried) <= 2


def test_a_folder_without_files_of_its_own_is_read_from_its_sub_folders(tmp_path: Path) -> None:
    for name in ("b/2.json", "b/1.json", "a/1.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps([name]))
    assert list(read_paragraphs(tmp_path)) == ["a/1.json", "b/1.json", "b/2.json"]
    (tmp_path / "own.json").write_text('["own"]')
    assert list(read_paragraphs(tmp_path)) == ["own"]


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list(read_paragraphs(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no .json file"):
        list(read_paragraphs(tmp_path))
    (tmp_path / "x.json").write_bytes('["中文"]'.encode("gb18030"))
    with pytest.raises(UserError, match="is not UTF-8"):
        list(read_paragraphs(tmp_path))
