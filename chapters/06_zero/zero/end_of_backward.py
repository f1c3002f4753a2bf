"""The end of a backward pass, which ZeRO's stages 2 and 3 need to know: torch has no public hook for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def call_at_end_of_backward(output: Tensor, callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward pass that begins at `output` is over and every gradient is in its `.grad`.

    What lies in no block (embeddings, the last norm) has no module whose backward ends after all of its gradients: the tied
    embedding's comes last of all, and an embedding's own hook runs before it, because ids have no gradient to wait for. A
    parameter that the pass does not use gets none. So only the end of the pass says that no gradient will follow.

    Autograd's engine calls what was queued during a pass when the pass ends. The queue belongs to that pass: it must be
    running when a function is put there, hence the hook on `output`, which runs first.

    The function is private (`_execution_engine`), and FSDP2 uses it for the same purpose. The public
    register_multi_grad_hook is no replacement: it runs before the gradients are added to `.grad`.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    output.register_hook(lambda _: queue(callback))
