"""Contenders work in turns, in an order that rotates from round to round: whatever else the machine does hits them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Contender = TypeVar("Contender")


def in_turns(contenders: Sequence[Contender], rounds: int) -> Iterator[Contender]:
    """Each of them once a round; round k begins with number k, counted around."""
    for number in range(rounds):
        start = number % len(contenders)
        yield from contenders[start:]
        yield from contenders[:start]
