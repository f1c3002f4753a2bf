"""The log of a rank's collective calls in a step: all ranks must make the same calls, in the same order."""

import zlib

import torch

from pstar.comm.collectives import Collectives
from pstar.errors import StateError


class CollectiveLog:
    """The gathers and reductions of units on this rank since the last check."""

    def __init__(self, collectives: Collectives, device: torch.device):
        self.collectives, self.device = collectives, device
        self._calls: list[int] = []    # u + 1 for a gather of unit u, -u - 1 for a reduction

    def gather(self, unit: int) -> None:
        """This rank is about to gather a unit."""
        self._calls.append(unit + 1)
        self.collectives.about(unit)

    def reduce(self, unit: int) -> None:
        """This rank is about to reduce a unit's gradients."""
        self._calls.append(-unit - 1)
        self.collectives.about(unit)

    def check(self) -> None:
        """Compares this rank's calls since the last check with those of all ranks; every rank calls it.

        Raises StateError on every rank, before any update, if they differ: gradients of different units were then added up.
        """
        calls, self._calls, ranks = self._calls, [], self.collectives.num_ranks
        if ranks == 1:
            return
        digest = zlib.crc32(repr(calls).encode())
        if len(set(self._from_all([digest, len(calls)]))) == 1:
            return
        longest = max(count for _, count in self._from_all([digest, len(calls)]))
        first, *others = self._from_all(calls + [0] * (longest - len(calls)))
        rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
        number = next(number for number in range(longest) if first[number] != other[number])
        raise StateError(f"the ranks use different parameters: collective {number + 1} of the step was "
                         f"{_call(first[number])} on rank 0 and {_call(other[number])} on rank {rank}; all must run "
                         "the same modules in the same order, but for gradients that are missing under "
                         "\"find_unused_parameters\": true with room near for all parameters")

    def _from_all(self, values: list[int]) -> list[tuple[int, ...]]:
        """Every rank's values, by rank."""
        rows = torch.zeros(self.collectives.num_ranks, len(values), dtype=torch.float64, device=self.device)
        rows[self.collectives.rank] = torch.tensor(values, dtype=torch.float64, device="cpu")
        return [tuple(map(int, row)) for row in self.collectives.sum(rows).tolist()]


def _call(number: int) -> str:
    """An entry of the log as text."""
    return f"{'a gather' if number > 0 else 'a reduction'} of unit {abs(number) - 1}" if number else "none"
