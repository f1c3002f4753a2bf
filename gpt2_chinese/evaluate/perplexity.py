"""Loss, perplexity, bits per character and accuracy of a model on a corpus, whole and by genre, position and frequency."""

from __future__ import annotations

import argparse
import json
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from durable.files import replacing
from gpt2_chinese.corpus import corpus_files, read_file
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary.profiles import VocabularyFile

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


KINDS = ("genre", "folder", "position", "frequency")
COLUMNS = ("loss", "perplexity", "bits_per_character", "accuracy", "accuracy_top5", "tokens", "characters")


@dataclass
class Corpus:
    """A corpus ready to be scored.

    Attributes:
        ids: (N,) ids of all its documents, one after the other.
        names: the genres: the path of each file, or one path for all.
        ends: (G,) int64, index in ids at which each genre ends.
        characters: number of characters of each genre in the files.
    """

    ids: np.ndarray
    names: list[Path]
    ends: np.ndarray
    characters: list[int]


def read_corpus(path: Path, vocabulary: VocabularyFile, by_file: bool) -> Corpus:
    """Tokenises a corpus, or reads its ids from the cache.

    Raises:
        UserError: a corpus that training would refuse, too.
    """
    import numpy as np

    texts: dict[Path, int] = {}
    for file in corpus_files(path):
        lengths = [len(text) for text in read_file(file)]
        if lengths:
            texts[file] = sum(lengths)
    if by_file and texts:
        parts = [load_tokens(file, vocabulary.path, vocabulary.profile).ids for file in texts]
        return Corpus(np.concatenate(parts), list(texts), np.cumsum([len(ids) for ids in parts]), list(texts.values()))
    ids = load_tokens(path, vocabulary.path, vocabulary.profile).ids
    return Corpus(ids, [path], np.array([len(ids)]), [sum(texts.values())])


def short_names(paths: list[Path]) -> list[str]:
    """The shortest endings by which paths differ, without suffix: news, or train/news and valid/news."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def results(sums: Tensor, characters: int | None = None) -> dict[str, Any]:
    """The numbers of COLUMNS from sums (4,); bits per character only if `characters` is given."""
    loss, first, five, count = sums.tolist()
    row: dict[str, Any] = {"loss": loss / count, "perplexity": math.exp(min(loss / count, 700.0))}
    if characters:
        row["bits_per_character"] = loss / math.log(2) / characters
    row |= {"accuracy": first / count, "accuracy_top5": five / count, "tokens": round(count)}
    return row | ({"characters": characters} if characters else {})


def position_buckets(seq_len: int) -> list[tuple[int, int]]:
    """First and last position of each bucket: 0, 1, 2-3, 4-7, and so on."""
    first, found = 0, []
    while first < seq_len:
        last = min(max(first, 2 * first - 1), seq_len - 1)
        found.append((first, last))
        first = last + 1
    return found


def trained_seq_len(folder: Path) -> int | None:
    """--seq-len of the run that wrote a checkpoint or a final/, None if unknown."""
    for file, keys in ((folder / "state.json", ("settings", "seq_len")), (folder.parent / "config.json", ("seq_len",))):
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))
            for key in keys:
                found = found[key]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(found) is int and found >= 1:
            return found
    return None


def evaluate_corpora(
    a: argparse.Namespace, folder: Path, model: Any, vocabulary: Any, precision: str, device: Any
) -> dict[str, Any]:
    """Evaluates a model by the flags on all corpora; returns the content of --json. Raises UserError."""
    import numpy as np
    import torch
    from tqdm import tqdm

    from gpt2_chinese.evaluate.scoring import CLASS_ENDS, Windows, frequency_classes, score

    context = model.config.n_positions
    seq_len = a.seq_len or min(trained_seq_len(folder) or context, context)
    if seq_len > context:
        raise UserError(f"--seq-len {seq_len} is above the context of the model in {folder}, n_positions {context}")
    stride = a.stride or seq_len
    if stride > seq_len:
        raise UserError(f"--stride {stride} is above the windows' length, --seq-len {seq_len}: tokens would be left out")

    by_file = "genre" in a.by or "folder" in a.by
    corpora = [read_corpus(path, vocabulary.file, by_file) for path in a.corpus]
    plans = [Windows.of(len(corpus.ids), seq_len, stride) for corpus in corpora]
    everything = np.concatenate([corpus.ids for corpus in corpora]) if "frequency" in a.by else np.empty(0, np.int64)
    classes = frequency_classes(everything, vocabulary.size)
    by_place, by_class = [], torch.zeros(len(CLASS_ENDS) + 1, 4, dtype=torch.float64)
    total = sum(-(-len(plan.starts) // a.batch_size) for plan in plans)
    with tqdm(total=total, unit="batch", disable=None) as bar:  # no bar in a log file
        for corpus, plan in zip(corpora, plans, strict=True):
            place = torch.zeros(len(corpus.names), seq_len, 4, dtype=torch.float64)
            how = corpus.ends, classes, precision, device
            for more, classed in score(model, corpus.ids, plan, seq_len, a.batch_size, *how):
                place += more
                by_class += classed
                bar.update()
            by_place.append(place)
    places, characters = torch.cat(by_place), [count for corpus in corpora for count in corpus.characters]
    whole = results(places.sum((0, 1)), sum(characters))
    if not math.isfinite(whole["loss"]):
        raise UserError(f"the loss of {folder} is {whole['loss']}: its weights are broken, or overflow in {precision}")
    found: dict[str, Any] = {
        "model": str(folder), "corpus": [str(path) for path in a.corpus], "seq_len": seq_len, "stride": stride,
        "precision": precision, "device": str(device), "all": whole,
    }  # fmt: skip
    files = [name for corpus in corpora for name in corpus.names]
    if "genre" in a.by:
        rows = zip(short_names(files), places.sum(1), characters, strict=True)
        found["by_genre"] = {name: results(sums, count) for name, sums, count in rows}
    if "folder" in a.by:
        found["by_folder"] = _by_folder(files, places.sum(1), characters)
    by_position = places.sum(0)
    if "position" in a.by:
        buckets = {f"{f}-{t}" if t > f else str(f): by_position[f : t + 1].sum(0) for f, t in position_buckets(seq_len)}
        found["by_position"] = {name: results(sums) for name, sums in buckets.items() if sums[-1]}
    if "frequency" in a.by:
        firsts = [1, *(end + 1 for end in CLASS_ENDS)]
        names = [f"{f}-{t}" for f, t in zip(firsts, CLASS_ENDS, strict=False)] + [f"{firsts[-1]}-"]
        found["by_frequency"] = {name: results(s) for name, s in zip(names, by_class, strict=True) if s[-1]}
    found["loss_by_position"] = [s[0] / s[3] if s[3] else None for s in by_position.tolist()]
    return found


def _by_folder(files: list[Path], sums: Tensor, characters: list[int]) -> dict[str, dict[str, Any]]:
    """The numbers of the files (G, 4) and their characters, added up by folder."""
    folders = list(dict.fromkeys(file.resolve().parent for file in files))
    places = [[n for n, file in enumerate(files) if file.resolve().parent == folder] for folder in folders]
    rows = zip(short_names(folders), places, strict=True)
    return {name: results(sums[own].sum(0), sum(characters[n] for n in own)) for name, own in rows}


HEADINGS = ("loss", "perplexity", "bits/char", "top-1", "top-5", "tokens", "characters")
FORMATS = ("{:.4f}", "{:.2f}", "{:.4f}", "{:.2%}", "{:.2%}", "{:,}", "{:,}")


def table(found: dict[str, Any]) -> str:
    """The table to print: the row of all tokens, then each breakdown."""
    lines: list[tuple[str, ...]] = [("", *HEADINGS), ("all", *_cells(found["all"]))]
    for kind in KINDS:
        if rows := found.get(f"by_{kind}"):
            lines.append((f"by {kind}", *[""] * len(HEADINGS)))
            lines += [(f"  {name}", *_cells(row)) for name, row in rows.items()]
    return aligned(lines)


def aligned(lines: list[tuple[str, ...]]) -> str:
    """Rows of cells as text: the first column to the left, the others to the right; Chinese characters are two wide."""
    def width(text: str) -> int:
        return len(text) + sum(unicodedata.east_asian_width(character) in "WF" for character in text)

    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]

    def row(line: tuple[str, ...]) -> str:
        blanks = [" " * (wide - width(cell)) for wide, cell in zip(widths, line, strict=True)]
        return "  ".join([line[0] + blanks[0], *(blank + cell for blank, cell in zip(blanks[1:], line[1:], strict=True))])

    return "\n".join(row(line).rstrip() for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [form.format(row[name]) if name in row else "" for name, form in zip(COLUMNS, FORMATS, strict=True)]


def plot(founds: dict[str, dict[str, Any]], file: Path) -> None:
    """Draws the loss by position of each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, found in founds.items():
        points = [(position, loss) for position, loss in enumerate(found["loss_by_position"]) if loss is not None]
        (line,) = axes.plot(*zip(*points, strict=True), marker="." if len(points) < 20 else "", label=name)
        color = line.get_color() if len(founds) > 1 else "grey"
        axes.axhline(found["all"]["loss"], linestyle="--", linewidth=1, color=color)
    if len(founds) > 1:
        axes.legend()
    axes.set(xlabel="position in the context", ylabel="loss, nats per token")
    write(file, lambda staging: figure.savefig(staging, format="png", dpi=120), "--plot")


def write(file: Path, content: Callable[[Path], Any], flag: str) -> None:
    """Calls content(path) to write a staging file, and renames that to `file`. Raises UserError, which names the flag."""
    try:
        with replacing(file) as staging:
            content(staging)
    except OSError as error:
        raise UserError(f"{flag} {file} cannot be written: {error.strerror}") from None
