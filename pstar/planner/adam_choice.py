"""Where the update of groups whose states are far is computed: by the host, by the GPU, or by both. Pure numbers.

Exact clipping needs all gradients before the first update, so the update is a phase of its own, in which the host's cores
and the link are both free. Then the host computes Adam at the speed of its memory (or of its cores), or the states are
streamed through the GPU at the speed of the link. Both read and write the same host memory, so doing both at once gains
what the host's memory has left.
"""

from dataclasses import dataclass

from pstar.errors import ConfigError
from pstar.layout.budget import Costs


@dataclass(frozen=True)
class Speeds:
    """What was measured, for one rank: its share of what ranks share. 0 for what a machine has not."""

    host_adam_params_per_s: float
    """Parameters that the host updates in a second."""
    link_bytes_per_s: float
    """Between host and GPU, each way; both ways at once."""
    gpu_memory_bytes_per_s: float
    host_memory_bytes_per_s: float = 0.0
    """Of the host's memory; 0 where it is not known and the two ways are taken as independent."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; give a speed from 0 on")
        if not self.host_adam_params_per_s and not (self.link_bytes_per_s and self.gpu_memory_bytes_per_s):
            raise ConfigError("host_adam_params_per_s is 0, and so is the link or the GPU's memory: nothing could "
                              "compute Adam")


@dataclass(frozen=True)
class AdamChoice:
    """What choose_adam answers."""

    where: str
    """host, stream or both."""
    streamed: float
    """Share of the far parameters that goes through the GPU: 0 for host, 1 for stream."""
    seconds: float
    """Of the update of the far parameters."""
    host_seconds: float
    """Had the host done all of it; inf where it cannot."""
    stream_seconds: float
    """Had the GPU done all of it; inf where it cannot."""


def adam_traffic_bytes(costs: Costs) -> int:
    """Bytes of memory that one update of one parameter reads and writes, by a kernel of one pass.

    Gradient read; parameter and states read and written. 28 in fp32, 26 for bf16 with a split master, and 30 for fp16,
    whose parameter the kernel only writes (28) but which we do not tell apart here. With fp32 accumulation 2 more.
    """
    return costs.grad + 2 * (costs.param + costs.states)


def stream_bytes(costs: Costs) -> tuple[int, int]:
    """(bytes in, bytes out) over the link for one parameter whose states are streamed through the GPU.

    In: states, gradient and parameter. Out: states and parameter.
    """
    return costs.states + costs.grad + costs.param, costs.states + costs.param


def choose_adam(speeds: Speeds, costs: Costs, num_params: int, allow_both: bool = False) -> AdamChoice:
    """Where the Adam update of num_params parameters, whose states are far, is done soonest.

    Args:
        speeds: of one rank.
        costs: bytes of each kind of model data.
        num_params: of this rank's pieces, updated once a step.
        allow_both: whether the two ways may run at once; else the faster one does all of it. Equal ones: the host, which
            moves nothing.

    Raises ConfigError for speeds with which nothing could be updated, and for a negative num_params.
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
        beside = min(host, max(0.0, memory - stream * (bytes_in + bytes_out)) / traffic) if memory else host
        both_s = num_params / (beside + stream)
        if both_s < 0.9 * min(host_s, stream_s):    # a tenth less is worth having two ways at work
            return AdamChoice("both", stream / (beside + stream), both_s, host_s, stream_s)
    if stream_s < host_s:
        return AdamChoice("stream", 1.0, stream_s, host_s, stream_s)
    return AdamChoice("host", 0.0, host_s, host_s, stream_s)
