"""The Adam updates of a group of chunks: runs of equal hyper-parameters, and the job that computes them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from pstar.chunks import Chunks
from pstar.chunks.unit import Bytes
from pstar.kernels import AdamOptions, adam_steps
from pstar.layout.layout import Group
from pstar.memory.block import Key
from pstar.numerics.precision import MASTER, PARAM, Precision


class Run(NamedTuple):
    """Neighbours of a rank's piece that are updated with equal numbers."""

    part: slice
    """Elements of the piece."""
    blocks: slice
    """Blocks of 8-bit states; empty with 32 bits."""
    step: int
    """Number of the update, from 1."""
    options: AdamOptions


class GroupUpdates:
    """Updates of this rank's pieces.

    Args:
        chunks: which parameters are in which piece, and their gradients.
        precision: the states of a parameter.
    """

    def __init__(self, chunks: Chunks, precision: Precision):
        self.precision, self._chunks = precision, chunks
        self._parameters, self._units = chunks.parameters, chunks.units.of_group
        self._spans = {group.index: group.spans(chunks.collectives.piece) for group in chunks.layout.groups}

    def runs(self, group: Group, used: Collection[str], options: Mapping[str, AdamOptions],
             steps: Mapping[str, int]) -> list[Run]:
        """The runs of the group's parameters in `used`: neighbours with equal numbers and options are one run. Each
        parameter is a run if its gradient is a tensor of its own, and with 8-bit states, because blocks begin with it."""
        return list(self._runs(group, used, options, steps))

    def _runs(self, group: Group, used: Collection[str], options: Mapping[str, AdamOptions],
              steps: Mapping[str, int]) -> Iterator[Run]:
        begin = end = step = 0
        option: AdamOptions | None = None
        no_blocks = slice(0, 0)
        if self.precision.state_bits == 8 or self._chunks.gradients.apart:
            for span in self._spans[group.index]:
                if span.name in used:
                    yield Run(span.part, span.blocks, steps[span.name], options[span.name])
            return
        for span in self._spans[group.index]:
            if span.name not in used:
                continue
            if span.piece_offset != end or steps[span.name] != step or options[span.name] != option:
                if begin < end:
                    yield Run(slice(begin, end), no_blocks, step, option)
                begin, step, option = span.piece_offset, steps[span.name], options[span.name]
            end = span.piece_offset + span.numel
        if begin < end:
            yield Run(slice(begin, end), no_blocks, step, option)

    def job(self, group: Group, buffers: Mapping[Key, torch.Tensor], runs: list[Run], grad_scale: float,
            num_threads: int | None = None) -> Callable[[], None]:
        """The job that updates the runs. buffers: of the group's gradients, parameters and states.

        num_threads: of the CPU kernel; None: torch.get_num_threads().
        """
        for unit in self._units[group.index]:
            updated = None if MASTER in self.precision.states else buffers[PARAM, group.index].data_ptr()
            if unit.bytes is Bytes.BOUND and updated != unit.address:    # the update overwrites near, or near is dropped
                self._parameters.check_read_only(unit)
            self._parameters.read_only.forget(unit)
        mine = {kind: buffers[kind, group.index] for kind in self.precision.kinds}
        updates = [self.precision.update(self._chunks.gradients.part(group.index, run.part, buffers),
                                         self.precision.part_of(mine, run.part, run.blocks), step=run.step,
                                         options=run.options, grad_scale=grad_scale) for run in runs]
        return lambda: adam_steps(updates, num_threads=num_threads)
