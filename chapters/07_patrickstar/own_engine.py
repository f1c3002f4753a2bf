"""Decides when chunks are needed (hooks on modules and on autograd), and runs AdamW over chunks; chunks.py moves them.

    model = ChunkedModel(module, chunk_elems=2**16, near_bytes=2**20)
    optimizer = ChunkedAdamW(model, [{"params": module.parameters()}], lr=1e-3, clip_norm=1.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        model.backward(model(inputs, targets))
        optimizer.step()

Forward: a module's direct parameters are COMPUTE while the module runs.

Backward: autograd saves tensors for it, and some are views of chunks. In place of a view it saves a Note, without bytes.
A node of the graph reads its notes when it runs. It no longer needs them when the next node runs, or when the gradient that
it computed arrives. So backward needs the parameter exactly when the note is read. (A backward hook on the module would run
too early, and would also fetch the table of an embedding, whose gradient needs only the ids.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from chunks import KINDS, Chunks, Slot
from torch import Tensor, nn


@dataclass
class Note:
    """What autograd saves in place of a view of a chunk: enough to make the view again."""

    slot: Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in the chunk, in elements
    module: nn.Module  # whose forward used the view


class ChunkedModel(nn.Module):
    """A module whose model data are in chunks. Called like the module.

    Args:
        module, chunk_elems, near_bytes, device: as in Chunks.
        micro_steps: backward passes in a step; the step's gradient is that of the mean of their losses.
    """

    def __init__(self, module: nn.Module, chunk_elems: int, near_bytes: int, device: torch.device | str = "cpu",
                 micro_steps: int = 1) -> None:  # fmt: skip
        super().__init__()
        self.module, self.micro_steps = module, micro_steps
        self.data = Chunks(module, chunk_elems, near_bytes, torch.device(device))
        self._in_step = False  # in a training forward with gradients, or in its backward
        self._running: list[nn.Module] = []  # modules whose forward is running, the innermost last
        self._read: list[Note] = []  # notes read by the node that backward is running
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
        slot_of = {slot.param: slot for slot in self.data.slots.values()}
        for child in module.modules():
            if own := [slot_of[param] for param in child.parameters(recurse=False)]:
                child.register_forward_pre_hook(lambda module, _, own=own: self._begin_module(module, own))
                child.register_forward_hook(lambda *_, own=own: self._end_module(own))
        for slot in self.data.slots.values():
            if slot.param.requires_grad:
                slot.param.register_post_accumulate_grad_hook(lambda _, slot=slot: self._take_gradient(slot))

    def forward(self, *inputs: Any) -> Any:
        """Runs the module's forward; in training with gradients, its uses of chunks are moments of the step."""
        self._in_step = self.training and torch.is_grad_enabled()
        if self._in_step and not self.data.schedule.moments:
            self.data.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of loss / micro_steps to those of the step's other micro-batches."""
        (loss / self.micro_steps if self.micro_steps > 1 else loss).backward()
        self._end_node()
        self.data.end_backward()

    def _begin_module(self, module: nn.Module, own: list[Slot]) -> None:
        self.data.acquire(own, self._in_step)
        self._running.append(module)

    def _end_module(self, own: list[Slot]) -> None:
        self._running.pop()
        self.data.release(own)

    def _pack(self, tensor: Tensor) -> Tensor | Note:
        """Forward: autograd saves what this returns."""
        address = tensor.untyped_storage().data_ptr()
        for chunk in self.data.chunks:
            if chunk.is_near and chunk.near.data_ptr() == address:
                slot = [slot for slot in chunk.slots if slot.offset <= tensor.storage_offset()][-1]
                return Note(slot, tensor.size(), tensor.stride(), tensor.storage_offset(), self._running[-1])
        return tensor.detach()  # an activation; with its graph it would keep itself alive

    def _unpack(self, kept: Tensor | Note) -> Tensor:
        """Backward: a node reads what was saved."""
        if isinstance(kept, Tensor):
            return kept
        if self._read and self._read[-1].module is not kept.module:  # another module, so another node
            self._end_node()
        self.data.acquire([kept.slot], self._in_step)
        self._read.append(kept)
        return kept.slot.chunk.near.as_strided(kept.size, kept.stride, kept.offset)

    def _end_node(self) -> None:
        self.data.release([note.slot for note in self._read])
        self._read = []

    def _take_gradient(self, slot: Slot) -> None:
        self._end_node()  # the node that computed it
        grad, slot.param.grad = slot.param.grad, None
        self.data.add_gradient(slot, grad)

    # ---- reports for a run ----------------------------------------------------------------------------------------------

    def memory_plan(self) -> list[tuple[str, str]]:
        """(name, value) rows for the header: chunks and budget."""
        chunks, num_near = self.data.chunks, sum(chunk.lives_near for chunk in self.data.chunks)
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        used = 4 * sum(slot.param.numel() for slot in self.data.slots.values()) / num_bytes
        size = f"{chunks[-1].num_bytes // 4:,} elements each (larger parameters apart)"
        return [("chunks", f"{len(chunks)}, {size}, {used:.1%} used"),
                ("model data", f"{4 * num_bytes:,} bytes, 16 a parameter"),
                ("near", f"at most {self.data.near.budget_bytes:,} bytes; {num_near} of {len(chunks)} chunks live there")]

    def memory_table(self) -> list[tuple[str, str]]:
        """The same, with the peak of bytes near and the bytes that the last step copied."""
        moved = [(f"{way} a step", f"{self.data.step_bytes[way]:,} bytes") for way in ("far to near", "near to far")]
        return [*self.memory_plan(), ("near at most", f"{self.data.near.peak_bytes:,} bytes"), *moved]

    def step_scalars(self) -> dict[str, int]:
        """For metrics.jsonl, of the last step."""
        near, moved = self.data.near, self.data.step_bytes
        return {"near_bytes": near.used_bytes, "near_peak_bytes": near.peak_bytes,
                "far_to_near_bytes": moved["far to near"], "near_to_far_bytes": moved["near to far"]}


class ChunkedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over chunks: updates each parameter in its chunk's home, near or far.

    Parameter groups and learning rates work as in any torch optimizer. Skips a step whose gradients are not finite.

    Args:
        model: computes the gradients.
        param_groups: parameters of model.module; lr, betas, eps and weight_decay may differ between groups.
        clip_norm: largest global norm of the gradients, 0: no limit. Attribute grad_norm: the last step's, before clipping.
    """

    def __init__(self, model: ChunkedModel, param_groups: list[dict[str, Any]], lr: float, clip_norm: float = 0.0,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.data, self.clip_norm, self.grad_norm = model.data, clip_norm, 0.0
        self._slot_of = {slot.param: slot for slot in self.data.slots.values()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.data.forget_gradients()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient.

        The global norm is the norm of the parameters' norms in the model's order, as in clip_grad_norm_. Each parameter's
        norm is summed in float64, so that the order of additions does not change its fp32 value.
        """
        grads = [slot.of(slot.chunk.home["grad"]) for slot in self.data.slots.values() if slot.summed]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64).float().cpu() for grad in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self.grad_norm = float(norm)
        scale = float(torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)) if self.clip_norm else 1.0
        for group in self.param_groups if math.isfinite(self.grad_norm) else ():
            for slot in (self._slot_of[param] for param in group["params"]):
                if slot.summed:
                    slot.step += 1
                    update(*(slot.of(slot.chunk.home[kind]) for kind in KINDS), slot.step, scale, group)
        self.data.end_step()


def update(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, scale: float,
           options: Mapping[str, Any]) -> None:
    """Updates one parameter by AdamW, in place. Every operation rounds as in pstar's kernels, so the bits are equal."""
    lr, (beta1, beta2) = options["lr"], options["betas"]
    grad = grad * scale
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    root = exp_avg_sq.double().sqrt_().float()  # torch's fp32 root is sometimes one unit in the last place off
    denominator = torch.full_like(root, options["eps"]).add_(root, alpha=(1 - beta2**step) ** -0.5)
    change = exp_avg.mul(-(lr / (1 - beta1**step))).div_(denominator)
    param.add_(change.add_(param, alpha=-lr * options["weight_decay"]))
