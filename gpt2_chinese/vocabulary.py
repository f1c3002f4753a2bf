"""The vocabulary: from Chinese text to token ids and back.

A `vocab.txt` is a WordPiece vocabulary with BERT's special tokens: text is lower-cased, every Chinese character and
every digit stands alone. A `tokenizer.json` brings rules of its own. A document becomes `[CLS] text [SEP]`; a prompt is
`[CLS] text`.

    python -m gpt2_chinese.vocabulary train --corpus data/train --size 4096 --output cache/vocab.txt
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError, exit_on_user_error, library_errors
from gpt2_chinese.files import kind, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LAYOUT = "[CLS] text [SEP]"
_CANNOT = "the rules of the tokenizer.json fail on a text; give a sound one with --vocab"

# what a tokenizer.json may call the beginning and the end of a document, best first
_BEGIN = ("[CLS]", "<s>", "<|startoftext|>", "<|endoftext|>")
_END = ("[SEP]", "</s>", "<|endoftext|>")


def vocabulary_size(path: Path | str) -> int:
    """Number of entries of a vocabulary file; fast, does not import tokenizers.

    Raises:
        UserError: missing or unreadable file, or one without the special tokens.
    """
    return len(_read_entries(Path(path)))


def _read_entries(path: Path) -> list[str]:
    """The entries of a `vocab.txt` or `tokenizer.json`, by id."""
    if kind(path, f"vocabulary {path}") == "missing":
        raise UserError(f"vocabulary {path} does not exist: make one with cache/make_vocab.sh")
    if path.is_dir():
        found = [path / name for name in ("vocab.txt", "tokenizer.json") if (path / name).is_file()]
        if not found:
            raise UserError(f"vocabulary folder {path} holds neither vocab.txt nor tokenizer.json")
        path = found[0]
    text = read_text(path, f"vocabulary {path}")
    entries = _json_entries(text, path) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    entries = [entry.removesuffix("\r") for entry in entries]
    if path.suffix != ".json":
        missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in entries]
        if missing:
            raise UserError(f"vocabulary {path} lacks {', '.join(missing)}: it must be a WordPiece vocab.txt")
    return entries


def _json_entries(text: str, path: Path) -> list[str]:
    try:
        content = json.loads(text)
        vocab = content["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        ids.update({token["content"]: token["id"] for token in content.get("added_tokens", [])})
        if not all(isinstance(token, str) and type(i) is int and 0 <= i < 1 << 24 for token, i in ids.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library") from None
    entries = [""] * (max(ids.values(), default=-1) + 1)
    for token, i in ids.items():
        entries[i] = token
    return entries


def wordpiece(entries: list[str]) -> Tokenizer:
    """A tokenizer for a `vocab.txt`: lower-case, Chinese characters and digits apart, then WordPiece."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(entries)}, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True, handle_chinese_chars=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


class Vocabulary:
    """Text to ids and back.

    Attributes:
        size: number of entries; ids are 0 to size - 1.
        begin_id, end_id: what stands before and after every document.
        pad_id, unk_id: padding and unknown token, None where the vocabulary has none.
    """

    def __init__(self, entries: list[str], tokenizer: Tokenizer, files: dict[str, str]) -> None:
        self.entries = entries
        self.size = len(entries)
        self.files = files
        self._tokenizer = tokenizer
        ids = {token: i for i, token in enumerate(entries)}
        self.pad_id = next((ids[token] for token in ("[PAD]", "<pad>") if token in ids), None)
        self.unk_id = next((ids[token] for token in ("[UNK]", "<unk>") if token in ids), None)
        try:
            self.begin_id = next(ids[token] for token in _BEGIN if token in ids)
            self.end_id = next(ids[token] for token in _END if token in ids)
        except StopIteration:
            raise UserError(f"the tokenizer.json has none of {', '.join(_BEGIN + _END)} to mark a document") from None
        self.special_ids = {ids[token] for token in {*SPECIAL_TOKENS, *_BEGIN, *_END, "<pad>", "<unk>"} if token in ids}

    @classmethod
    def load(cls, path: Path | str) -> Vocabulary:
        """Reads a `vocab.txt`, a `tokenizer.json`, or a folder that holds one. Raises UserError."""
        from tokenizers import Tokenizer

        path = Path(path)
        entries = _read_entries(path)
        if path.is_dir():
            path = path / ("vocab.txt" if (path / "vocab.txt").is_file() else "tokenizer.json")
        if path.suffix != ".json":
            return cls(entries, wordpiece(entries), {"vocab.txt": "".join(entry + "\n" for entry in entries)})
        with library_errors(f"{path} is not a tokenizer.json of the tokenizers library"):
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()
            tokenizer.no_truncation()
        return cls(entries, tokenizer, {})

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the marks of a document."""
        with library_errors(_CANNOT):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Ids of many documents, each with its marks at both ends; all cores take part."""
        with library_errors(_CANNOT):
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [[self.begin_id, *encoding.ids, self.end_id] for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the beginning of a document: the mark, then the text."""
        return [self.begin_id, *self.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens vanish, and blanks stand only between Latin words."""
        kept = [int(i) for i in ids if int(i) not in self.special_ids]
        with library_errors(_CANNOT):
            return tidy(self._tokenizer.decode(kept, skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        """Writes the vocabulary so that this class and transformers' AutoTokenizer read the same from it."""
        for name, content in self.files.items():
            (directory / name).write_text(content, encoding="utf-8")
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing

        begin, end = self.entries[self.begin_id], self.entries[self.end_id]
        with library_errors(_CANNOT):
            whole = Tokenizer.from_str(self._tokenizer.to_str())
            whole.post_processor = TemplateProcessing(
                single=f"{begin} $A {end}", special_tokens=[(begin, self.begin_id), (end, self.end_id)]
            )
        whole.save(str(directory / "tokenizer.json"))
        special: dict[str, Any] = {"bos_token": begin, "eos_token": end}
        for key, i in (("pad_token", self.pad_id), ("unk_token", self.unk_id)):
            if i is not None:
                special[key] = self.entries[i]
        kind = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "do_lower_case": True,
            "clean_up_tokenization_spaces": False,
        }
        _write_json(directory / "special_tokens_map.json", special)
        _write_json(directory / "tokenizer_config.json", {**kind, **special})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


_LATIN = r"A-Za-z\u00c0-\u024f\u0370-\u052f"
_KEEP_BLANK = re.compile(rf"(?<=[{_LATIN}]) (?=[{_LATIN}])|(?<=[{_LATIN}][,.;:!?]) (?=[{_LATIN}])")


def tidy(text: str) -> str:
    """Removes the blanks that decoding leaves, except between Latin words."""
    text = _KEEP_BLANK.sub("\0", re.sub(r" +(?=[,.;:!?])", "", text))
    return text.replace(" ", "").replace("\0", " ")


def train(corpus: Path | str, size: int) -> list[str]:
    """Entries of a WordPiece vocabulary of at most `size` entries, the same at every call.

    The alphabet comes first, the most frequent characters before the rarer ones, ties by code point; what room is left
    goes to merged pieces of Latin words. The trainer of the library gives its alphabet ids in the order of a hash map,
    which differs from run to run; so it is handed over ready-made, as special tokens.

    Raises:
        UserError: a bad corpus, or a size without room for an alphabet.
    """
    from tokenizers import trainers

    if size <= len(SPECIAL_TOKENS):
        raise UserError(f"--size {size} leaves no room beside the {len(SPECIAL_TOKENS)} special tokens")
    tokenizer = wordpiece(SPECIAL_TOKENS)
    words: Counter[str] = Counter()
    for paragraph in read_paragraphs(corpus):
        normal = tokenizer.normalizer.normalize_str(paragraph)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    alphabet: Counter[str] = Counter()
    for word, count in words.items():
        for place, character in enumerate(word):
            alphabet["##" * (place > 0) + character] += count
    ranked = sorted(alphabet, key=lambda piece: (-alphabet[piece], piece))
    given = SPECIAL_TOKENS + ranked[: size - len(SPECIAL_TOKENS)]
    known = set(given)
    whole = {w: c for w, c in words.items() if all("##" * (i > 0) + ch in known for i, ch in enumerate(w))}
    repeated = (word for word in sorted(whole) for _ in range(whole[word]) if len(word) > 1)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=given, min_frequency=2, show_progress=False)
    tokenizer.train_from_iterator(repeated, trainer)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)[:size]


def unknown_rate(entries: list[str], corpus: Path | str) -> float:
    """Share of the tokens of a corpus that the vocabulary does not know, 0 to 1."""
    vocabulary = Vocabulary(entries, wordpiece(entries), {})
    total = unknown = 0
    for paragraph in read_paragraphs(corpus):
        ids = vocabulary.encode(paragraph)
        total += len(ids)
        unknown += ids.count(vocabulary.unk_id)
    return unknown / max(total, 1)


def main() -> None:
    """The command `train`."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt2_chinese.vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command = parser.add_subparsers(required=True, dest="command").add_parser(
        "train", help="train a WordPiece vocabulary"
    )
    command.add_argument("--corpus", required=True, type=Path, help="array-JSON file or folder")
    command.add_argument("--size", type=int, default=4096, help="largest number of entries (default: 4096)")
    command.add_argument("--output", required=True, type=Path, help="the vocab.txt to write")
    command.add_argument("--held-out", type=Path, help="a second corpus whose unknown tokens are counted, too")
    arguments = parser.parse_args()
    with exit_on_user_error():
        entries = train(arguments.corpus, arguments.size)
        beside = arguments.output.with_name(arguments.output.name + ".tmp")
        try:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text("".join(entry + "\n" for entry in entries), encoding="utf-8")
            os.replace(beside, arguments.output)
        except OSError as error:
            raise UserError(f"--output {arguments.output} cannot be written: {error.strerror}") from None
        print(f"{arguments.output}: {len(entries)} entries")
        for corpus in filter(None, (arguments.corpus, arguments.held_out)):
            print(f"unknown tokens in {corpus}: {unknown_rate(entries, corpus):.2%}")


if __name__ == "__main__":
    main()
