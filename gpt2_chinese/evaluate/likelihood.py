"""Answers questions by likelihood: the answer with which the model finds the whole text likeliest.

For a text x of an item (choices.py) the score is the sum of log p(x_t | x_<t) over the tokens from the first one that
depends on the answer up to the mark that ends a document: log p(answer, what follows, end | what comes before). Longer
answers have lower sums, so the sum divided by the number of characters of the answer and what follows decides as well, as a
second result (Brown et al. 2020, section 2.4, divide by the number of tokens, which depends on the vocabulary).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt2_chinese.evaluate.choices import ChoiceSet, Item
from gpt2_chinese.run.optim import autocast

if TYPE_CHECKING:
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary


@dataclass
class Row:
    """One text, ready for the model: `first` is the place of the first id that counts; ids before it are context."""

    ids: list[int]
    first: int


def rows_of(item: Item, vocabulary: Vocabulary, context: int) -> tuple[list[Row], bool]:
    """A row for each answer, and whether the texts were cut to the model's context.

    A text that is too long loses its beginning, as much for all answers of an item. If what counts is too long by itself,
    it loses its end.
    """
    prompt = vocabulary.encode_prompt(item.before)
    texts = [[*vocabulary.encode_prompt(item.before + option + item.after), vocabulary.end_id] for option in item.options]
    common = next((place for place, ids in enumerate(zip(prompt, *texts, strict=False)) if len(set(ids)) > 1),
                  min(map(len, (prompt, *texts))))  # fmt: skip
    longest = min(max(len(ids) - common for ids in texts), context - 1)
    begin = max(0, common - (context - longest))
    rows = [Row([*ids[begin:common], *ids[common : common + longest]], common - begin) for ids in texts]
    return rows, begin > 0 or any(len(ids) - common > longest for ids in texts)


@torch.no_grad()
def sums(model: Any, rows: list[Row], precision: str, device: torch.device | str) -> list[float]:
    """The sum of log p of the ids that count of each row, in nats; rows are padded at the end, which changes nothing."""
    device = torch.device(device)
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    counted = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        counted[number, row.first : len(row.ids)] = True
    with autocast(device, precision):
        logits: Tensor = model(ids[:, :-1].to(device))
    chosen = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None].to(device)).squeeze(2).cpu().double()
    return torch.where(counted[:, 1:], chosen, 0.0).sum(1).tolist()


def answer_set(
    model: Any, vocabulary: Vocabulary, found: ChoiceSet, batch_size: int = 8, precision: str = "fp32",
    device: torch.device | str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Answers all items of a set.

    Args:
        model: in evaluation mode; logits (b, T, V) for ids (b, T).
        vocabulary: its vocabulary.
        found: the set.
        batch_size: texts at once.
        precision, device: of the matrix products.

    Returns:
        form, items, skipped, cut (items longer than the model's context), chance (accuracy by guessing), accuracy (by the
        sum), accuracy_per_character, standard_error (of the first accuracy, if the items are a random draw), scores (for
        each item where, the right answer, and the sum of each answer in nats).
    """
    items, cut = [], 0
    for item in found.items:
        rows, was_cut = rows_of(item, vocabulary, model.config.n_positions)
        items.append(rows)
        cut += was_cut
    flat = [row for rows in items for row in rows]
    order = sorted(range(len(flat)), key=lambda number: len(flat[number].ids))  # rows of like length need little padding
    scores = [0.0] * len(flat)
    for start in range(0, len(flat), batch_size):
        chosen = order[start : start + batch_size]
        for number, value in zip(chosen, sums(model, [flat[n] for n in chosen], precision, device), strict=True):
            scores[number] = value
    right = right_per_character = 0
    details, place = [], 0
    for item in found.items:
        own = scores[place : place + len(item.options)]
        place += len(item.options)
        each = [score / len(option + item.after) for score, option in zip(own, item.options, strict=True)]
        right += own.index(max(own)) == item.answer
        right_per_character += each.index(max(each)) == item.answer
        details.append({"where": item.where, "answer": item.answer, "scores": own})
    number = len(found.items)
    accuracy = right / number
    return {
        "form": found.form, "items": number, "skipped": found.skipped, "cut": cut,
        "chance": sum(1 / len(item.options) for item in found.items) / number, "accuracy": accuracy,
        "accuracy_per_character": right_per_character / number,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / number), "scores": details,
    }  # fmt: skip
