"""Contenders work in turns, in an order that rotates from round to round: other work on the machine affects all equally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Contender = TypeVar("Contender")


def in_turns(contenders: Sequence[Contender], rounds: int) -> Iterator[Contender]:
    """Each contender once a round; round k begins with contender k modulo their number."""
    for number in range(rounds):
        start = number % len(contenders)
        yield from contenders[start:]
        yield from contenders[:start]
