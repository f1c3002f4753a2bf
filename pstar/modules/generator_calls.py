"""Calls by which a model sets a random generator, recorded so that the lazy start makes them between the same draws.

While a model is recorded nothing is drawn. So a state that the program reads there (torch.get_rng_state, fork_rng) is not
the one that it would read in a plain start. It is a mark: replay reads the state when it comes to the mark, and sets that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch

from pstar.errors import StateError

NOBODYS_SEED = 7_000_000_000_000_000
"""The first of the seeds that mark a generator: programs give smaller ones."""


class GeneratorCalls:
    """In force inside the with statement; afterwards all generators are as before.

    Args:
        add: is given, for each call, a function that makes it again.
    """

    def __init__(self, add: Callable[[Callable[[], object]], None]):
        self._add = add
        self._get, self._set, self._seed = torch.random.get_rng_state, torch.random.set_rng_state, torch.random.manual_seed
        self._marks: dict[int, torch.Tensor] = {}     # id -> a state that the program has read
        self._states: dict[int, torch.Tensor] = {}    # the same of replay
        self._first: dict[torch.Generator, torch.Tensor] = {}    # generators of the program's own: the state at first
        self._left: dict[torch.Generator, torch.Tensor] = {}     # and the one that `uses` left
        self._seeds: set[int] = set()
        self._patches = ExitStack()

    def __enter__(self) -> GeneratorCalls:
        self._begin = self._now = self._get()
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "seed"):
            for place in (torch, torch.random):
                self._patches.enter_context(mock.patch.object(place, name, getattr(self, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._set(self._begin)
        for generator, state in self._first.items():
            generator.set_state(state)

    def get_rng_state(self) -> torch.Tensor:
        state = self._get()
        self._marks[id(state)] = state
        self._add(lambda: self._states.update({id(state): self._get()}))
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._set(state)
        self._now = self._get()
        number, copy = id(state), self._get()
        known = self._marks.get(number) is state
        self._add(lambda: self._set(self._states[number] if known else copy))

    def manual_seed(self, seed: int) -> torch.Generator:
        generator = self._seed(seed)
        self._now = self._get()
        self._add(lambda: self._seed(seed))
        return generator

    def seed(self) -> int:
        """torch.seed: a number that nobody knows before."""
        number = torch.default_generator.seed()
        self.manual_seed(number)
        return number

    def uses(self, generator: torch.Generator) -> None:
        """An operation is about to draw from a generator of the program's own. Nothing reports that the program seeds it, so
        each call leaves a mark in it, a seed. Raises StateError if the program has read a mark and sets it again."""
        state, left = generator.get_state(), self._left.get(generator)
        if left is None:
            self._first[generator] = state
        if left is None or not torch.equal(state, left):
            if generator.initial_seed() in self._seeds:
                raise StateError("it reads the state of a generator of its own, and sets it later")
            self._add(lambda: generator.set_state(state))
        self._seeds.add(seed := NOBODYS_SEED + len(self._seeds))
        self._left[generator] = generator.manual_seed(seed).get_state()

    def check(self) -> None:
        """Raises StateError if the model set torch's generator by a call that is not recorded."""
        if not torch.equal(self._get(), self._now):
            raise StateError("it sets torch's default generator other than by torch.manual_seed and torch.set_rng_state")
