"""Checks every few steps, by a hash, that all ranks hold the same weights, bit for bit; cheap enough to leave on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.errors import RunError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hashes(model: nn.Module) -> tuple[list[str], Tensor]:
    """Names of all parameters and buffers, and one int64 each, (n,): the sum of its elements' bits as integers.

    Any single changed bit changes the sum. It reads the weights once and makes no copy of them.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = [t.detach().to_local() if hasattr(t, "to_local") else t.detach() for t in tensors.values()]  # DTensor
    sums = [t.view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in own]
    return list(tensors), torch.stack(sums)


def check_in_sync(model: nn.Module, ranks: Ranks, step: int, every: int) -> None:
    """Compares the weights of all ranks with rank 0's, at every `every`-th step (0: never). All ranks call together.

    Raises:
        RunError: on all ranks alike, one line that names the ranks, and the first tensor, that differ.
    """
    if ranks.num_ranks == 1 or every == 0 or step % every:
        return
    names, own = hashes(model)
    table = own.new_zeros(ranks.num_ranks, len(names))
    table[ranks.rank] = own
    table = ranks.sum(table).cpu()  # (ranks, tensors): each rank filled in its own row
    wrong = (table != table[0]).any(1).nonzero().flatten().tolist()
    if wrong:
        name = names[(table[wrong[0]] != table[0]).nonzero()[0].item()]
        who = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
        raise RunError(f"after step {step} the weights of {who} are not those of rank 0, first in {name}")
