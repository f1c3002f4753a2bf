"""The arithmetic of the course: bytes a rank holds, bytes it sends, seconds it waits. Pure functions of numbers.

docs/assets/tools/formulas.js has the same functions for the calculators in the pages. tests/docs/test_tools.py compares the
two files. tests/docs/test_formulas.py compares these formulas with what the chapters' own programs count.

A job is a dict of numbers and names, so that it travels as JSON:

    n_layer, n_embd, n_head, n_positions, vocab_size    the model, a GPT-2 with a tied head and an MLP of width 4 n_embd
    strategy, precision                                 from STRATEGIES, and from precisions_of(strategy)
    ranks                                               p; the one strategy uses all of them
    batch, seq_len, micro_batches                       the GLOBAL batch in sequences; m micro-batches make a step
    checkpointing                                       True: a block keeps only its input and is computed again
    virtual_stages                                      v, for interleaved only
    near_percent                                        for pstar only: near budget in per cent of all ranks' model data

Bytes are whole numbers. A division that leaves a remainder is rounded up for held bytes and down for sent bytes.
What depends on no strategy is in pstar/planner/shares.py, which the planner of layouts uses too.
"""

from __future__ import annotations

from typing import Any

from pstar.planner.shares import (
    GIB,
    HOST_KINDS,
    KINDS,
    Bytes,
    activation_bytes,
    activation_costs,
    block_parameters,
    bubble_fraction,
    ceil_div,
    no_bytes,
    parameter_costs,
    pstar_shares,
    pstar_traffic,
    ring_bytes,
    stage_outside,
    tensor_traffic,
    value_bytes,
    zero_shares,
)

Job = dict[str, Any]

PIPELINES = ("layer_split", "gpipe", "1f1b", "interleaved")
ZERO = ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
REPLICAS = ("single", "ddp", "horovod")
STRATEGIES = ("single", "server", "ddp", "horovod", *PIPELINES, "tensor", *ZERO, "pstar")
HOROVOD_FUSION_BYTES = 64 * 2**20


# ---- the model --------------------------------------------------------------------------------------------------------


def outside_parameters(job: Job) -> int:
    """Parameters in no block: both embeddings and the last norm. The tied head counts once."""
    return (job["vocab_size"] + job["n_positions"] + 2) * job["n_embd"]


def num_parameters(job: Job) -> int:
    """All parameters, counted as gpt2_chinese/model/config.py counts them."""
    return outside_parameters(job) + job["n_layer"] * block_parameters(job["n_embd"])


def num_tensors(job: Job) -> int:
    """Parameter tensors: 12 in a block, 4 outside."""
    return 12 * job["n_layer"] + 4


# ---- what a parameter costs -------------------------------------------------------------------------------------------


def precisions_of(strategy: str) -> tuple[str, ...]:
    """The precisions that the course offers for a strategy.

    Replicas: optimization levels O0 (here fp32) to O3. A model that is split or served: autocast (O1). ZeRO and pstar:
    16 bit with masters.
    """
    if strategy in REPLICAS:
        return ("fp32", "O1", "O2", "O3")
    if strategy in ZERO or strategy == "pstar":
        return ("fp32", "bf16", "fp16")
    return ("fp32", "O1")


# ---- who holds what ---------------------------------------------------------------------------------------------------


def refusal(job: Job) -> str:
    """Why no program of the course runs the job, '' if one does.

    The reason is ranks, precision, length, batch, layers, heads or micros.
    """
    p, m, strategy = job["ranks"], job["micro_batches"], job["strategy"]
    split = strategy in PIPELINES or strategy == "tensor"
    if strategy == "single" and p != 1:
        return "ranks"
    if job["precision"] not in precisions_of(strategy):
        return "precision"
    if job["seq_len"] > job["n_positions"]:
        return "length"
    if job["batch"] % ((1 if split else p) * m):
        return "batch"
    if strategy in PIPELINES and job["n_layer"] % (p * stages_of(job)):
        return "layers"
    if strategy == "tensor" and job["n_head"] % p:
        return "heads"
    if strategy == "interleaved" and (p == 1 or m % p):
        return "micros"
    return ""


def stages_of(job: Job) -> int:
    """v, the number of stages on a rank."""
    return job["virtual_stages"] if job["strategy"] == "interleaved" else 1


def held_parameters(job: Job, rank: int) -> int:
    """Parameters whose whole state this rank would hold if only the model were split.

    Pipeline: its blocks; the first and the last rank also hold the parameters in no block, and both hold the tied weight.
    Tensor (Shoeybi et al. 2019, section 3): matrices, their first biases and the vocabulary are cut. Norms, positions and
    the biases after a sum are not.
    """
    tensor, stages = split_of(job)
    outside = stage_outside(job["n_embd"], job["n_positions"], job["vocab_size"], tensor, stages, rank if stages > 1 else 0)
    return outside + job["n_layer"] // stages * block_parameters(job["n_embd"], tensor)


def split_of(job: Job) -> tuple[int, int]:
    """Ranks that cut each block, and ranks that share the blocks."""
    p, strategy = job["ranks"], job["strategy"]
    return p if strategy == "tensor" else 1, p if strategy in PIPELINES else 1


def sharded_parameters(job: Job) -> int:
    """ZeRO: 1/p of every unit, padded until p divides it. A unit is a block, or all parameters in no block."""
    p = job["ranks"]
    return ceil_div(outside_parameters(job), p) + job["n_layer"] * ceil_div(block_parameters(job["n_embd"]), p)


def zero_stage(strategy: str) -> int:
    """1, 2 or 3."""
    return int(strategy[4])


def near_budget(job: Job) -> int:
    """pstar: near bytes that each rank may use, a share of the model data of all ranks."""
    costs = parameter_costs("pstar", job["precision"])
    return job["near_percent"] * sum(costs.values()) * num_parameters(job) // 100


def pstar_states(job: Job) -> Bytes:
    """pstar: a rank owns 1/p of everything. Near is filled in this order: own parameters, gathered ones, gradients, states.

    Fang et al. 2023 (PatrickStar), sections 5 and 8. The padding of chunks is not counted.
    """
    return pstar_shares(parameter_costs("pstar", job["precision"]), num_parameters(job), job["ranks"], near_budget(job))


def zero_states(job: Job) -> Bytes:
    """ZeRO: bytes of a rank. With offload, stage 3 keeps the parameters in host memory, too."""
    stage, offload = zero_stage(job["strategy"]), job["strategy"].endswith("_offload")
    where = "none" if not offload else "optimizer,params" if stage == 3 else "optimizer"
    costs = parameter_costs(job["strategy"], job["precision"])
    block = block_parameters(job["n_embd"])
    return zero_shares(costs, outside_parameters(job), block, job["n_layer"], job["ranks"], stage, where)


def states(job: Job, rank: int = 0) -> Bytes:
    """Bytes of a rank by kind, without activations. With a device, kinds called host_... are in host memory.

    Buffers: a parameter server holds a message of each worker (Li et al. 2014). DDP holds one copy of the gradients in
    buckets (Li et al. 2020, section 3.2). Horovod holds one fusion buffer (Sergeev and Del Balso 2018, section 4), of the
    size that chapter 03 uses without --fusion-mb.
    """
    strategy, p = job["strategy"], job["ranks"]
    if strategy == "pstar":
        return pstar_states(job)
    if strategy in ZERO:
        return zero_states(job)
    costs, own, found = parameter_costs(strategy, job["precision"]), held_parameters(job, rank), no_bytes()
    found["parameters"], found["gradients"] = costs["parameters"] * own, costs["gradients"] * own
    if strategy != "server" or rank == 0:
        found["optimizer"] = (costs["masters"] + costs["moments"]) * own
    if p > 1 and strategy == "server":
        found["host_buffers"] = 4 * own * (p - 1 if rank == 0 else 1)
    if p > 1 and strategy in ("ddp", "horovod"):
        found["buffers"] = min(found["gradients"], HOROVOD_FUSION_BYTES) if strategy == "horovod" else found["gradients"]
    return found


# ---- activations ------------------------------------------------------------------------------------------------------


def micro_tokens(job: Job) -> int:
    """Tokens of one micro-batch on one rank."""
    split = job["strategy"] in PIPELINES or job["strategy"] == "tensor"
    return ceil_div(job["batch"], (1 if split else job["ranks"]) * job["micro_batches"]) * job["seq_len"]


def live_micro_batches(job: Job, rank: int) -> int:
    """The most forwards of a rank whose backward has not run yet.

    GPipe: m (Huang et al. 2019, section 2.3). 1F1B: p - rank (Narayanan et al. 2021, section 2.2.1). Interleaved: more, each
    of a smaller stage (section 2.2.2).
    """
    p, m, v, strategy = job["ranks"], job["micro_batches"], stages_of(job), job["strategy"]
    if strategy == "gpipe":
        return m
    if strategy == "1f1b":
        return min(m, p - rank)
    if strategy == "interleaved":
        return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    return 1


def activations(job: Job, rank: int = 0) -> int:
    """Bytes of activations at the worst moment of a step.

    At the loss, logits and their gradient are in the model's precision, log-probabilities and theirs in fp32. Other live
    micro-batches keep only log-probabilities.
    """
    tokens, (cuts, stages) = micro_tokens(job), split_of(job)
    live = live_micro_batches(job, rank)
    ends = 1 if job["strategy"] == "interleaved" else live
    return activation_bytes(
        activation_costs(job["precision"]), 4 * ends + 4 + 2 * value_bytes(job["precision"]), tokens * job["n_embd"],
        tokens * ceil_div(job["vocab_size"], cuts), job["n_layer"] // (stages * stages_of(job)), cuts, live,
        min(live, job["micro_batches"]), rank == 0 or stages == 1, rank == stages - 1 or stages == 1,
        job["checkpointing"])  # fmt: skip


def memory(job: Job, rank: int = 0) -> Bytes:
    """Bytes of a rank by kind. Their sum is an upper bound: gradients are complete only when most activations are freed."""
    found = states(job, rank)
    found["activations"] = activations(job, rank)
    return found


def device_bytes(found: Bytes) -> int:
    """The device's part of what memory() returned."""
    return sum(found[kind] for kind in KINDS)


def host_bytes(found: Bytes) -> int:
    """The host memory's part of what memory() returned."""
    return sum(found[kind] for kind in HOST_KINDS)


def usable_bytes(gpu_gib: int) -> int:
    """GPU memory that a program can use: the driver, the context and the libraries take 1 GiB and 5 %."""
    return gpu_gib * GIB * 95 // 100 - GIB


# ---- traffic ----------------------------------------------------------------------------------------------------------


def tensor_bytes(job: Job) -> int:
    """Tensor parallelism: all-reduces of B T C, of all micro-batches."""
    return job["micro_batches"] * tensor_traffic(value_bytes(job["precision"]), micro_tokens(job), job["n_embd"],
                                                 job["n_layer"], job["ranks"], job["checkpointing"])  # fmt: skip


def boundaries(job: Job, rank: int) -> Bytes:
    """Outputs of one micro-batch that a pipeline's rank sends and receives in forward; backward swaps the two."""
    p, v = job["ranks"], stages_of(job)
    if p == 1:
        return {"sent": 0, "received": 0}
    return {"sent": v - (rank == p - 1), "received": v - (rank == 0)}


def pstar_away(job: Job) -> int:
    """pstar: number of parameters for which near has no room."""
    room = near_budget(job) // parameter_costs("pstar", job["precision"])["parameters"]
    return max(0, num_parameters(job) - room)


def traffic(job: Job, rank: int = 0) -> Bytes:
    """Bytes that a rank sends and receives in a step, by kind.

    Keys: sent_gradients, sent_parameters, sent_activations, and received_... for each; host_out and host_in for copies
    between a device and its host.

        server    rank 0: (p - 1) times gradients in and weights out, fp32        Li et al. 2014
        ddp       2 (p - 1) / p of the gradients                                  Patarasuk and Yuan 2009
        pipeline  B T C in fp32 at each boundary, forward and backward; the tied weight's gradient between the two ends
        zero      gradients m times or once, parameters once or 2 m times,        Rajbhandari et al. 2020, section 7
                  each (p - 1) / p; parameters in no block are gathered once per micro-batch
        pstar     gradients once; parameters once, or in every pass without room near    Fang et al. 2023, section 7
    """
    strategy, p, m = job["strategy"], job["ranks"], job["micro_batches"]
    costs, total = parameter_costs(strategy, job["precision"]), num_parameters(job)
    found = {f"{way}_{kind}": 0 for way in ("sent", "received") for kind in ("gradients", "parameters", "activations")}
    found["host_out"] = found["host_in"] = 0
    if strategy == "server":
        others = p - 1 if rank == 0 else 1
        up, down = ("received", "sent") if rank == 0 else ("sent", "received")
        found[f"{up}_gradients"] = found[f"{down}_parameters"] = others * 4 * total
        return found
    if strategy in PIPELINES:
        between = boundaries(job, rank)
        each = m * 4 * micro_tokens(job) * job["n_embd"]
        found["sent_activations"] = found["received_activations"] = each * (between["sent"] + between["received"])
        if p > 1 and rank in (0, p - 1):
            found["sent_gradients"] = found["received_gradients"] = 4 * job["vocab_size"] * job["n_embd"]
        return found
    gradients = parameters = moved = 0
    if strategy == "tensor":
        moved = tensor_bytes(job)
    elif strategy in ZERO:
        stage, own = zero_stage(strategy), sharded_parameters(job)
        gradients = costs["gradients"] * own * (p - 1) * (m if stage > 1 else 1)
        outside = ceil_div(outside_parameters(job), p)
        parameters = costs["parameters"] * (p - 1) * (m * (2 * own - outside) if stage == 3 else own)
        if strategy.endswith("_offload"):
            found["host_out"] = costs["gradients"] * own * (m if stage > 1 else 1)
            found["host_in"] = costs["parameters"] * (m * (2 * own - outside) if stage == 3 else own)
    elif strategy == "pstar":
        own = pstar_traffic(costs, total, p, m, near_budget(job))
        gradients, parameters = own["reduce"], own["gather"]
        found["host_out"], found["host_in"] = own["host_out"], own["host_in"]
    else:
        gradients = ring_bytes(costs["gradients"] * total, p)
    found["sent_gradients"] = found["received_gradients"] = gradients
    found["sent_parameters"] = found["received_parameters"] = parameters
    found["sent_activations"] = found["received_activations"] = moved
    return found


def sent_bytes(found: Bytes) -> int:
    """The sum of all sent bytes that traffic() returned."""
    return found["sent_gradients"] + found["sent_parameters"] + found["sent_activations"]


def received_bytes(found: Bytes) -> int:
    """The sum of all received bytes that traffic() returned."""
    return found["received_gradients"] + found["received_parameters"] + found["received_activations"]


# ---- time -------------------------------------------------------------------------------------------------------------


def step_flops(job: Job) -> int:
    """Flops of a step over all ranks.

    Forward: 24 B T C^2 + 4 B T^2 C per block, and 2 B T C V for the logits. Backward: twice as much. With checkpointing the
    blocks' forward runs once more. (Narayanan et al. 2021, appendix.)
    """
    tokens, c = job["batch"] * job["seq_len"], job["n_embd"]
    blocks = job["n_layer"] * (24 * tokens * c**2 + 4 * tokens * job["seq_len"] * c)
    return (4 if job["checkpointing"] else 3) * blocks + 3 * 2 * tokens * c * job["vocab_size"]


def compute_seconds(job: Job, flops_per_s: float) -> float:
    """Seconds of a step on ranks that each reach `flops_per_s`, including a pipeline's bubble."""
    seconds = step_flops(job) / (job["ranks"] * flops_per_s)
    if job["strategy"] in PIPELINES:
        seconds /= 1 - bubble_fraction(job["strategy"], job["ranks"], job["micro_batches"], stages_of(job))
    return seconds


def link_seconds(found: Bytes, bytes_per_s: float) -> float:
    """Seconds for what traffic() returned, over a link that carries `bytes_per_s` in both directions at the same time."""
    return max(sent_bytes(found), received_bytes(found)) / bytes_per_s
