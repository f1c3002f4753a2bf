"""Chooses the next token from the logits, by parameters that the user gives:

    logits -> repetition penalty -> forbidden ids out -> greedy: the largest
                                                      -> temperature -> top-k -> top-p -> drawn

This file does not import torch at its top: a wrong number is reported before torch is loaded.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2_chinese.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Sampling:
    """How to choose. The defaults draw from the model's own distribution; greedy ignores the first three."""

    temperature: float = 1.0  # below 1 sharpens, above 1 flattens the distribution
    top_k: int = 0  # draw among the k likeliest ids, 0 for all
    top_p: float = 1.0  # draw among the fewest ids whose probabilities reach p, 1 for all
    repetition_penalty: float = 1.0  # above 1 makes ids that are in the row already less likely
    greedy: bool = False  # take the likeliest id

    def check(self) -> None:
        """Raises UserError for a number out of range, with the name of its flag."""
        for flag, value, good, wanted in (
            ("--temperature", self.temperature, 0 < self.temperature < math.inf, "above 0"),
            ("--top-k", self.top_k, self.top_k >= 0, "at least 0"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("--repetition-penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0"),
        ):
            if not good:
                raise UserError(f"{flag} {value} is out of range: it must be {wanted}")

    def choose(
        self, logits: Tensor, seen: Tensor, forbidden: tuple[int, ...], generators: list[torch.Generator]
    ) -> Tensor:
        """The next id of each row, (B,) int64.

        Args:
            logits: (B, V) float32.
            seen: (B, V) bool, the ids that are in the row already, for the repetition penalty.
            forbidden: ids never chosen.
            generators: one a row, on the CPU; not used when greedy.
        """
        logits = penalise_repetition(logits, seen, self.repetition_penalty)
        if forbidden:
            logits = logits.clone()
            logits[:, list(forbidden)] = -math.inf
        if self.greedy:
            return logits.argmax(-1)
        logits = keep_top_p(keep_top_k(logits / self.temperature, self.top_k), self.top_p)
        return draw(logits.softmax(-1), generators)


def generator_of(seed: int, prompt: int, sample: int) -> torch.Generator:
    """The random generator of one text: it depends on these three numbers only, not on the batch."""
    import torch

    digest = hashlib.sha256(f"{seed} {prompt} {sample}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def draw(probabilities: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Draws an id of each row (B, V) by its probabilities, (B,): an exponential race, the largest p / Exp(1) wins.

    A rounding in the last bit of p matters in a race only where two ids nearly tie. In a cumulated sum it would shift all
    later ids. So a text does not depend on the rest of its batch, nor on the cache.
    """
    import torch

    width = probabilities.shape[1]
    distances = torch.stack([torch.empty(width).exponential_(generator=generator) for generator in generators])
    return (probabilities / distances.to(probabilities.device)).argmax(-1)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits (B, V) of the ids that are seen, (B, V) bool."""
    if penalty == 1.0:
        return logits
    return (logits / penalty).where(logits > 0, logits * penalty).where(seen, logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Sets all but the k largest logits of each row to -inf; 0 keeps all."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest ids of each row whose probabilities add up to at least p, always one; 1 keeps all."""
    if p >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # of all likelier ids: an id is kept while this is below p
    drop = before >= p
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -math.inf)
