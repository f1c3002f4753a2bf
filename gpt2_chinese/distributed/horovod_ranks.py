"""The ranks of a run that horovodrun started: the calls of Ranks on Horovod's collectives."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import NoReturn

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from gpt2_chinese import background
from gpt2_chinese.distributed.horovod_launcher import LOST_LINE
from gpt2_chinese.distributed.ranks import GRACE_S, Ranks
from gpt2_chinese.errors import LOST_PEER, RunError, UserError


class HorovodRanks(Ranks):
    """As Ranks. Each collective has a fixed name, because ranks that recover from a loss would number them differently."""

    @classmethod
    def now(cls, device: torch.device) -> HorovodRanks:
        """The ranks as they are at this moment; an elastic run has fewer after a loss."""
        return cls(hvd.rank(), hvd.size(), hvd.local_rank(), device)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over all ranks, a new tensor on the same device; all ranks must call together."""
        return hvd.allreduce(tensor.detach(), name="ranks.sum", op=hvd.Sum)

    def max(self, value: float) -> float:
        """Largest of a number over all ranks; all ranks must call together."""
        return hvd.allreduce(torch.tensor([float(value)], dtype=torch.float64), name="ranks.max", op=hvd.Max).item()

    def close(self) -> None:
        """Leaves Horovod."""
        hvd.shutdown()


def join(device: torch.device) -> HorovodRanks:
    """Initialises Horovod and returns this rank.

    Raises:
        UserError: the device is a GPU, but this Horovod was built without NCCL.
    """
    if device.type == "cuda" and not hvd.nccl_built():
        raise UserError(
            "this Horovod was built without NCCL: give --device cpu, or make CUDA (CUDA_HOME) and NCCL "
            "(HOROVOD_NCCL_HOME) known and run bash scripts/build_horovod.sh"
        )
    hvd.init()
    sys.excepthook = _end_rank
    return HorovodRanks.now(device)


def _end_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    """Ends a rank on an uncaught error. A rank that lost its peers prints that, and gives the others time to do so."""
    status = 1
    if isinstance(error, HorovodInternalError):
        status = LOST_PEER
        print(f"rank {hvd.rank()} {LOST_LINE}: {str(error).split('. ')[0]}", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
    elif isinstance(error, RunError):  # every rank raises it
        if hvd.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)
    background.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without Horovod's shutdown, which would wait for the others
