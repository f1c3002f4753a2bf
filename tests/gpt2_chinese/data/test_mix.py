"""Mixes of sources: exact shares, epochs that see every row, the same draws in any process and from any step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2_chinese.data.batches import IGNORED, Batches
from gpt2_chinese.data.mix import BLOCK, Mix, apportion, load_mix, parse_mix, sources_of
from gpt2_chinese.data.rows import Packed, Windows
from gpt2_chinese.errors import UserError

T, B = 7, 24


def mix_of(*sizes: int, weights: tuple[float, ...] = (5, 3, 2)) -> Mix:
    """Sources a, b, c whose windows hold their source's number and nothing else."""
    rows = [Windows(np.full(size * T + 1, source), T) for source, size in enumerate(sizes)]
    return Mix("abc"[: len(sizes)], rows, weights[: len(sizes)])


@pytest.mark.parametrize("first", [0, BLOCK, 7 * BLOCK])
def test_a_block_has_the_shares_to_the_row(first: int) -> None:
    mix = mix_of(900, 50, 2000)
    inputs, _ = mix.cut(mix.draw(42, first, BLOCK))
    assert np.bincount(inputs[:, 0]).tolist() == [5000, 3000, 2000]


def test_apportioned_numbers_are_within_one_of_the_shares_and_have_the_right_sum() -> None:
    for weights in ((1, 1, 1), (0.5, 0.3), (7, 11, 13, 17)):
        shares = np.array(weights) / sum(weights)
        counts = apportion(shares, BLOCK)
        assert counts.sum() == BLOCK and np.abs(counts - shares * BLOCK).max() < 1


def test_every_epoch_of_a_source_sees_each_row_once_in_another_order() -> None:
    mix = mix_of(900, 50, 2000)
    drawn = mix.draw(42, 0, 4 * BLOCK)
    for first, size in ((0, 900), (900, 50), (950, 2000)):
        own = drawn[(drawn >= first) & (drawn < first + size)] - first
        epochs = [own[n * size : (n + 1) * size] for n in range(len(own) // size)]
        assert len(epochs) >= 4
        assert all(sorted(epoch.tolist()) == list(range(size)) for epoch in epochs)
        assert epochs[0].tolist() != epochs[1].tolist()


def test_a_draw_depends_on_its_number_and_the_seed_alone() -> None:
    whole = mix_of(900, 50, 2000).draw(42, 0, 3 * BLOCK)
    for first, count in ((0, 1), (17, 24), (BLOCK - 5, 24), (2 * BLOCK + 3, 500)):
        assert mix_of(900, 50, 2000).draw(42, first, count).tolist() == whole[first : first + count].tolist()
    assert mix_of(900, 50, 2000).draw(43, 0, 500).tolist() != whole[:500].tolist()


def test_epochs_are_draws_by_size() -> None:
    mix = mix_of(900, 50, 2000)
    assert mix.epochs(42, BLOCK) == {"a": 5000 / 900, "b": 3000 / 50, "c": 1.0}
    drawn = mix.draw(42, 0, 1234)
    assert mix.epochs(42, 1234)["b"] == ((drawn >= 900) & (drawn < 950)).sum() / 50


def packed_mix() -> Mix:
    """Two sources of documents with 3 to 9 ids, packed: rows have different numbers of targets."""
    draw = np.random.default_rng(5)
    rows = []
    for begin in (2, 1000):
        lengths = draw.integers(3, 10, 300)
        ids = begin + np.arange(lengths.sum())
        ids[np.cumsum(lengths) - 1] = 1
        rows.append(Packed(ids, T, 1))
    return Mix("ab", rows, (2, 1))


@pytest.mark.parametrize("num_ranks, grad_accum", [(1, 3), (2, 1), (3, 2), (4, 6)])
def test_any_sharing_gives_the_same_global_batch_and_weights_of_its_token_mean(num_ranks: int, grad_accum: int) -> None:
    mix = packed_mix()
    for step in (1, 9, 30):
        (alone,) = Batches(mix, T, B).micro_batches(step)
        parts, total = [], 0.0
        for rank in range(num_ranks):
            batches = Batches(packed_mix(), T, B, 42, rank, num_ranks, grad_accum)
            for inputs, targets in batches.micro_batches(step):
                losses = targets[targets != IGNORED].double()  # any numbers, one a target
                total += float(losses.mean() * batches.weight(step, targets)) / (num_ranks * grad_accum)
                parts.append((inputs, targets))
        assert all(torch.equal(torch.cat(each), whole) for each, whole in zip(zip(*parts, strict=True), alone, strict=True))
        expected = alone[1][alone[1] != IGNORED].double().mean()
        assert total == pytest.approx(float(expected), rel=1e-6), "the weight is a float32"


def test_windows_have_the_weight_one_exactly() -> None:
    batches = Batches(np.arange(1000), T, B, num_ranks=2, grad_accum=3)
    assert all(batches.weight(1, targets) == 1.0 for _, targets in batches.micro_batches(1))


# ---- flags


def test_weights_are_read_as_written() -> None:
    assert parse_mix("news=0.5, wiki=3e-1") == {"news": 0.5, "wiki": 0.3}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sources a (a folder of two files), b (a folder), c (a file)."""
    for name, number in (("a/1.json", 100), ("a/2.json", 60), ("b/1.json", 40), ("c.json", 10)):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(["今天气很好我们去河边走了"] * number, ensure_ascii=False), encoding="utf-8")
    return tmp_path / "corpus"


VOCAB = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"今天气很好我们去河边走了步，。0123456789"])


def test_temperature_gives_shares_by_powers_of_the_sizes(corpus: Path) -> None:
    vocab = corpus / "vocab.txt"
    vocab.write_text(VOCAB, encoding="utf-8")
    assert list(sources_of(corpus, "--mix")) == ["a", "b", "c"]
    for temperature in (1.0, 2.0, 1e9):
        tokens, weights = load_mix(corpus, None, temperature, vocab, "auto")
        sizes = np.array([14 * 160, 14 * 40, 14 * 10])  # 12 characters and two marks
        assert [len(each) for each in tokens.values()] == sizes.tolist()
        shares = np.array(weights) / sum(weights)
        assert shares == pytest.approx(sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum())


@pytest.mark.parametrize("mix, line", [
    ("a=0.5,d=1", r"--mix a=0.5,d=1: --train-data \S+ has no source d; it has a, b, c"),
    ("a=0,b=1", r"the weight of a must be above 0"), ("a=-1", r"the weight of a must be above 0"),
    ("a=inf", r"above 0 and finite"), ("a=nan", "'a=nan' is no name and weight"),
    ("a", "'a' is no name and weight: give them as news=0.5,wiki=0.3"), ("a=1,,b=2", "'' is no name and weight"),
    ("a=1,a=2", "a is named twice"), ("=1", "'=1' is no name and weight"),
])  # fmt: skip
def test_a_bad_mix_is_one_line(corpus: Path, mix: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        load_mix(corpus, mix, None, corpus / "vocab.txt", "auto")
    assert "\n" not in str(error.value)


def test_one_source_is_no_mix(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, line in ((corpus / "c.json", "is one file"), (corpus / "a" / "x", "does not exist"),
                       (corpus / "b", "has only 1"), (tmp_path / "empty", "has none")):
        with pytest.raises(UserError, match=f"--mix needs several sources, and --train-data {path} {line}: give"):
            sources_of(path, "--mix")
    (corpus / "a.json").write_text("[]")
    with pytest.raises(UserError, match="has a as a file and as a sub-folder: rename one"):
        sources_of(corpus, "--mix")


def test_a_source_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(UserError, match="the source b has a share of 1e-06, below 1 of 10000"):
        mix_of(900, 50, weights=(1, 1e-6))
    with pytest.raises(UserError, match="the source b is too small: its tokens do not fill one --seq-len 7"):
        mix_of(900, 0, weights=(1, 1))
