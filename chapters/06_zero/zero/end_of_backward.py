"""Reports the end of a backward pass to ZeRO's stages 2 and 3: torch has no public hook for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def call_at_end_of_backward(output: Tensor, callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward pass that begins at `output` has ended and every gradient is in its `.grad`.

    Parameters outside the blocks (embeddings, the last norm) have no module whose backward hook runs after their gradients.
    The tied embedding's gradient is the last of the pass; the embedding's hook runs earlier, because ids have no gradient. A
    parameter that the pass does not use gets no gradient. Only the end of the pass proves that no gradient will follow.

    At the end of a pass, autograd's engine calls the functions queued during that pass. A function can be queued only while
    the pass runs, so the hook on `output`, which runs first, queues it.

    queue_callback is private (`_execution_engine`); FSDP2 uses it for the same purpose. The public register_multi_grad_hook
    cannot replace it: it runs before the gradients are added to `.grad`.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    output.register_hook(lambda _: queue(callback))
