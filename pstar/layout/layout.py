"""Each parameter's chunk and offset: pure functions of numbers, no tensors.

A *chunk* is a flat run of elements, the unit of ownership and of copies (PatrickStar, section 6.1). With p ranks, p
consecutive chunks form a *communication group*: rank r owns chunk r of every group, and one collective gathers or reduces a
group (section 7). All offsets below are inside the group's flat space of p * chunk_elems elements:

    group 0                                       group 1
    | chunk 0 (rank 0)    | chunk 1 (rank 1)    | | chunk 2 (rank 0)    | chunk 3 (rank 1)    |
    | wte ........... pad | wpe h.0 h.1 .. pad  | | h.2 ............pad | h.3 ... ln_f    pad |

That is PatrickStar's ownership "whole". With the ownership "sharded" (ColossalAI's Gemini) every chunk is a separate group,
cut into p equal pieces, one a rank: a gathered group is then one chunk, not p, and a parameter may be split between ranks.

Parameters are packed in construction order, module by module. A module's parameters are never split over two chunks if they
fit into one ("module-atomic next-fit"). A parameter larger than a chunk gets a separate group, cut into p equal pieces: each
owner of a piece has a part of the parameter.

Frozen parameters are packed apart: groups are trained or *frozen*, and frozen groups come last. A frozen group holds
parameters only, without gradients and states. A model with frozen parameters trains few others (adapters): their chunks
shrink, because padding costs as many bytes there as a trained element. With frozen_bits the frozen matrices are in *coded*
groups, apart from frozen vectors (biases, norms), which are few and keep all their bits.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pstar.errors import ConfigError

# Matrix libraries may choose other kernels for other addresses, and so other roundings. So parameters begin at multiples of
# this, for any chunk size.
ALIGN_ELEMS = 32
"""In host memory: a parameter begins on a cache line (64 bytes in 16 bit, 128 in fp32)."""
GPU_ALIGN_ELEMS = 256
"""On a GPU: 512 bytes in 16 bit, as torch's allocator places separate tensors; cuBLAS's heuristics see up to 256 bytes."""

STATE_BLOCK = 2048
"""Elements that share the two scales of their 8-bit moments; kernels.QUANT_BLOCK. Blocks begin at a parameter's first
element, so they depend on no chunk size, placement or number of ranks."""

CODE_BLOCK = 64
"""Weights that share a scale in a coded group; kernels.CODE_BLOCK. Each parameter there begins with a block, and ranks share
it by whole blocks, so its codes depend on no chunk size and no number of ranks."""

OWNERSHIPS = ("whole", "sharded")
COMMUNICATIONS = ("group", "chunk")

TRIALS = 16
"""Smaller chunk sizes that are tried for the trained parameters of a model with frozen ones."""

# The cost of one more group, in elements of padding that one would give for it.
GROUP_COST_ELEMS = 16 * 1024
"""In host memory: the start of a collective and a copy, some 100 microseconds, at 0.6 GB/s between two processes."""
GPU_GROUP_COST_ELEMS = 256 * 1024
"""On a GPU, which computes a group's layers faster than Python starts its copies and its update: measured on an H200 with
0.77 billion parameters, near 25 %, 99 groups cost 1.3 times the step of 19. Padding takes memory, so the cost is far below
the elements that the link moves in this time (a millisecond, 25 million elements): models of some billions do not pay it."""
GPU_NEAR_GROUPS = 16
"""On a GPU near has room for so many groups at least, so that large groups do not make eviction coarse."""


class Packing(NamedTuple):
    """What the choice of a layout depends on besides the model: the kind of device."""

    align_elems: int = ALIGN_ELEMS
    """Parameters begin at multiples of it in their chunk."""
    group_cost_elems: int = GROUP_COST_ELEMS
    near_groups: int = 0
    """Near has room for the parameters of so many groups; 0: of two, one with its gradients."""


HOST_PACKING, GPU_PACKING = Packing(), Packing(GPU_ALIGN_ELEMS, GPU_GROUP_COST_ELEMS, GPU_NEAR_GROUPS)


@dataclass(frozen=True)
class ModuleSpec:
    """The parameters that one module owns directly, in order. A tied parameter is listed in the first module only."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    """(qualified name, number of elements) of each."""
    frozen: frozenset[str] = frozenset()
    """Names of those that are not trained."""
    matrices: frozenset[str] = frozenset()
    """Names of those with two dimensions or more."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the chunks."""

    name: str
    numel: int
    group: int
    offset: int
    """First element inside the group's flat space."""


@dataclass(frozen=True)
class Span:
    """The part of one parameter that is in one rank's piece of a group."""

    name: str
    piece_offset: int
    """First element inside the piece."""
    param_offset: int
    """First element inside the flattened parameter."""
    numel: int
    first_block: int = 0
    """Blocks of STATE_BLOCK elements of the piece's spans before this one."""

    @property
    def part(self) -> slice:
        """The span's elements in the piece."""
        return slice(self.piece_offset, self.piece_offset + self.numel)

    @property
    def blocks(self) -> slice:
        """The span's blocks among those of the piece."""
        return slice(self.first_block, self.first_block + num_blocks(self.numel))


@dataclass(frozen=True)
class Group:
    """Chunks that are gathered and reduced together: p pieces of equal size, one a rank (whole chunks, or parts of one)."""

    index: int
    piece_elems: int
    num_ranks: int
    slots: tuple[Slot, ...]
    frozen: bool = False
    """Whether it holds parameters only, which are never written."""
    coded: bool = False
    """Whether it is frozen, and in codes except near."""

    @property
    def elems(self) -> int:
        return self.piece_elems * self.num_ranks

    def spans(self, rank: int) -> list[Span]:
        """The parts of parameters inside rank's piece, in order of offset."""
        low, high = rank * self.piece_elems, (rank + 1) * self.piece_elems
        spans, blocks = [], 0
        for slot in self.slots:
            start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
            if start < stop:
                spans.append(Span(slot.name, start - low, start - slot.offset, stop - start, blocks))
                blocks = spans[-1].blocks.stop
        return spans

    @cached_property
    def piece_blocks(self) -> int:
        """Blocks of STATE_BLOCK elements, the last of a span perhaps shorter, of the piece that has most: all have as much
        room for their scales."""
        return max(spans[-1].blocks.stop if (spans := self.spans(rank)) else 0 for rank in range(self.num_ranks))


@dataclass(frozen=True)
class Unit:
    """The part of the layout that one collective moves: a whole group, or one rank's chunk of it."""

    index: int
    group: int
    owner: int | None
    """The rank that has the whole chunk; None for a group, of which each rank has a piece."""
    elems: int
    slots: tuple[Slot, ...]
    """Slots with offsets inside the unit."""

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The elements that are in no slot."""
        ends = [0, *(slot.offset + slot.numel for slot in self.slots)]
        begins = [*(slot.offset for slot in self.slots), self.elems]
        return tuple(slice(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin)


@dataclass(frozen=True)
class Layout:
    """Every parameter's place for a model, a chunk size and a number of ranks."""

    chunk_elems: int
    num_ranks: int
    groups: tuple[Group, ...]

    @property
    def trained(self) -> tuple[Group, ...]:
        """The groups that have gradients and optimizer states: groups[: len(trained)]."""
        return tuple(group for group in self.groups if not group.frozen)

    @property
    def frozen(self) -> tuple[Group, ...]:
        """The groups of frozen parameters, the last ones."""
        return tuple(group for group in self.groups if group.frozen)

    @property
    def slots(self) -> dict[str, Slot]:
        return {slot.name: slot for group in self.groups for slot in group.slots}

    def units(self, communication: str = "group") -> tuple[Unit, ...]:
        """The units of collectives: groups, or, with "chunk", single chunks. Empty chunks are left out.

        A group with parameters that are split between pieces (sharded, or larger than a chunk) is always one unit.
        """
        units: list[Unit] = []
        for group in self.groups:
            size = group.piece_elems
            cut = communication == "chunk" and group.num_ranks > 1 and all(
                slot.offset // size == (slot.offset + slot.numel - 1) // size for slot in group.slots)
            if not cut:
                units.append(Unit(len(units), group.index, None, group.elems, group.slots))
                continue
            for rank in range(group.num_ranks):
                own = [slot for slot in group.slots if slot.offset // size == rank]
                if own:
                    moved = tuple(replace(slot, offset=slot.offset - rank * size) for slot in own)
                    units.append(Unit(len(units), group.index, rank, size, moved))
        return tuple(units)

    @property
    def num_params(self) -> int:
        """M: elements of all parameters."""
        return sum(slot.numel for group in self.groups for slot in group.slots)

    @property
    def total_elems(self) -> int:
        """n_p * S: elements of all chunks of all ranks, padding included."""
        return sum(group.elems for group in self.groups)

    @property
    def elems_per_rank(self) -> int:
        return self.total_elems // self.num_ranks

    @property
    def trained_elems(self) -> int:
        """total_elems without frozen groups."""
        return sum(group.elems for group in self.trained)

    @property
    def utilisation(self) -> float:
        """u: the share of the chunks that holds parameters."""
        return self.num_params / self.total_elems


def align(elems: int, to: int = ALIGN_ELEMS) -> int:
    """The next multiple of `to`."""
    return -(-elems // to) * to


def num_blocks(numel: int) -> int:
    """Blocks of STATE_BLOCK elements, the last one perhaps shorter, of numel elements."""
    return -(-numel // STATE_BLOCK)


def make_layout(modules: Sequence[ModuleSpec], chunk_elems: int, num_ranks: int = 1, ownership: str = "whole",
                whole_blocks: bool = False, in_codes: bool = False, align_elems: int = ALIGN_ELEMS) -> Layout:
    """Packs the parameters of modules into chunks of chunk_elems elements, module-atomic next-fit.

    whole_blocks: a parameter that ranks share is cut between its blocks of STATE_BLOCK elements, for 8-bit states. With
        ownership sharded, a chunk is then a multiple of num_ranks * STATE_BLOCK elements.
    in_codes: frozen matrices are in coded groups.
    align_elems: parameters begin at multiples of it, ALIGN_ELEMS or GPU_ALIGN_ELEMS.

    Raises ConfigError for a chunk size below one, an unknown ownership, and a model without parameters.
    """
    if ownership not in OWNERSHIPS:
        raise ConfigError(f"ownership is {ownership!r}; choose one of {', '.join(OWNERSHIPS)}")
    if chunk_elems < 1:
        raise ConfigError(f"the chunk size is {chunk_elems} elements; give at least 1, or 'auto'")
    measured = _measure(modules, in_codes, align_elems)
    return _pack(measured, align(chunk_elems, align_elems), num_ranks, ownership, whole_blocks, align_elems)


Measured = list[tuple[list[tuple[str, int, int]], int, int]]
"""For each module with parameters: their (name, numel, aligned numel), and the sum and maximum of the aligned numels."""


def _measure(modules: Sequence[ModuleSpec], in_codes: bool, align_elems: int) -> tuple[Measured, Measured, Measured]:
    """The modules' trained parameters, their frozen ones, and those in codes."""
    measured: tuple[Measured, Measured, Measured] = ([], [], [])
    for module in modules:
        coded = module.frozen & module.matrices if in_codes else frozenset()
        parts: tuple[list[tuple[str, int, int]], ...] = ([], [], [])
        for name, numel in module.parameters:
            number = 2 if name in coded else int(name in module.frozen)
            parts[number].append((name, numel, align(numel, _code_cut(align_elems) if number == 2 else align_elems)))
        for part, own in zip(measured, parts, strict=True):
            if own:
                part.append((own, sum(size for _, _, size in own), max(size for _, _, size in own)))
    return measured


def _code_cut(align_elems: int) -> int:
    """Parameters in codes begin, and are cut, at multiples of it: whole blocks of codes, aligned."""
    return max(CODE_BLOCK, align_elems)


def _whole_pieces(chunk_elems: int, num_ranks: int, ownership: str, cut_at: int, align_elems: int) -> int:
    """The least chunk of chunk_elems elements or more that ranks share by multiples of cut_at, if cut_at asks for more
    than alignment."""
    return align(chunk_elems, num_ranks * cut_at) if ownership == "sharded" and cut_at != align_elems else chunk_elems


def _pack(measured: tuple[Measured, Measured, Measured], chunk_elems: int, num_ranks: int, ownership: str,
          whole_blocks: bool, align_elems: int) -> Layout:
    """make_layout of the result of _measure: a search measures once and packs many times."""
    trained, frozen, coded = measured
    cut_at = STATE_BLOCK if whole_blocks and num_ranks > 1 else align_elems
    chunk_elems = _whole_pieces(chunk_elems, num_ranks, ownership, cut_at, align_elems)
    if not frozen and not coded:
        groups = _pack_part(trained, chunk_elems, num_ranks, ownership, cut_at, align_elems)
    else:
        size = min(chunk_elems, sum(whole for _, whole, _ in coded or frozen))    # a larger chunk is padding
        parts = [_pack_tightly(trained, chunk_elems, num_ranks, ownership, cut_at, align_elems)]
        if coded:
            vectors = _pack_tightly(frozen, chunk_elems, num_ranks, ownership, align_elems, align_elems)
            cut_codes = _code_cut(align_elems)
            matrices = _pack_part(coded, align(size, cut_codes), num_ranks, ownership, cut_codes, align_elems)
            parts += [[replace(group, frozen=True) for group in vectors],
                      [replace(group, frozen=True, coded=True) for group in matrices]]
        else:
            groups = _pack_part(frozen, size, num_ranks, ownership, align_elems, align_elems)
            parts.append([replace(group, frozen=True) for group in groups])
        groups = [replace(group, index=index, slots=tuple(replace(slot, group=index) for slot in group.slots))
                  for index, group in enumerate(group for part in parts for group in part)]
    if not groups:
        raise ConfigError("the model has no parameters: there is nothing to put into chunks")
    return Layout(chunk_elems, num_ranks, tuple(groups))


def _pack_tightly(measured: Measured, chunk_elems: int, num_ranks: int, ownership: str, cut_at: int,
                  align_elems: int) -> list[Group]:
    """_pack_part for the few parameters of a model whose other ones are in other groups: about four groups, with the chunk
    size that wastes least. It makes fewer groups if their chunks would have less than GROUP_COST_ELEMS elements: each group
    costs as much time as so many elements. No chunk has more than chunk_elems elements."""
    whole = sum(size for _, size, _ in measured)
    quarter = whole // (4 * (num_ranks if ownership == "whole" else 1))
    most = min(chunk_elems, whole, align(max(quarter, GROUP_COST_ELEMS), align_elems))
    best = _pack_part(measured, most, num_ranks, ownership, cut_at, align_elems) if measured else []

    def elems(groups: Iterable[Group]) -> int:
        return sum(group.elems for group in groups)

    num_groups, least = len(best), align(-(-whole // (num_ranks * max(len(best), 1))), align_elems)
    for trial in range(TRIALS if least < most else 0):
        size = align(least + (most - least) * trial // TRIALS, align_elems)
        groups = _pack_part(measured, size, num_ranks, ownership, cut_at, align_elems)
        if len(groups) <= num_groups and elems(groups) < elems(best):
            best = groups
    return best


def _pack_part(measured: Measured, chunk_elems: int, num_ranks: int, ownership: str,
               cut_at: int, align_elems: int) -> list[Group]:
    """The groups of all trained, all frozen or all coded parameters. A parameter is cut between ranks at multiples of
    cut_at."""
    chunk_elems = _whole_pieces(chunk_elems, num_ranks, ownership, cut_at, align_elems)
    piece = chunk_elems // num_ranks if ownership == "sharded" else chunk_elems
    chunks: list[list[tuple[str, int, int]]] = []    # the ordinary chunks: name, numel, offset inside the chunk
    oversized: list[tuple[str, int]] = []            # parameters larger than a chunk
    fill = chunk_elems                               # "full", so that the first module opens the first chunk

    for own, whole, largest in measured:
        if largest > chunk_elems:
            oversized += [(name, numel) for name, numel, size in own if size > chunk_elems]
            own = [item for item in own if item[2] <= chunk_elems]
            whole = sum(size for _, _, size in own)
        if fill + whole > chunk_elems and whole <= chunk_elems and whole > 0:
            chunks.append([])              # the module fits into one chunk, but not into what is left of this one
            fill = 0
        for name, numel, size in own:
            if cut_at != align_elems and fill // piece != (fill + numel - 1) // piece:
                fill = align(fill, cut_at)    # a cut is a multiple of cut_at: it must be one counted from here as well
            if fill + size > chunk_elems:
                chunks.append([])
                fill = 0
            chunks[-1].append((name, numel, fill))
            fill += size

    groups: list[Group] = []

    def add_group(piece_elems: int, parts: list[tuple[int, list[tuple[str, int, int]]]]) -> None:
        """A group of one or more chunks: (first element in the group's flat space, content) of each."""
        index = len(groups)
        slots = [Slot(name, numel, index, start + offset) for start, own in parts for name, numel, offset in own]
        groups.append(Group(len(groups), piece_elems, num_ranks, tuple(slots)))

    for name, numel in oversized:
        add_group(align(-(-numel // num_ranks), cut_at), [(0, [(name, numel, 0)])])
    if ownership == "sharded":
        for chunk in chunks:
            add_group(align(-(-chunk_elems // num_ranks), align_elems), [(0, chunk)])
    else:
        for first in range(0, len(chunks), num_ranks):
            together = chunks[first : first + num_ranks]
            add_group(chunk_elems, [(position * chunk_elems, chunk) for position, chunk in enumerate(together)])
    return groups


def candidate_layouts(modules: Sequence[ModuleSpec], num_ranks: int = 1, max_elems: int | None = None,
                      ownership: str = "whole", num_candidates: int = 128, whole_blocks: bool = False,
                      in_codes: bool = False, align_elems: int = ALIGN_ELEMS) -> list[Layout]:
    """Layouts with chunk sizes up to max_elems: in geometric steps below the median module's size, in linear steps above.

    max_elems defaults to the whole model in one chunk a rank. Only packings are computed, no tensor is made.
    """
    params = [module.parameters for module in modules if module.parameters]
    sizes = sorted(sum(align(numel, align_elems) for _, numel in own) for own in params)
    if not sizes:
        raise ConfigError("the model has no parameters: there is nothing to put into chunks")
    high = align(-(-sum(sizes) // num_ranks) if max_elems is None else max(max_elems, 1), align_elems)
    middle = min(sizes[len(sizes) // 2], high)
    step = max(align((high - middle) // num_candidates, align_elems), align_elems)
    candidates = {high, *range(middle, high, step)}
    while middle > align_elems:
        middle = align(middle * 3 // 4, align_elems) if middle > 4 * align_elems else middle - align_elems
        candidates.add(middle)
    if ownership not in OWNERSHIPS:
        raise ConfigError(f"ownership is {ownership!r}; choose one of {', '.join(OWNERSHIPS)}")
    measured = _measure(modules, in_codes, align_elems)
    with _without_garbage_collection():
        layouts = [_pack(measured, size, num_ranks, ownership, whole_blocks, align_elems) for size in sorted(candidates)]
    return list({layout.chunk_elems: layout for layout in layouts}.values())    # with whole blocks sizes may be equal


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A search makes hundreds of thousands of objects without a cycle; the collector would visit them again and again, for
    more than half of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def least_waste(layouts: Sequence[Layout], fits: Callable[[Layout], bool] = lambda layout: True,
                group_cost_elems: int = GROUP_COST_ELEMS) -> Layout | None:
    """The layout of least cost: its elements, padding included, plus group_cost_elems for each group.
    Among layouts within half a per cent of it, the one with the largest chunks; None if no layout fits.

    fits: whether a layout may be chosen; called for as few layouts as possible.
    """
    cost = {layout.chunk_elems: layout.total_elems + group_cost_elems * len(layout.groups) for layout in layouts}
    cheapest = next(filter(fits, sorted(layouts, key=lambda layout: cost[layout.chunk_elems])), None)
    if cheapest is None:
        return None
    close = [layout for layout in layouts if cost[layout.chunk_elems] <= 1.005 * cost[cheapest.chunk_elems]]
    return next(filter(fits, sorted(close, key=lambda layout: -layout.chunk_elems)))
