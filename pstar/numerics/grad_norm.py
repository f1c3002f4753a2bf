"""The global norm of gradients whose pieces are on several ranks, with the same bits whatever the layout.

A sum of floating-point numbers depends on the order of its additions. Here the order is fixed for each parameter. Its
elements are squared in float64 and added in blocks of NORM_BLOCK, and the blocks' sums are added in one fixed order (see
pstar.kernels.squared_norms). The parameters' norms are added in the model's order, as clip_grad_norm_ does. The layout only
decides which rank computes a block's sum:

    parameter   | block 0 | block 1 | block 2 | block 3 | ..      rank 0 sums blocks 0 and 1, rank 1 sums block 3, and the
    rank 0      |xxxxxxxxxxxxxxxxxxxxxxxx|                        ranks exchange the elements of block 2: each element is
    rank 1                               |xxxxxxxxxxxxxxxx ..     written by one rank, and 0 on the others

Block sums and these elements are exchanged by a sum over the ranks in which all terms but one are 0, which is exact.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from pstar.comm.collectives import Collectives
from pstar.kernels import NORM_BLOCK, norm_blocks, squared_norms, store_squared, sum_blocks
from pstar.layout.layout import Layout, Span


def parameter_norms(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each gradient, fp32, (N,), on the CPU: the oracle of ParameterNorms, for plain tensors."""
    return _root(torch.cat([squared_norms([grad.contiguous().view(-1)]).cpu() for grad in grads]))


def global_norm(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, an fp32 scalar on the CPU; infinite or NaN if an element is not finite."""
    return torch.linalg.vector_norm(parameter_norms(grads))


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ with the engine's norm: scales gradients in place, returns the norm before clipping."""
    grads = [param.grad for param in parameters if param.grad is not None]
    total = global_norm(grads)
    scale = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    for grad in grads:
        grad.mul_(scale)
    return total


def _root(squares: torch.Tensor) -> torch.Tensor:
    return squares.sqrt().to(torch.float32)


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, (N,), in host memory and float64, which holds fp32 exactly. Those of a device come in one transfer: each
    transfer waits until the device has done all its work."""
    elsewhere = [tensor.double() for tensor in tensors if tensor.device.type != "cpu"]
    if not elsewhere:
        return tensors
    arrived = iter(torch.cat(elsewhere).cpu().split([len(tensor) for tensor in elsewhere]))
    return [tensor if tensor.device.type == "cpu" else next(arrived) for tensor in tensors]


@dataclass
class _Found:
    """This rank's contribution of one group."""

    numbers: list[int] = field(default_factory=list)
    """Numbers of the parameters that are whole on this rank."""
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))
    """Their sums of squares, (len(numbers),), float64."""
    blocks: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(number of the first block, sums of squares, float64) of runs of blocks that are whole on this rank."""
    rows: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    """(row, first element in it, elements, fp32) of blocks that are split between ranks."""

    def parts(self) -> list[torch.Tensor]:
        """All these tensors, on the devices of the gradients."""
        return [self.squares, *(sums for _, sums in self.blocks), *(elements for _, _, elements in self.rows)]


class ParameterNorms:
    """The norm of every parameter's gradient, from the pieces that the ranks hold.

    `take` reads a group as soon as its gradients are complete, in near and still in a cache: at the step no gradient is read
    again, whatever tier it is in then. With one process a kernel computes a gradient's sum of squares even earlier, while it
    copies the gradient into its chunk (`store`).

    Args:
        layout: the part of each parameter on each rank.
        names: the layout's parameters in the model's order.
        collectives: sum over the ranks.
        device: the device of tensors for collectives.
    """

    def __init__(self, layout: Layout, names: list[str], collectives: Collectives, device: torch.device):
        self._names, self._collectives, self._device = names, collectives, device
        self._number = {name: index for index, name in enumerate(names)}
        self._spans = {group.index: group.spans(collectives.piece) for group in layout.groups}
        self._numel = {name: slot.numel for name, slot in layout.slots.items()}
        self._first_block: dict[str, int] = {}               # of each parameter that is split between ranks
        self._shared: dict[tuple[str, int], int] = {}        # (name, block split between ranks) -> its row in `rows`
        self._num_blocks = 0
        self._found: dict[int, _Found] = {}
        self._stored: dict[str, float] = {}                  # sums of squares that `store` has computed
        for group in layout.trained:
            for rank in range(group.num_ranks):
                for span in group.spans(rank):
                    if span.param_offset == 0 and span.numel < self._numel[span.name]:
                        self._first_block[span.name] = self._num_blocks
                        self._num_blocks += -(-self._numel[span.name] // NORM_BLOCK)
                    if span.param_offset % NORM_BLOCK:       # a boundary between ranks inside a block
                        self._shared.setdefault((span.name, span.param_offset // NORM_BLOCK), len(self._shared))

    def store(self, name: str, place: torch.Tensor, grad: torch.Tensor, add: bool, num_threads: int | None = None) -> None:
        """Copies a parameter's gradient into its slot in a chunk, or adds it to the slot; both of the same shape.

        If the kernel also sums the squares, the next `take` of the group need not read this gradient.
        """
        one = self._collectives.num_ranks == 1    # with more, only the mean over the ranks is squared
        square = store_squared(place, grad, add, num_threads, None if one else "torch")
        if square is not None:
            self._stored[name] = square
        else:
            self._stored.pop(name, None)

    def has_stored(self, group: int, arrived: Callable[[str], bool]) -> bool:
        """Whether `store` has summed the squares of all gradients of a group: `take` then needs none of its bytes."""
        return self._collectives.num_ranks == 1 and all(
            span.name in self._stored for span in self._spans[group] if arrived(span.name))

    def square(self, name: str, grad: torch.Tensor) -> None:
        """Sums a whole gradient's squares now, (N,): on the CPU, where it is still in a cache. With one rank."""
        if grad.device.type == "cpu":    # a GPU sums those of a group in one launch, in `take`
            self._stored[name] = float(squared_norms([grad]))

    def take(self, group: int, piece: torch.Tensor | None, arrived: Callable[[str], bool]) -> None:
        """Sums the squares of this rank's piece of a group's gradients; keeps no view. A second call replaces the first.

        piece: this rank's piece of the reduced gradients, (S,), fp32, bf16 or fp16, on any device; does not wait for a GPU.
            None only if has_stored.
        arrived: whether a parameter got a gradient on this rank.
        """
        self.take_parts(group, lambda span: piece[span.part], arrived)

    def take_parts(self, group: int, part_of: Callable[[Span], torch.Tensor], arrived: Callable[[str], bool]) -> None:
        """As `take`, of gradients in several tensors: part_of(span) is the reduced gradient of a span, (N,)."""
        found = self._found[group] = _Found()
        parts, numbers, known = [], [], []
        for span in self._spans[group]:
            if self._collectives.num_ranks == 1 and not arrived(span.name):
                continue                                     # its slot was never written; with several ranks it is 0
            if span.name in self._first_block:
                self._take_part(span, part_of(span), found)
            elif span.name in self._stored:
                found.numbers.append(self._number[span.name])
                known.append(self._stored[span.name])
            else:
                numbers.append(self._number[span.name])
                parts.append(part_of(span))
        found.numbers += numbers
        found.squares = torch.tensor(known, dtype=torch.float64, device="cpu")
        if parts:
            squares = squared_norms(parts)
            found.squares = torch.cat([found.squares, squares]) if known else squares

    def forget(self) -> None:
        """Forgets all sums of squares."""
        self._found.clear()
        self._stored.clear()

    def taken(self, group: int) -> bool:
        return group in self._found

    def __call__(self, arrived: Callable[[str], bool]) -> tuple[torch.Tensor, set[str]]:
        """(fp32 norms, (N,), on the CPU, of the parameters that have a gradient on some rank, in order; their names).

        Every group that has a gradient on some rank must have been taken on all ranks; its sums are then forgotten.
        arrived: whether a parameter got a gradient on this rank.
        """
        num = len(self._names)
        values = torch.zeros(2 * num + self._num_blocks, dtype=torch.float64, device="cpu")
        squares, present, blocks = values[:num], values[num : 2 * num], values[2 * num :]
        rows = torch.zeros(len(self._shared), NORM_BLOCK, dtype=torch.float32, device="cpu")
        # Replicas of other nodes have the same gradients: only the first node's count, so that all nodes get its bits.
        found = [] if self._collectives.replica else list(self._found.values())
        on_host = iter(_on_host([part for each in found for part in each.parts()]))
        for each in found:
            squares[each.numbers] = next(on_host)
            for first, sums in each.blocks:
                blocks[first : first + len(sums)] = next(on_host)
            for row, low, elements in each.rows:
                rows[row, low : low + len(elements)] = next(on_host)
        self.forget()
        present[[self._number[name] for name in self._names if arrived(name)]] = 1.0
        values = self._collectives.sum(values.to(self._device)).cpu()
        squares, present, blocks = values[:num], values[num : 2 * num] > 0, values[2 * num :]
        if self._shared:
            rows = self._collectives.sum(rows.to(self._device).view(-1)).cpu().view(-1, NORM_BLOCK)
        for (name, block), row in self._shared.items():
            blocks[self._first_block[name] + block] = norm_blocks(rows[row])[0]
        for name, first in self._first_block.items():
            squares[self._number[name]] = sum_blocks(blocks[first : first - (-self._numel[name] // NORM_BLOCK)])
        used = {name for name, has_one in zip(self._names, present.tolist(), strict=True) if has_one}
        return _root(squares[present]), used

    def _take_part(self, span: Span, part: torch.Tensor, found: _Found) -> None:
        """Takes a part of a parameter: sums its whole blocks, and copies the elements of split blocks for their rows."""
        start, stop, end = span.param_offset, span.param_offset + span.numel, self._numel[span.name]
        first = -(-start // NORM_BLOCK)
        last = -(-stop // NORM_BLOCK) if stop == end else stop // NORM_BLOCK
        if first < last:
            inside = part[first * NORM_BLOCK - start : min(last * NORM_BLOCK, end) - start]
            found.blocks.append((self._first_block[span.name] + first, norm_blocks(inside)))
        for block in {start // NORM_BLOCK, (stop - 1) // NORM_BLOCK}:
            row = self._shared.get((span.name, block))
            if row is not None:
                low, high = max(start, block * NORM_BLOCK), min(stop, (block + 1) * NORM_BLOCK)
                elements = part[low - start : high - start].to(torch.float32, copy=True)
                found.rows.append((row, low - block * NORM_BLOCK, elements))
