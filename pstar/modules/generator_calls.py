"""How a model sets random generators, recorded so that the lazy start sets them between the same draws.

While a model is recorded nothing is drawn. Nothing reports a seed either: each operation that will draw leaves a mark in its
generator, a seed that no program gives. If the mark is gone at the next look, the program has set the generator, and its
state is what replay must set. A state that the program reads itself (torch.get_rng_state, fork_rng) is not the one that it
would read in a plain start: replay reads it anew at the same place, and sets that one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch

from pstar.errors import StateError

FIRST_MARK = 7_000_000_000_000_000
"""Programs give smaller seeds."""


class GeneratorCalls:
    """In force inside the with statement; afterwards all generators are as before.

    Args:
        add: is given, for each change of a generator, a function that makes it again.
    """

    def __init__(self, add: Callable[[Callable[[], object]], None]):
        self._add = add
        self._get, self._set = torch.random.get_rng_state, torch.random.set_rng_state
        self._known: dict[int, torch.Generator] = {}             # its address -> one of the objects that torch makes of it
        self._first: dict[torch.Generator, torch.Tensor] = {}    # each generator's state at first
        self._left: dict[torch.Generator, torch.Tensor] = {}     # and the one in which it was left
        self._marks: set[int] = set()
        self._read: dict[int, torch.Tensor] = {}                 # id -> a state that the program has read
        self._replayed: dict[int, torch.Tensor] = {}             # id -> what replay reads instead
        self._patches = ExitStack()

    def __enter__(self) -> GeneratorCalls:
        default = self._one_of(torch.default_generator)
        self._first[default] = self._left[default] = default.get_state()
        for place in (torch, torch.random):
            self._patches.enter_context(mock.patch.object(place, "get_rng_state", self._get_rng_state))
            self._patches.enter_context(mock.patch.object(place, "set_rng_state", self._set_rng_state))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for generator, state in self._first.items():
            generator.set_state(state)

    def draws(self, generator: torch.Generator | None) -> None:
        """An operation is about to draw from a generator; None: torch's default one. Raises StateError as `look` does."""
        generator = self._one_of(generator or torch.default_generator)
        self.look(generator)
        self._mark(generator)

    def look(self, *generators: torch.Generator) -> None:
        """Records what the program has set since the last look; without arguments in all generators.

        Raises StateError if that is a state in which we left a mark, read by a call that is not watched.
        """
        for generator in generators or tuple(self._left):
            state = generator.get_state()
            self._first.setdefault(generator, state)
            if generator not in self._left or not torch.equal(state, self._left[generator]):
                if generator.initial_seed() in self._marks:
                    raise StateError("it reads the state of a random generator, and sets it later")
                self._add(lambda generator=generator, state=state: generator.set_state(state))
                self._left[generator] = state

    def _one_of(self, generator: torch.Generator) -> torch.Generator:
        return self._known.setdefault(generator._cdata, generator)

    def _mark(self, generator: torch.Generator) -> None:
        self._marks.add(mark := FIRST_MARK + len(self._marks))
        self._left[generator] = generator.manual_seed(mark).get_state()

    def _get_rng_state(self) -> torch.Tensor:
        self.look(torch.default_generator)
        state = self._get()
        self._read[id(state)] = state
        self._add(lambda: self._replayed.update({id(state): self._get()}))
        return state

    def _set_rng_state(self, state: torch.Tensor) -> None:
        self._set(state)
        if self._read.get(number := id(state)) is state:
            self._add(lambda: self._set(self._replayed[number]))
            self._mark(torch.default_generator)
