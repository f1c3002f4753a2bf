"""Packed rows: every id once, documents whole, best fit; the reference is a slow search written here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2_chinese.data.rows import IGNORED, Packed, best_fit, document_lengths

END = 1


def corpus_of(lengths: list[int]) -> np.ndarray:
    """Documents of these lengths: an id is its place in the corpus plus 2, the last one of a document is END."""
    ids = np.arange(sum(lengths)) + 2
    ids[np.cumsum(lengths) - 1] = END
    return ids


def all_rows(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    return packed.cut(np.arange(len(packed)))


documents = st.lists(st.integers(2, 40), min_size=1, max_size=60)  # two marks at least


@given(documents, st.integers(2, 17), st.integers(1, 20))
def test_packing_places_every_id_once_and_predicts_every_id_but_the_first_of_a_document(lengths, seq_len, buffer) -> None:
    ids = corpus_of(lengths)
    packed = Packed(ids, seq_len, END, buffer)
    inputs, targets = all_rows(packed)
    assert sorted(inputs[inputs > 0].tolist()) == sorted(ids.tolist())
    firsts = np.cumsum([0, *lengths[:-1]])
    expected = np.delete(ids, firsts)
    assert sorted(targets[targets != IGNORED].tolist()) == sorted(expected.tolist())
    inside = (targets != IGNORED) & (targets != END)
    assert (targets[inside] == inputs[inside] + 1).all(), "the target is the next id of the same document"
    assert (targets[(inputs == END) | (inputs == 0)] == IGNORED).all()
    assert [packed.num_targets(np.array([n])) for n in range(len(packed))] == (targets != IGNORED).sum(1).tolist()
    assert (targets != IGNORED).any(axis=1).all(), "a mean over no target would be NaN"
    assert packed.padding == pytest.approx((inputs == 0).mean())
    assert (packed.num_documents, packed.num_cut) == (len(lengths), sum(n > seq_len for n in lengths))


@given(documents, st.integers(2, 17))
def test_a_document_that_fits_a_window_is_whole_and_a_longer_one_is_followed_by_nothing(lengths, seq_len) -> None:
    inputs, _ = all_rows(Packed(corpus_of(lengths), seq_len, END))
    place = {int(i): (row, column) for row, ids in enumerate(inputs) for column, i in enumerate(ids) if i > END}
    for first, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        text = [place[i] for i in range(first + 2, first + 2 + length - 1)]
        if length <= seq_len:
            assert len({row for row, _ in text}) <= 1
            assert [column for _, column in text] == list(range(text[0][1], text[0][1] + length - 1))
    for row in inputs:
        ids = row[row > 0]
        for before, after in zip(ids[:-1], ids[1:], strict=True):
            assert before == END or after in (before + 1, END), "only an end mark is followed by another document"


@given(documents, st.integers(2, 17))
def test_packing_is_deterministic(lengths, seq_len) -> None:
    one, other = (all_rows(Packed(corpus_of(lengths), seq_len, END, 7)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def slow_best_fit(lengths: np.ndarray, alone: np.ndarray, seq_len: int) -> list[int]:
    """The rooms left in all windows: each piece, the longest first, goes where the least room suffices."""
    rooms: list[int] = []
    for piece in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        fitting = [] if alone[piece] else [room for room in rooms if room >= lengths[piece]]
        room = min(fitting, default=seq_len)
        if fitting:
            rooms.remove(room)
        rooms.append(0 if alone[piece] else room - lengths[piece])
    return rooms


@given(st.lists(st.tuples(st.integers(1, 16), st.booleans()), max_size=80))
def test_best_fit_is_that_of_a_slow_search(pieces) -> None:
    lengths = np.array([length for length, _ in pieces], np.int64)
    alone = np.array([alone for _, alone in pieces], bool)
    windows, count = best_fit(lengths, alone, 16)
    rooms = [16] * count
    for window, length, closed in zip(windows, lengths, alone, strict=True):
        assert rooms[window] >= length
        rooms[window] = 0 if closed else rooms[window] - length
    assert sorted(rooms) == sorted(slow_best_fit(lengths, alone, 16))


def test_the_example_of_the_module() -> None:
    inputs, targets = all_rows(Packed(np.array([9, 2, 3, 4, 1, 9, 5, 1, 9, 11, 12, 13, 14, 15, 16, 17, 18, 1]), 7, END))
    assert inputs.tolist() == [[9, 11, 12, 13, 14, 15, 16], [9, 2, 3, 4, 1, 0, 0], [9, 5, 1, 17, 18, 1, 0]]
    no = IGNORED
    assert targets.tolist() == [[11, 12, 13, 14, 15, 16, 17], [2, 3, 4, 1, no, no, no], [5, 1, no, 18, 1, no, no]]


def test_lengths_of_documents() -> None:
    assert document_lengths(np.array([5, 1, 5, 5, 1]), END).tolist() == [2, 3]
    assert document_lengths(np.array([5, 1, 5, 5]), END).tolist() == [2, 2], "the last one may lack its mark"
    assert document_lengths(np.array([5, 1, 1, 1, 5, 1]), END).tolist() == [4, 2], "one id is no document"
    assert document_lengths(np.empty(0, np.int64), END).tolist() == []


def test_best_fit_leaves_little_padding_where_documents_are_short() -> None:
    """Documents of 5 to 100 ids in windows of 128: under one place in a hundred is padding; one document a window: half."""
    lengths = np.random.default_rng(7).integers(5, 101, 5000)
    packed = Packed(corpus_of(lengths.tolist()), 128, END)
    assert packed.padding < 0.01 < 1 - lengths.sum() / (128 * len(lengths))
