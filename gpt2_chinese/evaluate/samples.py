"""How varied generated texts are, and how much each repeats itself.

A unit is one character of Chinese, or a run of Latin letters or digits; blanks are none. distinct-n is the number of
different n-grams of units in all texts, divided by the number of all n-grams (Li et al. 2016 divide by the number of units):
near 1 if nothing comes twice. repetition-n is the share of n-grams of a text that it had before, the mean over texts
(Welleck et al. 2020, seq-rep-n): 0 if no n-gram comes twice in a text. Both depend on the length, so compare texts of one
--length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

UNIT = re.compile(r"[A-Za-zÀ-ɏ]+|\d+|[^\s]")
DISTINCT, REPETITION = (1, 2, 3), 4


def units(text: str) -> list[str]:
    """The units of a text."""
    return UNIT.findall(text)


def ngrams(parts: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All n-grams in order; none if there are fewer than n parts."""
    return [tuple(parts[place : place + n]) for place in range(len(parts) - n + 1)]


def variety(texts: Sequence[str]) -> dict[str, Any]:
    """texts, units, distinct_1, distinct_2, distinct_3 and repetition_4; None where no text is long enough."""
    split = [units(text) for text in texts]
    found: dict[str, Any] = {"texts": len(texts), "units": sum(map(len, split))}
    for n in DISTINCT:
        every = [gram for parts in split for gram in ngrams(parts, n)]
        found[f"distinct_{n}"] = len(set(every)) / len(every) if every else None
    shares = [1 - len(set(grams)) / len(grams) for parts in split if (grams := ngrams(parts, REPETITION))]
    found[f"repetition_{REPETITION}"] = sum(shares) / len(shares) if shares else None
    return found
