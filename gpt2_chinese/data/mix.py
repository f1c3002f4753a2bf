"""Batches from several sources, by weights: --mix news=0.5,wiki=0.3, or --mix-temperature.

Sources are the sub-folders of --train-data, and its files, by their names. Which source gives row number k of the run, and
which row of it, are functions of (seed, k) alone: no process and no checkpoint holds a state.

    block of 10,000 rows     6,250 news and 3,750 wiki, shuffled by (seed, block)
    a source's draws         its rows, shuffled anew in each of its epochs, by (seed, epoch, source)

So every block has the weights' shares to within one row, and draw number d of a source is at hand for any d: the draws
before a block are a multiple of its count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2_chinese.data.rows import Rows
from gpt2_chinese.data.token_cache import Tokens, load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind

BLOCK = 10_000  # rows


@dataclass(frozen=True)
class MixedTokens:
    """Several corpora as one, for reports: the attributes of Tokens that a run's header shows."""

    sources: dict[str, Tokens]

    def __len__(self) -> int:
        return sum(len(tokens) for tokens in self.sources.values())

    @property
    def unknown_rate(self) -> float:
        """Share of the ids that are the unknown token, 0 to 1."""
        return sum(tokens.unknown for tokens in self.sources.values()) / len(self)

    @property
    def characters_per_token(self) -> float:
        """Characters of text per id, the marks of documents left out."""
        documents, characters = (sum(getattr(t, n) for t in self.sources.values()) for n in ("documents", "characters"))
        return characters / max(1, len(self) - 2 * documents)


class Mix:
    """The rows of several sources as one sequence, and the order in which a run draws them.

    Args:
        names: of the sources.
        rows: of each source; all have the same seq_len.
        weights: of each source, positive; only their ratio counts.

    Attributes:
        shares: (sources,) float64, of the rows that a run draws; their sum is 1.

    Raises:
        UserError: a source without a row, or with a share too small to be drawn.
    """

    def __init__(self, names: Sequence[str], rows: Sequence[Rows], weights: Sequence[float]) -> None:
        self.names, self.rows, self.seq_len = list(names), list(rows), rows[0].seq_len
        self.shares = np.asarray(weights, np.float64) / math.fsum(weights)
        self.num_ids = sum(each.num_ids for each in rows)
        self._sizes = [len(each) for each in rows]
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes)])
        self._per_block = apportion(self.shares, BLOCK)
        for name, size, share, count in zip(names, self._sizes, self.shares, self._per_block, strict=True):
            if size < 1:
                raise UserError(f"the source {name} is too small: its tokens do not fill one --seq-len {self.seq_len}")
            if count < 1:
                raise UserError(
                    f"the source {name} has a share of {share:.1g}, below 1 of {BLOCK}: give it more, or leave it out"
                )
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # of each source, its newest epoch and that epoch's order

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def cut(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in Rows."""
        inputs = np.empty((len(numbers), self.seq_len), np.int64)
        targets = np.empty_like(inputs)
        for rows, here, local in self._by_source(numbers):
            inputs[here], targets[here] = rows.cut(local)
        return inputs, targets

    def num_targets(self, numbers: np.ndarray) -> int | None:
        """As in Rows."""
        counts = [rows.num_targets(local) for rows, _, local in self._by_source(numbers)]
        return None if None in counts else sum(counts)

    def draw(self, seed: int, first: int, count: int) -> np.ndarray:
        """(count,) int64: the row numbers of draws number first to first + count - 1 of a run, counted from 0."""
        found = np.empty(count, np.int64)
        done = 0
        while done < count:
            block, place = divmod(first + done, BLOCK)
            order = self._block(seed, block)
            here = order[place : place + count - done]
            before = block * self._per_block + np.bincount(order[:place], minlength=len(self.rows))
            for source in np.unique(here):
                mine = np.flatnonzero(here == source)
                found[done + mine] = self._offsets[source] + self._rows_of(seed, int(source), before[source], len(mine))
            done += len(here)
        return found

    def epochs(self, seed: int, count: int) -> dict[str, float]:
        """How often the first `count` draws of a run have gone through each source."""
        block, place = divmod(count, BLOCK)
        draws = block * self._per_block + np.bincount(self._block(seed, block)[:place], minlength=len(self.rows))
        return {name: int(n) / size for name, n, size in zip(self.names, draws, self._sizes, strict=True)}

    def _block(self, seed: int, block: int) -> np.ndarray:
        """(BLOCK,) the source of each draw of a block."""
        sources = np.repeat(np.arange(len(self.rows)), self._per_block)
        return np.random.default_rng([seed, block, 0]).permutation(sources)  # 0: the orders of sources have 1, 2, ...

    def _rows_of(self, seed: int, source: int, first: int, count: int) -> np.ndarray:
        """Rows of a source at its draws number first to first + count - 1."""
        draws, size = np.arange(first, first + count), self._sizes[source]
        found = np.empty(count, np.int64)
        for epoch in np.unique(draws // size).tolist():
            if self._orders.get(source, (-1,))[0] != epoch:
                self._orders[source] = epoch, np.random.default_rng([seed, epoch, source + 1]).permutation(size)
            mine = draws // size == epoch
            found[mine] = self._orders[source][1][draws[mine] % size]
        return found

    def _by_source(self, numbers: np.ndarray) -> list[tuple[Rows, np.ndarray, np.ndarray]]:
        """(rows, places among the numbers, numbers within the source) of each source that occurs."""
        sources = np.searchsorted(self._offsets, numbers, side="right") - 1
        places = [(source, np.flatnonzero(sources == source)) for source in np.unique(sources).tolist()]
        return [(self.rows[source], here, numbers[here] - self._offsets[source]) for source, here in places]


def apportion(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers by shares, (sources,) int64, whose sum is `total`: each rounded down, then the largest remainders up."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    left = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[left] += 1
    return counts


# ---- from the command line --------------------------------------------------------------------------------------------


def parse_mix(text: str) -> dict[str, float]:
    """`news=0.5,wiki=0.3` -> weights by name. Raises UserError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not name or not equals or math.isnan(weight):
            raise UserError(f"--mix {text}: {part.strip()!r} is no name and weight: give them as news=0.5,wiki=0.3")
        if not 0 < weight < math.inf:
            raise UserError(f"--mix {text}: the weight of {name} must be above 0 and finite; leave out what is not wanted")
        if name in weights:
            raise UserError(f"--mix {text}: {name} is named twice: give each source one weight")
        weights[name] = weight
    return weights


def sources_of(folder: Path | str, flag: str) -> dict[str, Path]:
    """The sources of a folder: its sub-folders with array-JSON files, and its own array-JSON files, by their names.

    Raises:
        UserError: no folder, or fewer than two sources in it.
    """
    folder = Path(folder)
    found = kind(folder, f"--train-data {folder}")
    if found != "folder":
        what = "is one file" if found == "file" else "does not exist"
        raise UserError(
            f"{flag} needs several sources, and --train-data {folder} {what}: give a folder with a sub-folder for each"
        )
    files = {path.stem: path for path in sorted(folder.glob("*.json")) if path.is_file()}
    folders = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and any(path.glob("*.json"))}
    if both := sorted(files.keys() & folders.keys()):
        raise UserError(f"{flag}: --train-data {folder} has {both[0]} as a file and as a sub-folder: rename one of them")
    sources = dict(sorted({**files, **folders}.items()))
    if len(sources) < 2:
        only = f"only {', '.join(sources)}" if sources else "none"
        raise UserError(f"{flag} needs several sources, and --train-data {folder} has {only}: give each a folder")
    return sources


def load_mix(
    folder: Path | str, mix: str | None, temperature: float | None, vocab: Path | str, profile: str
) -> tuple[dict[str, Tokens], list[float]]:
    """The sources that --mix names, or all for --mix-temperature: their ids by name, and their weights.

    With temperature T a source of n ids has the weight n^(1/T): T = 1 keeps the sizes' ratio, a large T makes all equal
    (Lample and Conneau 2019, "Cross-lingual Language Model Pretraining", arXiv:1901.07291, section 3.1, alpha = 1/T).

    Raises:
        UserError: bad flags, an unknown name, and what load_tokens raises.
    """
    weights = None if mix is None else parse_mix(mix)
    sources = sources_of(folder, "--mix-temperature" if mix is None else "--mix")
    if unknown := sorted((weights or {}).keys() - sources.keys()):
        raise UserError(f"--mix {mix}: --train-data {folder} has no source {unknown[0]}; it has {', '.join(sources)}")
    tokens = {name: load_tokens(sources[name], vocab, profile) for name in weights or sources}
    if weights is not None:
        return tokens, list(weights.values())
    sizes = [len(each) for each in tokens.values()]
    return tokens, [(size / max(sizes)) ** (1 / temperature) for size in sizes]
