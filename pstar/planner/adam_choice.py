"""Chooses who updates groups whose states are in far: the host, the GPU, or both. Pure numbers.

Exact clipping needs all gradients before the first update. So the update is a separate phase, in which the host's cores and
the link are both free. Either the host computes Adam at the speed of its memory or its cores, or the states are streamed
through the GPU at the speed of the link. Both read and write the same host memory, so doing both at once gains only the
bandwidth that one of them leaves unused.
"""

from dataclasses import dataclass

from pstar.errors import ConfigError
from pstar.layout.budget import Costs


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of one rank, with its share of resources that ranks share. 0: the machine has no such device."""

    host_adam_params_per_s: float
    """Parameters that the host updates in a second."""
    link_bytes_per_s: float
    """Between host and GPU, for each direction while both are in use."""
    gpu_memory_bytes_per_s: float
    host_memory_bytes_per_s: float = 0.0
    """Of the host's memory; 0: not known, the host's and the GPU's updates are taken as independent."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; give a speed from 0 on")
        if not self.host_adam_params_per_s and not (self.link_bytes_per_s and self.gpu_memory_bytes_per_s):
            raise ConfigError("host_adam_params_per_s is 0, and so is the link or the GPU's memory: nothing could "
                              "compute Adam")


@dataclass(frozen=True)
class AdamChoice:
    """The result of choose_adam."""

    where: str
    """host, stream or both."""
    streamed: float
    """Share of the far parameters that the GPU updates: 0 for host, 1 for stream."""
    seconds: float
    """Seconds of the update of the far parameters."""
    host_seconds: float
    """Seconds if the host updated all of them; inf if it cannot."""
    stream_seconds: float
    """Seconds if the GPU updated all of them; inf if it cannot."""


def adam_traffic_bytes(costs: Costs) -> int:
    """Bytes of memory that one update of one parameter reads and writes, by a kernel of one pass.

    The gradient is read; parameter and states are read and written. 28 in fp32, 26 for bf16 with a split master, 30 for
    fp16 (in fact 28, because the kernel only writes an fp16 parameter: ignored here). With fp32 accumulation 2 more.
    """
    return costs.grad + 2 * (costs.param + costs.states)


def stream_bytes(costs: Costs) -> tuple[int, int]:
    """(bytes in, bytes out) over the link for one parameter whose states are streamed through the GPU.

    In: states, gradient and parameter. Out: states and parameter.
    """
    return costs.states + costs.grad + costs.param, costs.states + costs.param


def choose_adam(speeds: Speeds, costs: Costs, num_params: int, allow_both: bool = False) -> AdamChoice:
    """The fastest way to update num_params parameters whose states are in far.

    Args:
        speeds: one rank's speeds.
        costs: bytes of each kind of model data.
        num_params: elements of this rank's pieces, updated once a step.
        allow_both: whether host and GPU may update at the same time; else the faster one updates all. If they are equally
            fast it is the host, which copies nothing.

    Raises ConfigError for speeds with which no update is possible, and for a negative num_params.
    """
    if num_params < 0:
        raise ConfigError(f"num_params is {num_params}; give a number from 0 on")
    host, traffic = speeds.host_adam_params_per_s, adam_traffic_bytes(costs)
    bytes_in, bytes_out = stream_bytes(costs)
    stream = 0.0
    if speeds.link_bytes_per_s and speeds.gpu_memory_bytes_per_s:
        stream = min(speeds.link_bytes_per_s / max(bytes_in, bytes_out), speeds.gpu_memory_bytes_per_s / traffic)
    memory = speeds.host_memory_bytes_per_s
    if memory:
        stream = min(stream, memory / (bytes_in + bytes_out))    # the copies read and write the host's memory too
    host_s, stream_s = (num_params / rate if rate else float("inf") for rate in (host, stream))
    if allow_both and host and stream:
        host_left = min(host, max(0.0, memory - stream * (bytes_in + bytes_out)) / traffic) if memory else host
        both_s = num_params / (host_left + stream)
        if both_s < 0.9 * min(host_s, stream_s):    # both only if they save a tenth of the time
            return AdamChoice("both", stream / (host_left + stream), both_s, host_s, stream_s)
    if stream_s < host_s:
        return AdamChoice("stream", 1.0, stream_s, host_s, stream_s)
    return AdamChoice("host", 0.0, host_s, host_s, stream_s)
