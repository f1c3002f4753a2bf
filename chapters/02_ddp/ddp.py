"""Distributed data parallel: every rank holds the whole model, computes on its part of the batch, and averages gradients.

    naive    backward, then one all-reduce per parameter: as many messages as parameters, and no overlap with backward
    bucket   gradients are all-reduced in buckets of some MiB, the last layers' first, while backward still computes
             earlier layers (Li et al. 2020, PyTorch Distributed)
    ring     the same buckets after backward, by an all-reduce written out from sends and receives: ring.py

    rank 0  forward | backward h.3 h.2 h.1 h.0 embeddings | wait | step
                                 \\bucket 0\\bucket 1 ...   \\bucket n            the slopes are all-reduces

Usage, the same for all three variants and for `--backend torch`:

    replica = replicate(model, group, settings)
    with replica.no_sync(not_the_last_micro_batch):
        replica(inputs, targets).backward()
    replica.wait()                                  # now every gradient is the mean over the ranks

A gradient is divided by the number of ranks BEFORE the sum: the sum of p gradients may overflow where their mean does not.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from ring import ring_all_reduce, ring_bytes
from timeline import Timeline
from torch import Tensor, nn

from durable.calls import name_next

MIB = 1 << 20


def replicate(model: nn.Module, group: Any, settings: Any) -> OwnReplica | TorchReplica:
    """Makes the model data parallel as `settings` ask; afterwards every rank holds rank 0's weights.

    Args:
        model: on its device, the same architecture on all ranks.
        group: of torch.distributed; None is one process, which averages nothing.
        settings: has backend, variant, bucket_mb, timeline.
    """
    timeline = Timeline.of(settings.timeline, group) if settings.timeline else None
    bucket_bytes = int(settings.bucket_mb * MIB)
    if settings.backend == "torch" and group is not None:
        return TorchReplica(model, group, bucket_bytes, timeline)
    return OwnReplica(model, group, settings.variant, bucket_bytes, timeline)


# ---- the buckets ------------------------------------------------------------------------------------------------------


def cut_into_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in reversed order (roughly the order of their gradients in backward), in buckets of at most `bucket_bytes`.

    A bucket has one dtype and one device, and at least one parameter, even if that is larger than `bucket_bytes`.
    """
    buckets: list[list[nn.Parameter]] = []
    kind, room = None, 0
    for parameter in reversed(parameters):
        if kind != (parameter.dtype, parameter.device) or parameter.nbytes > room:
            buckets.append([])
            kind, room = (parameter.dtype, parameter.device), bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


class Bucket:
    """Gradients that are all-reduced as one flat tensor, with a used flag for each parameter at its end.

        flat = | gradient of p0 ... | of p1 ... | ... | 1/p or 0 for p0 | for p1 | ...

    After the sum a flag of 0 means that no rank used the parameter: its gradient stays None, and the optimizer skips it, as
    in one process. A flag above 0 means that some rank did: then all ranks take the mean. No extra message is needed.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter]) -> None:
        self.number, self.parameters = number, parameters
        self.waiting_for: set[nn.Parameter] = set(parameters)
        self.flat: Tensor | None = None
        self.work: Any = None

    def fill(self, num_ranks: int) -> Tensor:
        """Copies the gradients, divided by the number of ranks, and the used flags into the flat tensor."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        used = grads[0].new_ones(len(grads))  # not made from a list: on a GPU its transfer would wait for backward
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                used[number] = 0
        self.flat = torch.cat([*(grad.reshape(-1) for grad in grads), used]).div_(num_ranks)
        return self.flat

    def empty(self) -> None:
        """Copies the means back into the gradients and resets the bucket for the next step."""
        pieces = self.flat.split([p.numel() for p in self.parameters] + [len(self.parameters)])
        absent = [p.grad is None for p in self.parameters]
        used = pieces[-1].tolist() if any(absent) else []  # on a GPU tolist() waits: only if needed
        for number, (parameter, piece) in enumerate(zip(self.parameters, pieces[:-1], strict=True)):
            if not absent[number]:
                parameter.grad.copy_(piece.view_as(parameter))
            elif used[number] > 0:
                parameter.grad = piece.view_as(parameter).clone()
        self.waiting_for, self.flat, self.work = set(self.parameters), None, None


# ---- the replica ------------------------------------------------------------------------------------------------------


class Replica:
    """Base of OwnReplica and TorchReplica: the calls of train.py, counts of bytes, and events of the timeline."""

    def __init__(self, model: nn.Module, group: Any, timeline: Timeline | None) -> None:
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        # The default group is not stored: gloo threads that outlive destroy_process_group abort the process at exit.
        self.group = None if group is None or group is dist.group.WORLD else group
        self.model, self.timeline = model, timeline
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.reduced_bytes = self.last_bytes = self.num_calls = self.last_calls = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Runs the model's forward."""
        if self.timeline is None:
            return self.forward(*inputs)
        with self.timeline.span("forward", "compute"):
            loss = self.forward(*inputs)
        self.timeline.backward_of(loss)
        return loss

    def weigh(self, loss: Tensor, num_rows: int) -> Tensor:
        """Scales the loss by this rank's part of all rows, so that the mean over ranks is the mean over rows.

        A plain mean of means would give rows of a short batch more weight. All ranks must call it, even one without rows.
        """
        if self.num_ranks == 1:
            return loss
        total = torch.tensor(float(num_rows), dtype=torch.float64, device=loss.device)
        dist.all_reduce(total, group=self.group)
        return loss * (num_rows * self.num_ranks / total.item())

    def count(self, num_bytes: int) -> None:
        """Counts one all-reduce of `num_bytes`."""
        self.reduced_bytes, self.num_calls = self.reduced_bytes + num_bytes, self.num_calls + 1

    def end_step(self) -> None:
        """Stores the counts of the step that ends, and resets them."""
        self.last_bytes, self.reduced_bytes = self.reduced_bytes, 0
        self.last_calls, self.num_calls = self.num_calls, 0
        if self.timeline is not None:
            self.timeline.end_step()

    def step_scalars(self) -> dict[str, float]:
        """For metrics.jsonl, of the last step: bytes given to all-reduce, number of calls, and bytes that each rank sends by
        the ring's formula."""
        if self.num_ranks == 1:
            return {}
        formula = ring_bytes(self.last_bytes, self.num_ranks)
        return {"reduced_bytes": self.last_bytes, "num_reductions": self.last_calls, "formula_bytes": formula}

    def close(self) -> list[tuple[str, Any]]:
        """Called before the process group ends; returns rows for the closing summary: the communication of a step."""
        if self.num_ranks == 1:
            return [("communication", "none: one process")]
        formula = ring_bytes(self.last_bytes, self.num_ranks)
        measured = f"{self.last_bytes / MIB:.2f} MiB of gradients in {self.last_calls} all-reduces a step"
        return [
            ("communication", measured),
            ("by the formula", f"2 (p - 1) / p of it = {formula / MIB:.2f} MiB sent by each of {self.num_ranks} ranks"),
        ]


class OwnReplica(Replica):
    """Data parallel from first principles; see the top of this file.

    Args:
        model: as in `replicate`.
        group: as in `replicate`.
        variant: naive, bucket or ring.
        bucket_bytes: most bytes of gradients in a bucket.
        timeline: records events, or None.
    """

    def __init__(
        self, model: nn.Module, group: Any, variant: str = "bucket", bucket_bytes: int = MIB,
        timeline: Timeline | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, group, timeline)
        self.forward, self.variant, self.synchronizing = model, variant, True
        sizes = 0 if variant == "naive" else bucket_bytes  # with 0 each bucket holds one parameter
        self.buckets = [Bucket(n, part) for n, part in enumerate(cut_into_buckets(self.parameters, sizes))]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.num_launched = 0
        if self.num_ranks > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), group=self.group, group_src=0)
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    @contextlib.contextmanager
    def no_sync(self, active: bool = True) -> Iterator[None]:
        """While active, gradients add up without a reduction: use it for all micro-batches of a step but the last."""
        before, self.synchronizing = self.synchronizing, not active
        try:
            yield
        finally:
            self.synchronizing = before

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Called by backward as soon as a gradient is complete."""
        if self.timeline is not None:
            self.timeline.gradient_is_ready()
        if self.variant != "bucket" or not self.synchronizing:
            return
        bucket = self.bucket_of[parameter]
        if bucket.flat is not None:
            raise RuntimeError("a gradient changed after its bucket had left: is a micro-batch outside no_sync()?")
        bucket.waiting_for.discard(parameter)
        # All ranks must reduce buckets in the same order, so a full bucket waits for those before it.
        while self.num_launched < len(self.buckets) and not self.buckets[self.num_launched].waiting_for:
            self._launch(self.buckets[self.num_launched])

    def _launch(self, bucket: Bucket) -> None:
        flat = bucket.fill(self.num_ranks)
        self.num_launched += 1
        self.count(flat.nbytes)
        name = f"bucket {bucket.number}"
        name_next(name)  # for the report of a hang
        if self.variant == "ring":
            with self.timeline.span(name, "communication") if self.timeline else contextlib.nullcontext():
                ring_all_reduce(flat, self.group, name)
        else:
            bucket.work = dist.all_reduce(flat, group=self.group, async_op=True)
            if self.timeline is not None:
                self.timeline.until(bucket.work, name, flat.nbytes)
            if self.variant == "naive":
                bucket.work.wait()

    def wait(self) -> None:
        """Returns when every gradient is the mean over the ranks. Call it once a step, on all ranks, before clipping.

        Launches the buckets that backward has not: in the naive and ring variants all of them, otherwise those with
        parameters that this rank did not use. A rank without data calls wait() alone; its gradients are None.
        """
        if self.num_ranks > 1:
            for bucket in self.buckets[self.num_launched :]:
                self._launch(bucket)
            for bucket in self.buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                bucket.empty()
            self.num_launched = 0
        self.end_step()


class TorchReplica(Replica):
    """The same calls over torch's DistributedDataParallel."""

    def __init__(
        self, model: nn.Module, group: Any, bucket_bytes: int = 25 * MIB, timeline: Timeline | None = None,
        find_unused_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, group, timeline)
        device_ids = [next(model.parameters()).device] if next(model.parameters()).is_cuda else None
        self.forward = nn.parallel.DistributedDataParallel(
            model, device_ids=device_ids, process_group=self.group, bucket_cap_mb=bucket_bytes / MIB,
            find_unused_parameters=find_unused_parameters,
        )  # fmt: skip
        self.forward.register_comm_hook(self, _reduce_and_note)
        if timeline is not None:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _: timeline.gradient_is_ready())

    def no_sync(self, active: bool = True) -> contextlib.AbstractContextManager[Any]:
        """As in OwnReplica."""
        return self.forward.no_sync() if active else contextlib.nullcontext()

    def wait(self) -> None:
        """As in OwnReplica; DistributedDataParallel has already waited in backward."""
        self.end_step()

    def close(self) -> list[tuple[str, Any]]:
        """As in Replica; also drops the reference to the process group, whose threads would abort the process at exit."""
        self.forward = self.model
        gc.collect()  # DistributedDataParallel refers to itself
        return super().close()


def _reduce_and_note(replica, bucket):  # no annotations: torch needs types, here they are strings
    """Averages a bucket as DistributedDataParallel does without a hook, and records time and bytes."""
    flat = bucket.buffer().div_(replica.num_ranks)
    work = dist.all_reduce(flat, group=replica.group, async_op=True)
    replica.count(flat.nbytes)
    if replica.timeline is not None:
        replica.timeline.until(work, f"bucket {bucket.index()}", flat.nbytes)
    return work.get_future().then(lambda done: done.value()[0])
