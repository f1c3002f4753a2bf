"""Where the ranks of one job meet: the store, their processes, and the name that tells two jobs apart."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gpt2_chinese.errors import LOST_PEER, UserError

JOB = "job"  # key of the name of rank 0's job


def meet(timeout_s: float) -> tuple[Any, list[list[str]]]:
    """The rendezvous: (store, [host, process] of each rank), as soon as all ranks are there.

    --timeout-s begins after that: it is a limit of collectives, and imports of ranks differ by seconds. A rank that does
    not come ends this one with one line.

    Raises:
        UserError: the address is unusable, or another job's ranks meet there.
    """
    store, rank, num_ranks = _store(timeout_s)
    own = name_of_job()
    if rank == 0:
        store.set(JOB, own)
    found = _get(store, JOB, rank, 0)
    if own and found and own != found:
        raise UserError(
            f"this is {own}, but at {os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']} the ranks of {found} meet: "
            "start it again, or give another MASTER_PORT"
        )
    store.set(f"process of {rank}", f"{socket.gethostname()} {os.getpid()}")
    return store, [_get(store, f"process of {other}", rank, other).split() for other in range(num_ranks)]


def name_of_job() -> str:
    """What the ranks of a job have in common and those of another job do not; "" where the launcher gives it no name.

    Two jobs can have the same port: the number of a Slurm job repeats on another cluster, and the port after 20,000 jobs.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # first: one torchrun may span two Slurm jobs
        return f"the torchrun {os.environ['TORCHELASTIC_RUN_ID']}"
    if "SLURM_JOB_ID" in os.environ:
        cluster = os.environ.get("SLURM_CLUSTER_NAME")
        return f"job {os.environ['SLURM_JOB_ID']}" + (f" of the cluster {cluster}" if cluster else "")
    return ""


def _store(timeout_s: float) -> tuple[Any, int, int]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(
            f"the environment has RANK, but MASTER_ADDR={address!r} and MASTER_PORT={port!r} are no place to meet: "
            "unset RANK and WORLD_SIZE, or start with a launcher that sets all four"
        )
    try:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=max(60, timeout_s))))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"the ranks cannot meet at {address} port {port}: the port is in use; give another MASTER_PORT"
        ) from None


def _get(store: Any, key: str, rank: int, other: int) -> str:
    """The value that rank `other` gives `key`; if it never comes, this rank ends with one line."""
    try:
        return store.get(key).decode()
    except dist.DistStoreError:
        print(f"error: rank {rank} waited in vain at the start: rank {other} did not come", file=sys.stderr, flush=True)
        raise SystemExit(LOST_PEER) from None
