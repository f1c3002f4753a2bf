"""The vocabulary: from Chinese text to token ids and back.

A `vocab.txt` is a WordPiece vocabulary with BERT's special tokens, used by one of two profiles; a `tokenizer.json` has
its own rules (profiles.py). A document becomes `begin text end`, a prompt `begin text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from durable.files import write_json
from gpt2_chinese.errors import library_errors
from gpt2_chinese.vocabulary.profiles import BEGIN, END, OWN, PROFILE_KEY, VocabularyFile, read_vocabulary

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Encoding, Tokenizer

    from gpt2_chinese.vocabulary.fast_wordpiece import FastWordPiece


SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_CANNOT = "the rules of the tokenizer.json fail on a text; give a sound one with --vocab"


def wordpiece(entries: list[str], profile: str = "gpt2_chinese") -> Tokenizer:
    """A tokenizer for a `vocab.txt`: lower-case, Chinese characters split, then WordPiece; the profile decides on digits.

    Of an entry on two lines the last line counts, as in BertTokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(entries)}, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True, handle_chinese_chars=True)
    words = pre_tokenizers.BertPreTokenizer()
    if profile == "gpt2_chinese":
        words = pre_tokenizers.Sequence([words, pre_tokenizers.Digits(individual_digits=True)])
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


class Vocabulary:
    """Text to ids and back.

    Attributes:
        size: number of entries; ids are 0 to size - 1.
        begin_id, end_id: ids of the marks before and after every document.
        pad_id, unk_id: padding and unknown token, None where the vocabulary has none.
        special_ids: ids of all tokens that are not text.
        profile, layout, digest: as in profiles.VocabularyFile.
    """

    def __init__(self, file: VocabularyFile) -> None:
        self.file = file
        self.entries = file.entries
        self.size = len(file.entries)
        self.profile, self.layout, self.digest = file.profile, file.layout, file.digest
        self._tokenizer = _own_tokenizer(file) if file.profile == OWN else wordpiece(file.entries, file.profile)
        ids = {token: i for i, token in enumerate(file.entries)}
        self.begin_id, self.end_id = ids[file.begin], ids[file.end]
        self.pad_id = next((ids[token] for token in ("[PAD]", "<pad>") if token in ids), None)
        self.unk_id = next((ids[token] for token in ("[UNK]", "<unk>") if token in ids), None)
        special = {*SPECIAL_TOKENS, *BEGIN, *END, file.begin, file.end, "<pad>", "<unk>"}
        self.special_ids = {ids[token] for token in special if token in ids}
        # WordPiece's decoder puts a blank between any two words; blanks of other decoders belong to the text
        decoder = (file.content or {}).get("decoder")
        self._fast: FastWordPiece | bool | None = None  # made at first use
        self._blanks = file.profile != OWN or (isinstance(decoder, dict) and decoder.get("type") == "WordPiece")

    @classmethod
    def load(cls, path: Path | str, profile: str = "auto") -> Vocabulary:
        """Reads a `vocab.txt`, a `tokenizer.json`, or a folder that holds one. Raises UserError as `read_vocabulary`."""
        return cls(read_vocabulary(path, profile))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the marks of a document."""
        with library_errors(_CANNOT):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encodings(self, texts: list[str]) -> list[Encoding]:
        """Encodes many texts on all cores: ids, and the offsets of the tokens in the text."""
        with library_errors(_CANNOT):
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Encodes many documents on all cores: ids, with the marks at both ends."""
        return [[self.begin_id, *encoding.ids, self.end_id] for encoding in self.encodings(texts)]

    def document_ids(self, texts: list[str]) -> np.ndarray:
        """The ids of encode_documents, all documents one after the other: (count,) uint32. Much faster for a vocab.txt."""
        import numpy as np

        if self._fast is None:
            self._fast = self._make_fast()
        if self._fast:
            with library_errors(_CANNOT):
                return self._fast.encode_documents(texts).astype(np.uint32)
        return np.fromiter(chain.from_iterable(self.encode_documents(texts)), np.uint32)

    def _make_fast(self) -> FastWordPiece | bool:
        """The table for this vocabulary; False where its rules look at more than one character."""
        from gpt2_chinese.vocabulary.fast_wordpiece import FastWordPiece, is_covered

        return is_covered(self._tokenizer) and FastWordPiece(self._tokenizer, self.begin_id, self.end_id)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the beginning of a document: the begin mark, then the text."""
        return [self.begin_id, *self.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without special tokens; of the blanks that WordPiece adds, those between Latin words stay."""
        kept = [int(i) for i in ids if int(i) not in self.special_ids]
        with library_errors(_CANNOT):
            text = self._tokenizer.decode(kept, skip_special_tokens=False)
        return tidy(text) if self._blanks else text

    def save(self, directory: Path) -> None:
        """Writes the vocabulary so that this class and transformers' AutoTokenizer read the same from it."""
        begin, end = self.file.begin, self.file.end
        content = self.file.content or json.loads(self._tokenizer.to_str())
        marks = {token: {"id": token, "ids": [i], "tokens": [token]}
                 for token, i in ((begin, self.begin_id), (end, self.end_id))}  # fmt: skip
        text: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        before, after = ([{"SpecialToken": {"id": token, "type_id": 0}}] for token in (begin, end))
        template = {"type": "TemplateProcessing", "single": before + text + after, "special_tokens": marks,
                    "pair": before + text + after + [{"Sequence": {"id": "B", "type_id": 1}}] + after}  # fmt: skip
        content = {**content, "post_processor": template, "padding": None, "truncation": None}
        write_json(directory / "tokenizer.json", content)
        special: dict[str, Any] = {"bos_token": begin, "eos_token": end}
        for key, i in (("pad_token", self.pad_id), ("unk_token", self.unk_id)):
            if i is not None:
                special[key] = self.entries[i]
        kind: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        kind[PROFILE_KEY] = self.profile
        if self.profile != OWN:
            kind["do_lower_case"] = True
            lines = "".join(entry + "\n" for entry in self.entries)
            (directory / "vocab.txt").write_text(lines, encoding="utf-8", newline="")
        write_json(directory / "special_tokens_map.json", special)
        write_json(directory / "tokenizer_config.json", {**kind, **special})


def _own_tokenizer(file: VocabularyFile) -> Tokenizer:
    from tokenizers import Tokenizer

    with library_errors(f"{file.path} is not a tokenizer.json of the tokenizers library"):
        tokenizer = Tokenizer.from_str(json.dumps(file.content))
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return tokenizer


_LATIN = r"A-Za-z\u00c0-\u024f\u0370-\u052f"
_KEEP_BLANK = re.compile(rf"(?<=[{_LATIN}]) (?=[{_LATIN}])|(?<=[{_LATIN}][,.;:!?]) (?=[{_LATIN}])")


def tidy(text: str) -> str:
    """Removes the blanks that decoding adds, except between Latin words."""
    text = _KEEP_BLANK.sub("\0", re.sub(r" +(?=[,.;:!?])", "", text))
    return text.replace(" ", "").replace("\0", " ")
