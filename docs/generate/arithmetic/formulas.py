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
"""

from __future__ import annotations

from typing import Any

Job = dict[str, Any]
Bytes = dict[str, int]

PIPELINES = ("layer_split", "gpipe", "1f1b", "interleaved")
ZERO = ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
REPLICAS = ("single", "ddp", "horovod")
STRATEGIES = ("single", "server", "ddp", "horovod", *PIPELINES, "tensor", *ZERO, "pstar")
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
HOST_KINDS = ("host_parameters", "host_gradients", "host_optimizer", "host_buffers")
HOROVOD_FUSION_BYTES = 64 * 2**20
GIB = 2**30


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


# ---- the model --------------------------------------------------------------------------------------------------------


def block_parameters(n_embd: int) -> int:
    """Parameters of a block: two norms 4C, attention 4C^2 + 4C, MLP 8C^2 + 5C. (Radford et al. 2019, section 2.3.)"""
    return 12 * n_embd**2 + 13 * n_embd


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


def parameter_costs(strategy: str, precision: str) -> Bytes:
    """Bytes per parameter at the end of backward: {parameters, gradients, masters, moments}.

        fp32         4 + 4 +  8         the parameter is its own master
        O1           6 + 4 +  8         fp32 weights and 16-bit copies for the matrix products
        O2, ZeRO     2 + 2 + 12         16 bit, an fp32 master, two fp32 moments
        O3           2 + 2 +  4         everything in 16 bit, also the moments
        pstar bf16   2 + 2 + 10         the master split: its high half is the parameter
        pstar fp16   2 + 2 + 12

    Micikevicius et al. 2018, section 3.1 (masters); Rajbhandari et al. 2020, section 3.1 (the 16 bytes). For the update, O2
    and ZeRO convert the 16-bit gradients to fp32. These copies are not counted here: by then the activations are freed.
    """
    if precision == "fp32":
        return {"parameters": 4, "gradients": 4, "masters": 0, "moments": 8}
    if precision == "O1":
        return {"parameters": 6, "gradients": 4, "masters": 0, "moments": 8}
    if precision == "O3":
        return {"parameters": 2, "gradients": 2, "masters": 0, "moments": 4}
    half = strategy == "pstar" and precision == "bf16"
    return {"parameters": 2, "gradients": 2, "masters": 2 if half else 4, "moments": 8}


def value_bytes(precision: str) -> int:
    """Bytes of one value in a matrix product."""
    return 4 if precision == "fp32" else 2


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
    c, p, strategy = job["n_embd"], job["ranks"], job["strategy"]
    if strategy in PIPELINES and p > 1:
        own = job["n_layer"] // p * block_parameters(c)
        if rank == 0:
            own += (job["vocab_size"] + job["n_positions"]) * c
        if rank == p - 1:
            own += (job["vocab_size"] + 2) * c
        return own
    if strategy == "tensor":
        block = 6 * c + ceil_div(12 * c**2 + 7 * c, p)
        return job["n_layer"] * block + (ceil_div(job["vocab_size"], p) + job["n_positions"] + 2) * c
    return num_parameters(job)


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
    costs, total = parameter_costs("pstar", job["precision"]), num_parameters(job)
    own = ceil_div(total, job["ranks"])
    wanted = {
        "parameters": costs["parameters"] * own, "buffers": costs["parameters"] * (total - own),
        "gradients": costs["gradients"] * own, "optimizer": (costs["masters"] + costs["moments"]) * own,
    }  # fmt: skip
    found, room = no_bytes(), near_budget(job)
    for kind, amount in wanted.items():
        near = min(room, amount)
        found[kind], room = near, room - near
        if kind != "buffers":
            found["host_" + kind] = amount - near
    return found


def no_bytes() -> Bytes:
    """0 bytes for every kind."""
    return dict.fromkeys((*KINDS, *HOST_KINDS), 0)


def zero_states(job: Job) -> Bytes:
    """ZeRO: bytes of a rank; the stage decides what is sharded. Gradients are counted at the end of backward.

    Rajbhandari et al. 2020, section 5; Ren et al. 2021 (ZeRO-Offload), section 3: host memory holds the states and the
    reduced gradients, here at stage 3 also the parameters. In fp32 the parameters are the masters, unless the masters are
    offloaded and the parameters are not.
    """
    costs, p, stage = parameter_costs(job["strategy"], job["precision"]), job["ranks"], zero_stage(job["strategy"])
    offload, own = job["strategy"].endswith("_offload"), sharded_parameters(job)
    masters = 4 if offload and stage < 3 else costs["masters"]
    found = no_bytes()
    parameters, gradients = (own if stage == 3 else p * own), (num_parameters(job) if stage == 1 else own)
    found["host_parameters" if offload and stage == 3 else "parameters"] = costs["parameters"] * parameters
    found["host_gradients" if offload and stage > 1 else "gradients"] = costs["gradients"] * gradients
    found["host_optimizer" if offload else "optimizer"] = (masters + costs["moments"]) * own
    # Buffers: gradients of two units on their way; at stage 3 also the parameters of two blocks and those in no block.
    outside, block = outside_parameters(job), block_parameters(job["n_embd"])
    found["buffers"] = costs["gradients"] * (outside + block)
    if stage == 3:
        found["buffers"] += costs["parameters"] * (outside + min(2, job["n_layer"]) * block)
    return found


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


def activation_costs(precision: str) -> Bytes:
    """Bytes per token and channel that backward needs.

    {whole, cut}: in a block; input: a block's input alone; first, last: before and after the blocks.

    Korthikanti et al. 2022, section 4, equations 1 and 2: 10 + 24 in 16 bit without the attention matrix, which a fused
    kernel never stores. Tensor parallelism cuts the 24. In fp32 everything is twice as large. O1 and O2 keep the inputs of a
    block's two norms in fp32, 2 bytes more for each. Under O1 the residual path is also in fp32.
    """
    if precision == "fp32":
        return {"whole": 20, "cut": 48, "input": 4, "first": 4, "last": 8}
    if precision == "O1":
        return {"whole": 14, "cut": 24, "input": 4, "first": 4, "last": 6}
    if precision == "O2":
        return {"whole": 14, "cut": 24, "input": 2, "first": 2, "last": 6}
    return {"whole": 10, "cut": 24, "input": 2, "first": 2, "last": 4}


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

    Blocks keep what backward needs. With checkpointing they keep their inputs, and one block at a time is computed again
    (Chen et al. 2016). At the loss, logits and their gradient are in the model's precision, log-probabilities and theirs in
    fp32. Other live micro-batches keep only log-probabilities. The worst moment is the loss or a recomputed block's
    backward.
    """
    costs, tokens, strategy = activation_costs(job["precision"]), micro_tokens(job), job["strategy"]
    cuts, stages = (job["ranks"], 1) if strategy == "tensor" else (1, job["ranks"] if strategy in PIPELINES else 1)
    live, width = live_micro_batches(job, rank), tokens * job["n_embd"]
    is_first, is_last = rank == 0 or stages == 1, rank == stages - 1 or stages == 1
    block = (costs["whole"] * cuts + costs["cut"]) * width // cuts
    kept = live * (job["n_layer"] // (stages * stages_of(job))) * (costs["input"] * width if job["checkpointing"] else block)
    micros = min(live, job["micro_batches"])
    around = micros * width * ((costs["first"] if is_first else 0) + (costs["last"] if is_last else 0))
    ends = 1 if strategy == "interleaved" else live
    per_logit = 4 * ends + 4 + 2 * value_bytes(job["precision"])
    logits = tokens * ceil_div(job["vocab_size"], cuts) * per_logit if is_last else 0
    return kept + around + max(logits, block if job["checkpointing"] else 0)


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


def ring_bytes(num_bytes: int, p: int) -> int:
    """Bytes that each rank sends, and receives, in an all-reduce: 2 (p - 1) / p. (Patarasuk and Yuan 2009, section 3.)"""
    return 2 * num_bytes * (p - 1) // p


def tensor_bytes(job: Job) -> int:
    """Tensor parallelism: all-reduces of B T C.

    Each block has two in forward and two in backward (Shoeybi et al. 2019, section 3), and one more with checkpointing. The
    embedding has one, the head has one, and the loss reduces three numbers per token.
    """
    t, tokens = job["ranks"], micro_tokens(job)
    calls = (5 if job["checkpointing"] else 4) * job["n_layer"]
    own = calls * ring_bytes(value_bytes(job["precision"]) * tokens * job["n_embd"], t)
    own += 2 * ring_bytes(4 * tokens * job["n_embd"], t)
    return job["micro_batches"] * (own + ring_bytes(4 * tokens, t) + ring_bytes(8 * tokens, t))


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
        gradients = costs["gradients"] * total * (p - 1) // p
        away, states_bytes = pstar_away(job), costs["masters"] + costs["moments"]
        parameters = costs["parameters"] * (total + away * (2 * m - 1)) * (p - 1) // p
        far, back = pstar_states(job)["host_optimizer"] // states_bytes, ceil_div(away, p)
        found["host_out"] = costs["gradients"] * far
        found["host_in"] = costs["parameters"] * (max(far, back) + back * (2 * m - 1))
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


def bubble_fraction(strategy: str, p: int, m: int, v: int = 1) -> float:
    """Share of the time that a pipeline's ranks wait: (p - 1) / (v m + p - 1), or (p - 1) / p without overlap.

    Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    rounds = 1 if strategy == "layer_split" else m * (v if strategy == "interleaved" else 1)
    return (p - 1) / (rounds + p - 1)


def compute_seconds(job: Job, flops_per_s: float) -> float:
    """Seconds of a step on ranks that each reach `flops_per_s`, including a pipeline's bubble."""
    seconds = step_flops(job) / (job["ranks"] * flops_per_s)
    if job["strategy"] in PIPELINES:
        seconds /= 1 - bubble_fraction(job["strategy"], job["ranks"], job["micro_batches"], stages_of(job))
    return seconds


def link_seconds(found: Bytes, bytes_per_s: float) -> float:
    """Seconds for what traffic() returned, over a link that carries `bytes_per_s` in both directions at the same time."""
    return max(sent_bytes(found), received_bytes(found)) / bytes_per_s
