"""WordPiece by one table lookup a character, in numpy: the ids of the tokenizers library, bit for bit, much faster.

Nearly every token of a Chinese text is one character that splits the text: a Chinese character, a punctuation mark, in
profile gpt2_chinese also a digit. Its id depends on nothing around it, so a table gives it. What the table cannot give,
runs of letters, marks, and characters that vanish and let their neighbours join, the tokenizers library encodes run by
run, and the latest runs are remembered.

    text     今  天  ,     h  e  l  l  o     2  0  1  9
    table   71  52  13  -  R  R  R  R  R  -  8  6  7  15      - a blank: no token;  R part of a run
    ids     71  52  13     503  ##24         8  6  7  15

The table is filled by asking the tokenizer about each code point that appears. A code point is a single token if, between
two letters, the normalizer and the pre-tokenizer make it a separate word of one character, and the model makes this word
one token. That other neighbours change nothing follows from the rules that `is_covered` demands: BERT's normalizer maps
each character alone, and each rule that splits looks at one character. A test checks every code point in several
neighbourhoods.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CODE_POINTS = 0x110000
_BLANK, _RUN, _UNASKED = -1, -2, -3  # in place of an id
_LETTER = "a"
_MOST_RUNS, _LONGEST_RUN = 1 << 15, 32  # remembered, characters: a few MB


def is_covered(tokenizer: Tokenizer) -> bool:
    """True for a WordPiece tokenizer whose rules look at one character at a time, as those of each vocab.txt.

    That is BERT's normalizer with any options; BERT's pre-tokenizer, with or without single digits after it; WordPiece; and
    no token that is looked for in the text before all that.
    """
    content = json.loads(tokenizer.to_str())
    words = content["pre_tokenizer"] or {}
    steps = words["pretokenizers"] if words.get("type") == "Sequence" else [words]
    names = [step.get("type") for step in steps]
    return (
        content["model"].get("type") == "WordPiece"
        and (content["normalizer"] or {}).get("type") == "BertNormalizer"
        and (names == ["BertPreTokenizer"] or (names == ["BertPreTokenizer", "Digits"] and steps[1]["individual_digits"]))
        and not content["added_tokens"]
    )


class FastWordPiece:
    """Encodes documents with the ids of a tokenizer that `is_covered`.

    Attributes:
        tokenizer: answers for each code point, and encodes the runs.
        begin_id, end_id: the marks before and after each document.
    """

    def __init__(self, tokenizer: Tokenizer, begin_id: int, end_id: int) -> None:
        self.tokenizer, self.begin_id, self.end_id = tokenizer, begin_id, end_id
        self._table = np.full(_CODE_POINTS, _UNASKED, np.int32)  # id, _BLANK, _RUN or _UNASKED of each code point
        self._runs: dict[str, list[int]] = {}

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """Ids of documents one after the other, each between its two marks: (count,) int32.

        Raises:
            UnicodeEncodeError: a text holds half a surrogate pair.
            Exception: of the tokenizers library, as when it encodes the texts itself.
        """
        if not texts:
            return np.empty(0, np.int32)
        # two line breaks between documents are replaced by the marks
        joined = "\n" + "\n\n".join(texts) + "\n"
        values = self._looked_up(np.frombuffer(joined.encode("utf-32-le"), "<u4"))
        ends = np.cumsum([len(text) + 2 for text in texts])
        values[ends - 1] = self.end_id
        values[0] = self.begin_id
        values[ends[:-1]] = self.begin_id
        inside = values == _RUN
        if not inside.any():
            return values[values >= 0]
        # the first and the last position hold marks, so each run has a beginning and an end
        changes = np.flatnonzero(inside[1:] != inside[:-1]) + 1
        starts, stops = changes[::2], changes[1::2]
        runs = [joined[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        known = self._encoded(runs)
        found = [known[run] for run in runs]
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        kept = np.flatnonzero(values >= 0)
        places = np.repeat(np.searchsorted(kept, starts), lengths)
        return np.insert(values[kept], places, [i for ids in found for i in ids])

    def _looked_up(self, codes: np.ndarray) -> np.ndarray:
        """The entry of each code point: (count,) int32, an id or _BLANK or _RUN."""
        values = self._table[codes]
        unasked = values == _UNASKED
        if unasked.any():
            for code in np.unique(codes[unasked]).tolist():
                self._table[code] = self._answer(chr(code))
            values = self._table[codes]
        return values

    def _answer(self, character: str) -> int:
        normal = self.tokenizer.normalizer.normalize_str(_LETTER + character + _LETTER)
        words = [word for word, _ in self.tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
        if words == [_LETTER, _LETTER]:
            return _BLANK
        if len(words) != 3 or (words[0], words[2]) != (_LETTER, _LETTER) or len(words[1]) != 1:
            return _RUN
        try:
            tokens: list[Any] = self.tokenizer.model.tokenize(words[1])
        except Exception:  # a vocabulary without its unknown token: the library says so if the character appears in a text
            return _RUN
        return tokens[0].id if len(tokens) == 1 else _RUN

    def _encoded(self, runs: list[str]) -> dict[str, list[int]]:
        """The ids of each run; the library encodes those that are not remembered."""
        if new := [run for run in set(runs) if run not in self._runs]:
            encodings = self.tokenizer.encode_batch_fast(new, add_special_tokens=False)
            found = {run: encoding.ids for run, encoding in zip(new, encodings, strict=True)}
            if len(self._runs) + len(found) > _MOST_RUNS:
                self._runs = {run: self._runs[run] for run in runs if run in self._runs}
            known = self._runs | found
            self._runs.update((run, ids) for run, ids in found.items() if len(run) <= _LONGEST_RUN)
            return known
        return self._runs
