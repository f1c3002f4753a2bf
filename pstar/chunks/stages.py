"""The stage of a training step: counts its micro-steps, and refuses an update before all gradients are there."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pstar.chunks.hooks import Hooks
from pstar.chunks.interrupts import check, wait_for_operations, whole
from pstar.chunks.step import Chunks
from pstar.errors import StateError
from pstar.profile.recording import Profile

NONE = -1
"""The number that autograd gives to no backward."""


class Stages:
    """The stages of a step: forward and backward of each micro-step, then the update. The engine and the optimizer call
    `begin` for each stage. A backward begins in model.backward, or when the program calls loss.backward(): then the first
    gradient of what the model returned tells it.

    Args:
        num_micro_steps: gradient_accumulation_steps.
        chunks, hooks: the parameters and gradients, and what takes them from autograd.
        profile: records each stage, and is saved in `path` after each step; None: no profile.
    """

    def __init__(self, num_micro_steps: int, chunks: Chunks, hooks: Hooks, profile: Profile | None, path: Path | None):
        self.num_micro_steps, self.chunks, self.hooks = num_micro_steps, chunks, hooks
        self._profile, self._path = profile, path
        self._done, self._had_backward = 0, False
        self._by_engine, self._by_program = False, False    # model.backward runs; loss.backward() has run in this step
        self._backward = NONE    # autograd's number of the loss.backward() that runs, or failed

    def begin_step(self, number: int) -> None:
        """Called at the step's first forward."""
        self.chunks.collectives.check_still_alone()
        if self._profile is not None:
            self._profile.step(number)

    def begin(self, stage: str) -> None:
        """stage: "forward", "backward", "adam", or "idle" (none of them)."""
        if self._profile is not None:
            self._profile.stage(stage)

    @torch.compiler.disable
    def watch_backward(self, output: Any) -> Any:
        """Returns what the model returned. A backward of it after the next update raises StateError: the graph refers to
        parameters that the update has changed in place, in chunks, where torch does not see it."""
        reference = weakref.ref(self)    # the program may keep the tensor longer than the engine
        number = self.chunks.schedule.num_steps

        @whole
        def begin(grad: torch.Tensor) -> None:
            stages = reference()
            if stages is None:
                return
            if stages.chunks.schedule.num_steps != number:
                raise StateError("backward of a forward from before the last optimizer.step(), which has changed the "
                                 "parameters since: call backward before it, or compute the loss again")
            if not stages._by_engine:
                stages._begin_pytorch_backward()

        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(begin)
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """model.backward runs inside."""
        self._begin_backward()
        self._by_engine = True
        try:
            yield
        finally:
            self._by_engine = False
        self.hooks.end_backward()
        self.chunks.end_measuring()
        self._count_backward()

    def _begin_pytorch_backward(self) -> None:
        """The program calls loss.backward(), or torch.autograd.grad, which brings no gradients to the hooks."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self.hooks.took_gradients = backward, False
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pytorch_backward)

    @whole
    def _end_pytorch_backward(self) -> None:
        """Called by autograd, which restores the thread's stack of dispatch modes afterwards: measuring cannot end here."""
        self._backward = NONE
        if self.hooks.took_gradients:
            self.hooks.end_backward()
            self._count_backward()
            self._by_program = True
        check()

    def forget_failed_backward(self) -> None:
        """Called before a forward: releases the parameters of a loss.backward() that has failed."""
        if self._backward not in (NONE, torch._C._current_graph_task_id()):
            self._backward = NONE
            self.hooks.abandon()

    def _begin_backward(self) -> None:
        wait_for_operations(self.chunks.collectives.num_ranks)
        self.hooks.last_micro_step = self.is_last_micro_step
        self.begin("backward")

    @property
    def is_last_micro_step(self) -> bool:
        return self._done + 1 == self.num_micro_steps

    def _count_backward(self) -> None:
        """Called after a micro-step's backward, if it did not fail."""
        self._done, self._had_backward = (self._done + 1) % self.num_micro_steps, True
        self.begin("idle" if self._done else "adam")

    def forget_grads(self) -> None:
        """Resets the count of micro-steps: their gradients were dropped."""
        self._done, self._had_backward, self._by_program = 0, False, False

    def check_update(self, loss_scale: float) -> None:
        """Raises StateError if the update would silently use incomplete gradients, or some without the loss scale."""
        self.hooks.lender.end_step()
        self.chunks.end_measuring()    # again: after loss.backward() nobody else does
        steps, chunks = self.num_micro_steps, self.chunks
        if self._done and self._by_program:    # the program has divided by their number
            self.hooks.complete_early()
        elif self._done:
            raise StateError(f"optimizer.step() after {self._done} of {steps} micro-steps "
                             "(gradient_accumulation_steps): call model.backward(loss) for each of them before it, or "
                             "optimizer.zero_grad() to drop them")
        if self._by_program and loss_scale != 1:
            raise StateError("the gradients of loss.backward() lack fp16's loss scale: call model.backward(loss) instead")
        alone = steps == 1 and loss_scale == 1 and chunks.collectives.num_ranks == 1
        if not (alone or self._had_backward) and any(map(chunks.gradients.arrived, chunks.params)):
            raise StateError("the gradients are from a backward that failed, or of a tensor that the model did not return: "
                             "call model.backward(loss)")

    def save_profile(self) -> None:
        """Saves the profile, unless it is closed."""
        if self._profile is not None and self._profile.closed is None:
            self._profile.save(self._path)
