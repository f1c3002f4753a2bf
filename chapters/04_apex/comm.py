"""Who averages the gradients of the ranks: torch's DistributedDataParallel, or Horovod. Chapters 02 and 03 are about them.

    replica = replicate(model, ranks, settings)
    with replica.no_sync(not_the_last_micro_batch):
        scaler.scale(replica(inputs, targets)).backward()
    replica.wait()                               # now every gradient is the mean over the ranks, still scaled

What travels has the type of the weights: in O2 and O3 half the bytes.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from torch import Tensor, nn


def replicate(model: nn.Module, ranks: Any, settings: Any) -> Alone | TorchReplica | HorovodReplica:
    """The model, its gradients averaged by what --comm names; every rank holds rank 0's weights from here on."""
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
        """Ends it, before the process group ends; returns rows for the summary."""
        return []


class TorchReplica(Alone):
    """DistributedDataParallel: buckets, averaged while backward goes on; the last backward of a step waits for them."""

    def __init__(self, model: nn.Module, ranks: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        devices = [ranks.device] if ranks.device.type == "cuda" else None
        super().__init__(DistributedDataParallel(model, device_ids=devices, process_group=ranks.group))

    def no_sync(self, active: bool) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync() if active else contextlib.nullcontext()

    def close(self) -> list[tuple[str, Any]]:
        """Lets go of the process group, whose threads would otherwise abort the process at its end."""
        self.model = self.model.module
        gc.collect()  # DistributedDataParallel refers to itself
        return super().close()


class HorovodReplica(Alone):
    """Horovod's optimizer for its hooks and its synchronize() alone.

    It never steps: in O2 the optimizer that does works on the masters, which have no backward to hook into.
    """

    def __init__(self, model: nn.Module, grad_accum: int) -> None:
        import horovod.torch as hvd
        from horovod.torch.compression import Compressor

        class AsFloat(Compressor):
            """Horovod knows no bf16: on its way such a gradient is fp32."""

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
