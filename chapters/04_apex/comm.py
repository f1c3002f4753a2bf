"""Averages gradients over the ranks by torch's DistributedDataParallel (chapter 02) or by Horovod (chapter 03).

    replica = replicate(model, ranks, settings)
    with replica.no_sync(not_the_last_micro_batch):
        scaler.scale(replica(inputs, targets)).backward()
    replica.wait()                               # now every gradient is the mean over the ranks, still scaled

Gradients are sent in the type of their weights, so O2 and O3 send half the bytes; but Horovod sends bf16 as fp32.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from torch import Tensor, nn


def replicate(model: nn.Module, ranks: Any, settings: Any) -> Alone | TorchReplica | HorovodReplica:
    """Wraps the model so that --comm averages its gradients, and gives every rank the weights of rank 0."""
    if settings.comm == "horovod":
        return HorovodReplica(model, settings.grad_accum)
    return Alone(model) if ranks.group is None else TorchReplica(model, ranks)


class Alone:
    """One process: nothing to average."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Tensor) -> Tensor:
        return self.model(*args)

    def no_sync(self, active: bool) -> contextlib.AbstractContextManager[Any]:
        """While active, backward only adds up gradients on this rank."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Returns when all gradients are averages."""

    def close(self) -> list[tuple[str, Any]]:
        """Call before the process group is destroyed; returns rows for the summary."""
        return []


class TorchReplica(Alone):
    """DistributedDataParallel averages buckets during backward; the last backward of a step waits for all of them."""

    def __init__(self, model: nn.Module, ranks: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        devices = [ranks.device] if ranks.device.type == "cuda" else None
        super().__init__(DistributedDataParallel(model, device_ids=devices, process_group=ranks.group))

    def no_sync(self, active: bool) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync() if active else contextlib.nullcontext()

    def close(self) -> list[tuple[str, Any]]:
        """Drops all references to the process group: its threads would otherwise abort the process at exit."""
        self.model = self.model.module
        gc.collect()  # DistributedDataParallel refers to itself
        return super().close()


class HorovodReplica(Alone):
    """Uses only the hooks and the synchronize() of Horovod's optimizer.

    Its step() is never called: in O2 another optimizer updates the masters, and masters have no backward to hook into.
    """

    def __init__(self, model: nn.Module, grad_accum: int) -> None:
        import horovod.torch as hvd
        from horovod.torch.compression import Compressor

        class AsFloat(Compressor):
            """Sends bf16 gradients as fp32, because Horovod has no bf16."""

            @staticmethod
            def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
                return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor), tensor.dtype

            @staticmethod
            def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
                return tensor.to(dtype)

        super().__init__(model)
        bits = {torch.bfloat16: torch.int16}
        weights = {name: p.data.view(bits.get(p.dtype, p.dtype)) for name, p in model.named_parameters()}
        hvd.broadcast_parameters(weights, root_rank=0)
        self._reducer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=grad_accum,
            compression=AsFloat,
        )

    def wait(self) -> None:
        self._reducer.synchronize()
