"""Seconds of one step under a layout, by parts. Pure numbers; every rule names its source.

Ranks are numbered tensor first, then context, data, pipeline: neighbours of a node communicate most often (Narayanan et al.
2021, section 3; Megatron-LM's default order). Chapter 05 puts data outermost.
"""

from math import gcd

from pstar.planner.gpus import Cluster
from pstar.planner.layout_memory import Layout, LayoutJob, costs_of, pstar_bytes, stage_parameters
from pstar.planner.shares import ceil_div, pstar_traffic, tensor_traffic

PARTS = ("compute", "bubble", "tensor", "context", "pipeline", "data", "host", "update")
Seconds = dict[str, float]


def link_of(cluster: Cluster, inner: int, size: int) -> tuple[float, float]:
    """(bytes per second each way, seconds of a ring's step) of a group of `size` ranks whose neighbours are `inner` apart.

    A group inside one node has its links. One that leaves the node shares the node's adapters with the node's other groups;
    its ring crosses each border once, so `inside` of its ranks in a node use one share of them together.
    """
    inside = gcd(size, cluster.per_node // inner) if cluster.per_node % inner == 0 else 1
    if inside == size:
        return cluster.link_speed, cluster.link_latency_s
    return min(cluster.link_speed, cluster.node_link_speed * inside / cluster.per_node), cluster.node_latency_s


def micro_batch_seconds(cluster: Cluster, job: LayoutJob, layout: Layout) -> Seconds:
    """Seconds of one micro-batch in the slowest stage, the last one: forward, backward, tensor, context, pipeline.

    Compute: 24 B T C^2 + 4 B T^2 C operations a block, 2 B T C V for the logits, twice as many backward, with recomputation
    once more for blocks (Narayanan et al. 2021, appendix); in fp32 at half the speed (TF32). Tensor: all-reduces that
    nothing hides (Shoeybi et al. 2019, section 3). Context: keys and values go round a ring, in backward with their
    gradients, hidden behind attention's products (Liu et al. 2023, Ring Attention). Pipeline: an output and its gradient.
    """
    shape, c = job.shape, job.shape.hidden
    _, activation, value = costs_of(job, layout)
    t, p, splits = layout.tensor, layout.pipeline, layout.context
    layers, tokens = shape.layers // p, layout.micro_batch * job.seq_len // splits
    speed = cluster.flops * cluster.fraction / (2 if job.precision == "fp32" else 1)
    attention = 4.0 * tokens * job.seq_len * c / t / speed
    block = 24.0 * tokens * c * c / t / speed + attention
    forward = layers * block + 2.0 * tokens * c * shape.vocab / t / speed
    found = {"forward": forward, "backward": 2 * forward + (layers * block if layout.recompute else 0.0),
             "tensor": 0.0, "context": 0.0, "pipeline": 0.0}  # fmt: skip
    if t > 1:
        rate, latency = link_of(cluster, 1, t)
        ends = 2 if p == 1 else 1
        calls = (5 if layout.recompute else 4) * layers + ends
        moved = tensor_traffic(value, tokens, c, layers, t, layout.recompute, ends)
        found["tensor"] = moved / rate + calls * 2 * (t - 1) * latency
    if splits > 1:
        rate, latency = link_of(cluster, t, splits)
        passes = layers * (4 if layout.recompute else 3) * (splits - 1)
        moving = passes * (2 * value * tokens * c / t / rate + latency)
        hidden = layers * (4 if layout.recompute else 3) * attention
        found["context"] = max(0.0, moving - hidden)
    if p > 1:
        rate, latency = link_of(cluster, t * splits * layout.data, p)
        found["pipeline"] = 2 * (activation["input"] * tokens * c / rate + latency)
    return found


def data_seconds(cluster: Cluster, job: LayoutJob, layout: Layout, micro: Seconds) -> float:
    """Seconds in which ranks wait for the collectives of data parallelism and ZeRO.

    Rings of (s - 1) / s bytes over s = data x context ranks, one for each block and one for the rest (Patarasuk and Yuan
    2009). Stage 0 reduces and gathers gradients once; stages 1 and 2 reduce gradients, once or in every micro-batch, and
    gather parameters after the update; stage 3 gathers parameters in forward and in backward of every micro-batch
    (Rajbhandari et al. 2020, section 7). Gradients hide behind backward of the micro-batches that reduce them, stage 3
    behind all compute (Li et al. 2020, section 3.2). What comes last, one unit's share, hides behind nothing, nor does the
    gathering after the update.
    """
    if layout.shards == 1:
        return 0.0
    costs = costs_of(job, layout)[0]
    outside, block, layers = stage_parameters(job, layout, 0)
    rate, latency = link_of(cluster, layout.tensor, layout.shards)
    micros = layout.micro_batches(job)

    def ring(num_bytes: int) -> float:
        """One reduce-scatter or one all-gather of all units."""
        return num_bytes * (layout.shards - 1) / layout.shards / rate + (layers + 1) * (layout.shards - 1) * latency

    total = outside + layers * block
    gradients, parameters = ring(costs["gradients"] * total), ring(costs["parameters"] * total)
    if layout.zero == 3:
        moving, window = 2 * parameters + gradients, micro["forward"] + micro["backward"]
    else:
        moving, window = (2 if layout.zero == 0 else 1) * gradients, micro["backward"]
    times = micros if layout.zero >= 2 else 1
    waiting = times * max(moving - window, moving / (layers + 1))
    return waiting + (parameters if layout.zero in (1, 2) else 0.0)


def host_seconds(cluster: Cluster, job: LayoutJob, layout: Layout, micro: Seconds) -> float:
    """Seconds in which a GPU waits for its host, with the optimizer's states there (Ren et al. 2021, ZeRO-Offload).

    Reduced gradients go out, at stages 2 and 3 in every micro-batch and hidden behind its backward; the host's Adam reads
    and writes the states at the speed of its memory, which the node's ranks share; parameters come back.
    """
    if not layout.offload:
        return 0.0
    costs = costs_of(job, layout)[0]
    own = own_parameters(job, layout)
    out = costs["gradients"] * own / cluster.pcie_speed
    out = layout.micro_batches(job) * max(0.0, out - micro["backward"]) if layout.zero > 1 else out
    adam = own * adam_bytes(costs) / (cluster.host_speed / cluster.per_node)
    return out + adam + costs["parameters"] * own / cluster.pcie_speed


def own_parameters(job: LayoutJob, layout: Layout) -> int:
    """Parameters whose states a rank of the first stage updates."""
    outside, block, layers = stage_parameters(job, layout, 0)
    if layout.zero == 0 and not layout.pstar:
        return outside + layers * block
    return ceil_div(outside, layout.shards) + layers * ceil_div(block, layout.shards)


def adam_bytes(costs: dict[str, int]) -> int:
    """Bytes that the update of one parameter reads and writes: the gradient is read, the others are read and written."""
    return costs["gradients"] + 2 * (costs["parameters"] + costs["masters"] + costs["moments"])


def pstar_seconds(cluster: Cluster, job: LayoutJob, layout: Layout, micro: Seconds) -> Seconds:
    """Seconds of a step of pstar: as pstar.planner.predict says, copies overlap with compute, and then Adam runs on the
    device and on the host at the same time. Collectives hide behind compute as those of ZeRO do: the reduction behind the
    last backward; the gathering behind the first forward, or, if chunks are evicted and gathered anew, behind the rest. If
    each node has all chunks, gathering stays inside, and nodes sum each rank's gradients after the reduction inside (Zhao et
    al. 2023, FSDP, section 3.2.2).
    """
    costs, micros = costs_of(job, layout)[0], layout.micro_batches(job)
    kinds, filled = pstar_bytes(cluster, job, layout)
    outside, block, layers = stage_parameters(job, layout, 0)
    room = max(0, cluster.usable_gpu_bytes - kinds["activations"]) - filled
    moved = pstar_traffic(costs, outside + layers * block, layout.owners, micros, room)
    each, states = adam_bytes(costs), costs["masters"] + costs["moments"]
    if filled:    # for updates on the device gradients and parameters are copied there, and parameters back
        near_params = kinds["optimizer"] // states
        moved["host_in"] += (costs["gradients"] + costs["parameters"]) * near_params
        moved["host_out"] += (costs["gradients"] + costs["parameters"]) * near_params
    compute = micros * (micro["forward"] + micro["backward"])
    host = max(moved["host_in"], moved["host_out"]) / cluster.pcie_speed
    waiting = 0.0
    if layout.data > 1:
        rate, latency = link_of(cluster, 1, layout.owners)
        steps = (layers + 1) * (layout.owners - 1) * latency
        own, nodes = costs["gradients"] * ceil_div(outside + layers * block, layout.owners), layout.replicas
        node_rate, node_latency = link_of(cluster, layout.owners, nodes)
        between = 2 * own * (nodes - 1) / nodes / node_rate + 2 * (layers + 1) * (nodes - 1) * node_latency
        evicted = room < costs["parameters"] * (outside + layers * block)
        window = compute - micro["backward"] if evicted else micro["forward"]
        waiting = (max(0.0, moved["gather"] / rate + steps - window)
                   + max(0.0, moved["reduce"] / rate + steps + between - micro["backward"]))  # fmt: skip
    far = kinds["host_optimizer"] / states * each / (cluster.host_speed / cluster.per_node)
    near = kinds["optimizer"] / states * each / cluster.memory_speed
    return {"compute": compute, "data": waiting, "host": max(0.0, host - compute - waiting), "update": max(near, far)}


def seconds_of(cluster: Cluster, job: LayoutJob, layout: Layout) -> Seconds:
    """Seconds of one step by PARTS; their sum is the step.

    The slowest stage sets the pace of m + p - 1 rounds; p - 1 of them are the bubble (Huang et al. 2019, section 2.3;
    Narayanan et al. 2021, section 2.2).
    """
    micro, found = micro_batch_seconds(cluster, job, layout), dict.fromkeys(PARTS, 0.0)
    if layout.pstar:
        return found | pstar_seconds(cluster, job, layout, micro)
    rounds = layout.micro_batches(job) + layout.pipeline - 1
    costs = costs_of(job, layout)[0]
    found["compute"] = layout.micro_batches(job) * (micro["forward"] + micro["backward"])
    found["bubble"] = (layout.pipeline - 1) * (micro["forward"] + micro["backward"])
    for part in ("tensor", "context", "pipeline"):
        found[part] = rounds * micro[part]
    found["data"] = data_seconds(cluster, job, layout, micro)
    found["host"] = host_seconds(cluster, job, layout, micro)
    if not layout.offload:
        found["update"] = own_parameters(job, layout) * adam_bytes(costs) / cluster.memory_speed
    return found
