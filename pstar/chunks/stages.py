"""The stage of a training step: counts its micro-steps, and refuses an update before all gradients are there."""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pstar.chunks.borrowed import Lender
from pstar.chunks.step import Chunks
from pstar.errors import StateError
from pstar.profile.recording import Profile


class Stages:
    """The stages of a step: forward and backward of each micro-step, then the update. The engine and the optimizer call
    `begin` for each stage.

    Args:
        num_micro_steps: gradient_accumulation_steps.
        chunks: the parameters and gradients.
        lender: lends parameters between a training forward and the end of its backward.
        profile: records each stage, and is saved in `path` after each step; None: no profile.
    """

    def __init__(self, num_micro_steps: int, chunks: Chunks, lender: Lender, profile: Profile | None, path: Path | None):
        self.num_micro_steps, self.chunks, self.lender = num_micro_steps, chunks, lender
        self._profile, self._path = profile, path
        self._done, self._had_backward = 0, False

    def begin_step(self, number: int) -> None:
        """Called at the step's first forward."""
        if self._profile is not None:
            self._profile.step(number)

    def begin(self, stage: str) -> None:
        """stage: "forward", "backward", "adam", or "idle" (none of them)."""
        if self._profile is not None:
            self._profile.stage(stage)

    @torch.compiler.disable
    def refuse_late_backward(self, output: Any) -> Any:
        """Returns what the model returned. A backward of it after the next update raises StateError: the graph refers to
        parameters that the update has changed in place, in chunks, where torch does not see it."""
        schedule = weakref.ref(self.chunks.schedule)    # the program may keep the tensor longer than the engine
        number = self.chunks.schedule.num_steps

        def check(grad: torch.Tensor) -> None:
            now = schedule()
            if now is not None and now.num_steps != number:
                raise StateError("backward of a forward from before the last optimizer.step(), which has changed the "
                                 "parameters since: call backward before it, or compute the loss again")

        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(check)
        return output

    @property
    def is_last_micro_step(self) -> bool:
        return self._done + 1 == self.num_micro_steps

    def end_backward(self) -> None:
        """Called after a micro-step's backward, if it did not fail."""
        self.chunks.end_measuring()
        self._done, self._had_backward = (self._done + 1) % self.num_micro_steps, True
        self.begin("idle" if self._done else "adam")

    def forget_grads(self) -> None:
        """Resets the count of micro-steps: their gradients were dropped."""
        self._done, self._had_backward = 0, False

    def check_update(self, loss_scale: float) -> None:
        """Raises StateError if the update would silently use incomplete gradients, or ones not from model.backward."""
        self.lender.end_step()
        self.chunks.end_measuring()    # again: after loss.backward() nobody else does
        steps, chunks = self.num_micro_steps, self.chunks
        if self._done:
            raise StateError(f"optimizer.step() after {self._done} of {steps} micro-steps "
                             "(gradient_accumulation_steps): call model.backward(loss) for each of them before it, or "
                             "optimizer.zero_grad() to drop them")
        alone = steps == 1 and loss_scale == 1 and chunks.collectives.num_ranks == 1
        if not (alone or self._had_backward) and any(map(chunks.gradients.arrived, chunks.params)):
            raise StateError("the gradients are not from model.backward(loss): call it instead of loss.backward(), which "
                             "knows no loss scale, no micro-steps and no other ranks")

    def save_profile(self) -> None:
        """Saves the profile, unless it is closed."""
        if self._profile is not None and self._profile.closed is None:
            self._profile.save(self._path)
