"""Rows of a batch, cut from a corpus: windows of equal length, or whole documents packed into windows.

    ids        B a a a E | B b E | B c c c c c c c c E           three documents; B, E: the marks around each; T = 7
    Windows    B a a a E B b   E B c c c c c   ...               cut through documents, leave no gap
    Packed     B c c c c c c   B a a a E - -   B b E c c E -     cuts only what is longer than a window

Packed places documents by best fit, the longest first: Best-fit Packing of Ding et al. 2024 ("Fewer Truncations Improve
Language Modeling", arXiv:2404.10830). A document goes to the fullest window that still has room for all of it. A longer
document is cut into windows of its own, and its last piece is placed as a document is.

Every id of the corpus is an input once. An end mark predicts nothing, so its target is IGNORED, as are those of padding.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

IGNORED = -100  # a target that the loss ignores, as in torch's cross_entropy
_AT_ONCE = 1 << 24  # ids in which end marks are looked for
BUFFER = 1 << 16  # documents that are placed together: enough for a tight fit, and few enough to sort in no time


class Rows(Protocol):
    """Rows of T inputs and T targets, by number."""

    seq_len: int
    num_ids: int

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def cut(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) row numbers -> inputs and targets, each (n, T) int64."""
        ...

    def num_targets(self, numbers: np.ndarray) -> int | None:
        """How many targets of these rows count; None where all of them do."""
        ...


class Windows:
    """The ids cut into windows of `seq_len`; a window's last target is the first id of the next one.

    Args:
        ids: the corpus, (count,).
        seq_len: T.
    """

    def __init__(self, ids: np.ndarray, seq_len: int) -> None:
        self.ids, self.seq_len, self.num_ids = ids, seq_len, len(ids)

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.seq_len

    def num_targets(self, numbers: np.ndarray) -> None:
        """All targets count."""

    def cut(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in Rows; beyond the end of the corpus inputs are 0 and targets IGNORED."""
        ids = np.full((len(numbers), self.seq_len + 1), IGNORED, np.int64)
        for row, number in enumerate(numbers):
            piece = self.ids[number * self.seq_len : (number + 1) * self.seq_len + 1]
            ids[row, : len(piece)] = piece
        return ids[:, :-1].clip(min=0), ids[:, 1:]


class Packed:
    """Whole documents in windows of `seq_len`; the same windows for the same ids, in every process.

    Args:
        ids: the corpus, (count,).
        seq_len: T, at least 2.
        end: the id after which a document ends.
        buffer: documents that are placed together; the windows of the next ones are new.

    Attributes:
        num_documents, num_cut: documents of the corpus; those longer than a window.
        padding: share of all places in windows that hold no id, 0 to 1.
    """

    def __init__(self, ids: np.ndarray, seq_len: int, end: int, buffer: int = BUFFER) -> None:
        assert seq_len >= 2, "a window of one id predicts nothing of a document's end"
        self.ids, self.seq_len, self.num_ids = ids, seq_len, len(ids)
        lengths = document_lengths(ids, end)
        self.num_documents, self.num_cut = len(lengths), int((lengths > seq_len).sum())
        self._first, self._length, self._is_last, in_document = _pieces(lengths, seq_len)
        window = np.empty(len(self._first), np.int64)
        count = 0
        bounds = np.searchsorted(in_document, np.arange(0, len(lengths) + buffer, buffer))
        for first, after in zip(bounds[:-1], bounds[1:], strict=True):
            window[first:after], more = best_fit(self._length[first:after], ~self._is_last[first:after], seq_len)
            window[first:after] += count
            count += more
        order = np.argsort(window, kind="stable")
        self._first, self._length, self._is_last = self._first[order], self._length[order], self._is_last[order]
        self._begins = np.searchsorted(window[order], np.arange(count + 1))  # of each window's pieces
        self.padding = 1 - len(ids) / max(1, count * seq_len)

    def __len__(self) -> int:
        return len(self._begins) - 1

    def num_targets(self, numbers: np.ndarray) -> int:
        """All ids of these windows but the end marks."""
        pieces = self._pieces_of(numbers)
        return int((self._length[pieces] - self._is_last[pieces]).sum())

    def cut(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in Rows; places without an id have input 0 and target IGNORED."""
        inputs = np.zeros((len(numbers), self.seq_len), np.int64)
        targets = np.full_like(inputs, IGNORED)
        for row, number in enumerate(numbers):
            place = 0
            for piece in range(self._begins[number], self._begins[number + 1]):
                first, length = self._first[piece], self._length[piece]
                counted = length - self._is_last[piece]
                inputs[row, place : place + length] = self.ids[first : first + length]
                targets[row, place : place + counted] = self.ids[first + 1 : first + 1 + counted]
                place += length
        return inputs, targets

    def _pieces_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.concatenate([np.arange(self._begins[n], self._begins[n + 1]) for n in numbers])


def document_lengths(ids: np.ndarray, end: int) -> np.ndarray:
    """Lengths of the documents, (documents,) int64: each with its end mark; the last one may lack it.

    One id is no document: an end mark after an end mark, which a text may hold, belongs to the document before.
    """
    places = range(0, len(ids), _AT_ONCE)  # a corpus is larger than memory
    found = [first + np.flatnonzero(ids[first : first + _AT_ONCE] == end) + 1 for first in places]
    ends = np.concatenate([np.empty(0, np.int64), *found])
    if len(ids) and (not len(ends) or ends[-1] != len(ids)):
        ends = np.append(ends, len(ids))
    ends = np.delete(ends, np.flatnonzero(np.diff(ends) == 1))
    return np.diff(ends, prepend=0)


def _pieces(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most `seq_len`: first id, length, whether it ends its document, document's number.

    A last piece of one id would be an end mark that predicts nothing: the piece before gives it one of its ids.
    """
    counts = -(-lengths // seq_len)
    in_document = np.repeat(np.arange(len(lengths)), counts)
    last_of = np.cumsum(counts) - 1
    is_last = np.zeros(len(in_document), bool)
    is_last[last_of] = True
    length = np.full(len(in_document), seq_len, np.int64)
    length[last_of] = lengths - (counts - 1) * seq_len
    single = last_of[(length[last_of] == 1) & (counts > 1)]
    length[single], length[single - 1] = 2, seq_len - 1
    return np.cumsum(length) - length, length, is_last, in_document


def best_fit(lengths: np.ndarray, alone: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: the window of each piece, (pieces,) int64, and the number of windows.

    Args:
        lengths: of the pieces, at most `seq_len`.
        alone: pieces after which nothing may be placed: they do not end their document.
        seq_len: what a window holds.

    The windows with the same room form a stack. One integer has a bit for each room that some window has, so the fullest
    window that has room for a piece is the lowest bit at or above its length.
    """
    found = np.empty(len(lengths), np.int64)
    stacks: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms = count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting and not alone[piece]:
            room = length + (fitting & -fitting).bit_length() - 1
            window = stacks[room].pop()
            if not stacks[room]:
                rooms ^= 1 << room
        else:
            window, room, count = count, seq_len, count + 1
        found[piece] = window
        left = 0 if alone[piece] else room - length
        if left:
            stacks[left].append(window)
            rooms |= 1 << left
    return found, count
