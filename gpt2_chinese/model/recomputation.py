"""Gradient checkpointing (Chen et al. 2016) from first principles: autograd's two hooks, one dispatch mode, no more.

Autograd asks a `pack` hook what to store for each tensor that an operation saves, and an `unpack` hook for the tensor when
backward needs it. A segment of blocks stores only a number for each tensor. At the first question backward runs the
segment's forward again, and the answer number i is the i-th tensor that this second forward saves:

    forward    x0 -> [block block] -> x2 -> [block block] -> x4 -> loss        kept: x0, x2, and numbers
                                               |
    backward                     x2 -> [block block] again: tensors 0, 1, 2 ...  then the same for x0

`selective` also keeps what the expensive operations returned (Korthikanti et al. 2022, section 5, choose by cost as well).
A dispatch mode sees every operation below autograd: it notes the results in forward, and in the second forward it
returns them without computing. Norms, GELU and additions are computed again.

    recompute(model, "every:2")
    loss = model(inputs, targets)
    loss.backward()

The model's file knows nothing of this: `recompute` replaces the list of its blocks. Where no gradient is computed, as in
evaluation and generation, the blocks run as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from gpt2_chinese.model.recompute_plan import Plan

aten = torch.ops.aten
EXPENSIVE = {
    aten.mm.default, aten.addmm.default, aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip
# torch's counter does not know the CPU's attention
ON_CPU = {aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}


def recompute(model: nn.Module, how: str, offload: bool = False) -> Activations:
    """Makes the blocks of a GPT-2 keep what `how` asks for; apply it after all that replaces modules of the model.

    Args:
        model: a GPT2LMHeadModel; the names of its parameters stay the same.
        how: the flag --recompute: none, block, every:K, selective or sqrt. Plan.of raises UserError for anything else.
        offload: what the blocks keep waits in host memory.

    Returns:
        counts bytes and FLOPs, where a chapter asks.
    """
    activations = Activations(model, Plan.of(how, model.config.n_layer), offload)
    if activations.plan.length or offload:
        core = getattr(model.transformer, "base_layer", model.transformer)  # prompt and prefix wrap the transformer
        core.h = Segments(core.h, activations)
        core.register_forward_pre_hook(activations.begin)
        core.register_forward_hook(activations.end, always_call=True)
    return activations


class Activations:
    """What the blocks of a model keep, by `plan`. Also counts it, inside `counting`.

    Attributes:
        plan: how the blocks are cut.
        offload: what the blocks keep waits in host memory. On a CPU that is the same memory, in a second copy.
        active: True during a forward of the transformer.
        kept_bytes: of the last forward under `counting`: each storage once, parameters and buffers left out.
        offloaded_bytes: copied to the host by that forward.
        again_bytes: of the largest segment while backward holds what it recomputed, beyond kept_bytes.
        flops: recomputed by the backward under `counting`.
    """

    def __init__(self, model: nn.Module, plan: Plan, offload: bool) -> None:
        self.plan, self.offload, self.active = plan, offload, False
        self.kept_bytes = self.offloaded_bytes = self.again_bytes = self.flops = 0
        self.is_counting = False
        self._weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        self._seen: dict[int, Any] = {}  # storages counted, which stay alive meanwhile: their addresses are not reused

    def begin(self, *_: object) -> None:
        """Before a forward of the transformer: the loop over its blocks now gets segments."""
        self.active = True

    def end(self, *_: object) -> None:
        """After it, also after an error."""
        self.active = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts bytes and FLOPs of the forward and the backward inside it, from zero."""
        self.kept_bytes = self.offloaded_bytes = self.again_bytes = self.flops = 0
        self.is_counting = True
        try:  # the hooks see what the rest of the model saves, and blocks that keep all
            with torch.autograd.graph.saved_tensors_hooks(self._counted, lambda kept: kept):
                yield
        finally:
            self.is_counting = False
            self._seen.clear()

    def keep(self, tensor: Tensor) -> Any:
        """Keeps a tensor of a block for backward: itself, or a copy on the host with the device that it comes from."""
        if self.is_counting:
            self._counted(tensor)
        if not self.offload or tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.detach()  # with its graph it would keep itself alive
        self.offloaded_bytes += tensor.nbytes if self.is_counting else 0
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, on_host.copy_(tensor.detach())

    def note_recomputed(self, tensors: list[Tensor]) -> None:
        """Counts what a segment holds after its second forward; what was kept for it is counted already."""
        new = {storage.data_ptr(): storage.nbytes() for tensor in tensors if (storage := tensor.untyped_storage())}
        known = self._weights | set(self._seen)
        self.again_bytes = max(self.again_bytes, sum(size for address, size in new.items() if address not in known))

    def _counted(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights and storage.data_ptr() not in self._seen:
            self.kept_bytes += storage.nbytes()
            self._seen[storage.data_ptr()] = storage
        return tensor.detach()


def fetch(kept: Any) -> Tensor:
    """The tensor that `Activations.keep` kept, on its device."""
    return kept if isinstance(kept, Tensor) else kept[1].to(kept[0])


class Segments(nn.ModuleList):
    """The blocks under their old names. During a forward a loop over them gets segments in place of blocks.

    GPT2Model.forward reads `for block in self.h: x = block(x, mask=mask)`, and needs no change.
    """

    def __init__(self, blocks: nn.ModuleList, activations: Activations) -> None:
        super().__init__(blocks)
        self.activations = activations

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        blocks, plan = list(super().__iter__()), self.activations.plan
        if not self.activations.active or not torch.is_grad_enabled():
            return iter(blocks)
        if not plan.length:
            return iter([functools.partial(run_kept, block, self.activations) for block in blocks])
        return iter([Segment([blocks[i] for i in layers], self.activations) for layers in plan.cut(len(blocks))])


def run_kept(block: nn.Module, activations: Activations, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Runs a block that recomputes nothing and keeps its tensors on the host. A tensor that two operations save is there
    twice: attention's result, which c_proj saves as well."""
    with torch.autograd.graph.saved_tensors_hooks(activations.keep, fetch):
        return block(x, mask=mask)


class Segment:
    """Blocks that run after each other, for one forward and its backward; keeps its input, and numbers for the rest."""

    def __init__(self, blocks: list[nn.Module], activations: Activations) -> None:
        self.blocks, self.activations = blocks, activations
        self.num_saved = 0  # tensors that autograd saved inside
        self.results: list[tuple[Any, ...]] = []  # selective: what the expensive operations returned, kept
        self.answers: dict[int, Tensor] | None = None  # of backward, each given once

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C); the mask of the documents is the same for all blocks, so it is kept as it is."""
        self.input, self.needs_grad, self.mask = self.activations.keep(x), x.requires_grad, mask
        self.state = State(x.device)
        notes = Notes() if self.activations.plan.selective else None
        num_needed = 0

        def pack(_: Tensor) -> int:
            nonlocal num_needed
            self.num_saved += 1
            num_needed = len(notes.results) if notes else 0
            return self.num_saved - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, self.answer), notes or contextlib.nullcontext():
            for block in self.blocks:
                x = block(x, mask=mask)
        if notes:  # a result after the last saved tensor is not needed again: that of mlp.c_proj
            self.results = [tuple(map(self.activations.keep, result)) for result in notes.results[:num_needed]]
        return x

    def answer(self, number: int) -> Tensor:
        """The saved tensor of this number, computed again with all others at the first call."""
        if self.answers is None:
            self._run_again()
        if number not in self.answers:
            raise RuntimeError("a second backward through the same segment: run the forward again")
        return self.answers.pop(number)

    def _run_again(self) -> None:
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            """Nothing goes backward through this second graph, so it keeps nothing. A tensor that it kept could refer to its
            own node: a cycle outside of Python, whose memory would never be freed."""
            found.append(tensor.detach())
            if len(found) == self.num_saved:
                raise _AllFound  # an operation saves before it computes: the last product of the segment is left out

        nothing, counts, selective = contextlib.nullcontext(), self.activations.is_counting, self.activations.plan.selective
        counter = FlopCounterMode(display=False, custom_mapping=ON_CPU) if counts else nothing
        replay = Replay(self.results) if selective else nothing
        x = fetch(self.input).detach().requires_grad_(self.needs_grad)
        with contextlib.suppress(_AllFound), torch.enable_grad(), self.state.as_then(), counter, \
             torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept), replay:  # fmt: skip
            for block in self.blocks:
                x = block(x, mask=self.mask)
        if len(found) != self.num_saved:
            raise RuntimeError(f"the second forward saved {len(found)} tensors, the first one {self.num_saved}")
        if self.activations.is_counting:
            self.activations.flops += counter.get_total_flops()
            self.activations.note_recomputed(found)
        self.input, self.mask, self.results, self.answers = None, None, [], dict(enumerate(found))


class _AllFound(Exception):
    """Ends a second forward as soon as it has saved what backward needs."""


class Notes(TorchDispatchMode):
    """Notes the results of the expensive operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation in EXPENSIVE:  # detached: with its graph a result would keep itself alive
            parts = result if isinstance(result, tuple) else (result,)
            self.results.append(tuple(part.detach() if isinstance(part, Tensor) else part for part in parts))
        return result


class Replay(TorchDispatchMode):
    """Returns noted results in place of computing them."""

    def __init__(self, results: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.results = iter(results)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation not in EXPENSIVE:
            return operation(*args, **(kwargs or {}))
        result = tuple(map(fetch, next(self.results)))
        return result if len(result) > 1 else result[0]


class State:
    """What decides a forward's numbers besides inputs and weights: random generators, autocast, modes of torch's functions
    (chapter 04's casts by operation)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.modes = _get_current_function_mode_stack()  # the outermost first

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Sets them back as they were; dropout then draws the same numbers. Afterwards they are as before."""
        enabled, dtype = self.autocast
        with torch.random.fork_rng([self.device] if self.cuda is not None else []), contextlib.ExitStack() as entered:
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            for context in (torch.autocast(self.device.type, dtype, enabled=enabled), *self.modes):
                entered.enter_context(context)
            yield
