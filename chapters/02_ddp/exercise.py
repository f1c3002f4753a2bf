"""Exercise 02: the ring all-reduce, and the buckets that it carries. Two functions, about 30 lines in all.

    bash chapters/02_ddp/exercise.sh           # all of it
    bash chapters/02_ddp/exercise.sh -k ring   # one function: buckets, ring

The grader runs the ring on 1, 2, 3 and 4 real processes, with lengths that are not divisible by their number. It compares
the sums, requires the same bits on all ranks, and checks the number of bytes that each rank returns. It stops a ring that
waits for ever after ten seconds, and prints the line at which each rank waited.

When you have tried: compare with `cut_into_buckets` in ddp.py and `ring_all_reduce` in ring.py, in this folder.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (yours to use)
import torch.distributed as dist  # noqa: F401  (yours to use)
from torch import Tensor, nn


def cut_into_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in the order in which backward makes their gradients, in buckets of at most `bucket_bytes`.

    Backward begins at the end of the model, so the last parameter comes first. A bucket takes parameters until the next one
    does not fit; then it is closed for good. A parameter larger than `bucket_bytes` gets a bucket to itself.

    Args:
        parameters: in the order of forward, all of one type and on one device.
        bucket_bytes: may be 0: every parameter has its own bucket.

    Hint: parameter.nbytes
    """
    raise NotImplementedError("cut_into_buckets is yours to write: from the last parameter on, while they fit")


def ring_all_reduce(flat: Tensor, group: Any = None) -> int:
    """Sums a tensor over the ranks, in place; each rank only sends to the next rank and receives from the previous one.

    Cut the tensor into p chunks (flat.tensor_split(p) gives views, and some may be empty). Then go round the ring twice:

        reduce-scatter, p - 1 turns     send a chunk, ADD the chunk you receive to your own
        all-gather,     p - 1 turns     send a chunk, which is a complete sum by now, COPY the chunk you receive

    In the first turn rank r sends chunk r. For p = 3 ranks 0, 1, 2 send these chunks in each turn; x* is a complete sum:

        reduce-scatter   a  b  c    then   c  a  b        all-gather   b* c* a*   then   a* b* c*

    Args:
        flat: (n,), contiguous; n need not divide by the number of ranks, and may be smaller.
        group: of torch.distributed; None is the default one.

    Returns:
        the bytes of all chunks that this rank has sent: about 2 (p - 1) / p of flat.nbytes.

    Hint: the chunk's number in each turn is arithmetic modulo p; write it down for p = 3 first. If every rank first sends
    and then receives, all wait for each other: dist.batch_isend_irecv([dist.P2POp(dist.isend, ...), ...]) starts both at
    once. Receive into a buffer when you have to add.
    """
    raise NotImplementedError("ring_all_reduce is yours to write: p - 1 turns that add, then p - 1 turns that copy")
