"""The arithmetic of the course: bytes a rank holds, bytes it sends, seconds it waits. Pure functions of numbers.

docs/assets/tools/formulas.js says the same function by function, for the calculators in the pages; tests/docs/test_tools.py
holds the two together, tests/docs/test_formulas.py holds these to what the chapters' own programs count.

A job is a dict of numbers and names, so that it travels as JSON:

    n_layer, n_embd, n_head, n_positions, vocab_size    the model, a GPT-2 with a tied head and an MLP of width 4 n_embd
    strategy, precision                                 of STRATEGIES, and of precisions_of(strategy)
    ranks                                               p, all of them given to the one strategy
    batch, seq_len, micro_batches                       the GLOBAL batch in sequences; m micro-batches make a step
    checkpointing                                       True: a block keeps its input alone and is computed again
    virtual_stages                                      of interleaved, v
    near_percent                                        of pstar: the near budget, per cent of all ranks' model data

Bytes are whole numbers; what does not divide is rounded up where it is held and down where it is sent.
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
    """All of them, as gpt2_chinese/model/config.py counts."""
    return outside_parameters(job) + job["n_layer"] * block_parameters(job["n_embd"])


def num_tensors(job: Job) -> int:
    """Parameters counted as tensors: 12 in a block, 4 outside."""
    return 12 * job["n_layer"] + 4


# ---- what a parameter costs -------------------------------------------------------------------------------------------


def precisions_of(strategy: str) -> tuple[str, ...]:
    """What the course offers: optimization levels O0 (here fp32) to O3 over replicas, autocast (O1) where a model is split
    or served, and 16 bit with masters in ZeRO and pstar."""
    if strategy in REPLICAS:
        return ("fp32", "O1", "O2", "O3")
    if strategy in ZERO or strategy == "pstar":
        return ("fp32", "bf16", "fp16")
    return ("fp32", "O1")


def parameter_costs(strategy: str, precision: str) -> Bytes:
    """Bytes a parameter when backward has ended: {parameters, gradients, masters, moments}.

        fp32         4 + 4 +  8         the parameter is its own master
        O1           6 + 4 +  8         fp32 weights and the 16-bit copies that products are made of
        O2, ZeRO     2 + 2 + 12         16 bit, an fp32 master, two fp32 moments
        O3           2 + 2 +  4         all in 16 bit, the moments too
        pstar bf16   2 + 2 + 10         the master split: its high half is the parameter
        pstar fp16   2 + 2 + 12

    Micikevicius et al. 2018, section 3.1 (masters); Rajbhandari et al. 2020, section 3.1 (the 16 bytes). O2 and ZeRO turn
    the 16-bit gradients into fp32 ones for the update, when the activations are gone: not counted here.
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
    """Of a value that matrix products are made of."""
    return 4 if precision == "fp32" else 2


# ---- who holds what ---------------------------------------------------------------------------------------------------


def refusal(job: Job) -> str:
    """Why no program of the course runs the job: ranks, precision, length, batch, layers, heads, micros; '' if one does."""
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
    """v: stages of a rank."""
    return job["virtual_stages"] if job["strategy"] == "interleaved" else 1


def held_parameters(job: Job, rank: int) -> int:
    """Parameters whose whole state this rank would hold, if nothing but the model were split.

    Pipeline: its blocks, and at the ends what lies in none; the tied weight is in both. Tensor (Shoeybi et al. 2019,
    section 3): matrices, their first biases and the vocabulary are cut; norms, positions and the biases after a sum are not.
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
    """ZeRO: the p-th of every unit, a block or all that lies in none, padded until p divides it."""
    p = job["ranks"]
    return ceil_div(outside_parameters(job), p) + job["n_layer"] * ceil_div(block_parameters(job["n_embd"]), p)


def zero_stage(strategy: str) -> int:
    """1, 2 or 3."""
    return int(strategy[4])


def near_budget(job: Job) -> int:
    """pstar: what each rank may have near: a share of the model data of all ranks."""
    costs = parameter_costs("pstar", job["precision"])
    return job["near_percent"] * sum(costs.values()) * num_parameters(job) // 100


def pstar_states(job: Job) -> Bytes:
    """pstar: a rank owns a p-th of everything; near holds parameters first, gathered ones too, then gradients, then states.

    Fang et al. 2023 (PatrickStar), sections 5 and 8. Without the padding of chunks.
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
    """A ledger with nothing in it."""
    return dict.fromkeys((*KINDS, *HOST_KINDS), 0)


def zero_states(job: Job) -> Bytes:
    """ZeRO: what is sharded, by stage; gradients as whole as they are when backward has ended.

    Rajbhandari et al. 2020, section 5; Ren et al. 2021 (ZeRO-Offload), section 3: states, and gradients as they are reduced,
    lie in host memory, at stage 3 here parameters too. In fp32 the masters are the parameters unless those are elsewhere.
    """
    costs, p, stage = parameter_costs(job["strategy"], job["precision"]), job["ranks"], zero_stage(job["strategy"])
    offload, own = job["strategy"].endswith("_offload"), sharded_parameters(job)
    masters = 4 if offload and stage < 3 else costs["masters"]
    found = no_bytes()
    parameters, gradients = (own if stage == 3 else p * own), (num_parameters(job) if stage == 1 else own)
    found["host_parameters" if offload and stage == 3 else "parameters"] = costs["parameters"] * parameters
    found["host_gradients" if offload and stage > 1 else "gradients"] = costs["gradients"] * gradients
    found["host_optimizer" if offload else "optimizer"] = (masters + costs["moments"]) * own
    # At work: gradients of two units under way; at stage 3 also the parameters of two blocks and of what lies in none.
    outside, block = outside_parameters(job), block_parameters(job["n_embd"])
    found["buffers"] = costs["gradients"] * (outside + block)
    if stage == 3:
        found["buffers"] += costs["parameters"] * (outside + min(2, job["n_layer"]) * block)
    return found


def states(job: Job, rank: int = 0) -> Bytes:
    """Bytes of a rank by kind, activations left out; host_... lies in host memory where there is a device.

    Buffers: a parameter server holds a message of each worker (Li et al. 2014), DDP one copy of the gradients in buckets
    (Li et al. 2020, section 3.2), Horovod one fusion buffer (Sergeev and Del Balso 2018, section 4),
    as large as chapter 03 makes it unless --fusion-mb is given.
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
    """Bytes a token and channel that backward needs: in a block {whole, cut}, of its input alone, before and after blocks.

    Korthikanti et al. 2022, section 4, equations 1 and 2: 10 + 24 in 16 bit without the attention matrix, which a fused
    kernel never stores; tensor parallel cuts the 24. In fp32 all is twice as large. O1 and O2 keep the input of norms in
    fp32, 2 bytes more for each of two; under O1 the residual path is fp32 too.
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
    """Forwards of a stage whose backward is still to come, at most: GPipe m (Huang et al. 2019, section 2.3), 1F1B p - rank
    (Narayanan et al. 2021, section 2.2.1), interleaved more, each of a smaller stage (2.2.2)."""
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

    Blocks keep what backward needs, or with checkpointing their inputs (Chen et al. 2016) while one block is computed anew.
    At the loss there are logits and their gradient in the model's precision, log-probabilities and theirs in fp32; of other
    live micro-batches the log-probabilities alone. The worst moment is the loss, or the backward of a recomputed block.
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
    """Bytes of a rank by kind. Their sum is a bound: gradients are whole when most activations are gone."""
    found = states(job, rank)
    found["activations"] = activations(job, rank)
    return found


def device_bytes(found: Bytes) -> int:
    """Of what memory() returned, what lies on the device."""
    return sum(found[kind] for kind in KINDS)


def host_bytes(found: Bytes) -> int:
    """Of what memory() returned, what lies in host memory."""
    return sum(found[kind] for kind in HOST_KINDS)


def usable_bytes(gpu_gib: int) -> int:
    """Of a GPU's memory, what a program may count on: 1 GiB and 5 % are the driver's, the context's and the libraries'."""
    return gpu_gib * GIB * 95 // 100 - GIB


# ---- traffic ----------------------------------------------------------------------------------------------------------


def ring_bytes(num_bytes: int, p: int) -> int:
    """What each rank sends, and receives, in an all-reduce: 2 (p - 1) / p. (Patarasuk and Yuan 2009, section 3.)"""
    return 2 * num_bytes * (p - 1) // p


def tensor_bytes(job: Job) -> int:
    """Tensor parallel: all-reduces of B T C, two forward and two backward a block (Shoeybi et al. 2019, section 3), one more
    with checkpointing; one for the embedding, one for the head, and three numbers a token for the loss."""
    t, tokens = job["ranks"], micro_tokens(job)
    calls = (5 if job["checkpointing"] else 4) * job["n_layer"]
    own = calls * ring_bytes(value_bytes(job["precision"]) * tokens * job["n_embd"], t)
    own += 2 * ring_bytes(4 * tokens * job["n_embd"], t)
    return job["micro_batches"] * (own + ring_bytes(4 * tokens, t) + ring_bytes(8 * tokens, t))


def boundaries(job: Job, rank: int) -> Bytes:
    """Of one micro-batch: outputs that a pipeline's rank sends and receives forward; backward it is the other way round."""
    p, v = job["ranks"], stages_of(job)
    if p == 1:
        return {"sent": 0, "received": 0}
    return {"sent": v - (rank == p - 1), "received": v - (rank == 0)}


def pstar_away(job: Job) -> int:
    """pstar: elements of all parameters that near has no room for."""
    room = near_budget(job) // parameter_costs("pstar", job["precision"])["parameters"]
    return max(0, num_parameters(job) - room)


def traffic(job: Job, rank: int = 0) -> Bytes:
    """Bytes a rank sends and receives in a step, by what they are: sent_gradients, sent_parameters, sent_activations, and
    received_...; host_out, host_in: moved between a device and its host.

        server    rank 0: (p - 1) times gradients in and weights out, fp32        Li et al. 2014
        ddp       2 (p - 1) / p of the gradients                                  Patarasuk and Yuan 2009
        pipeline  B T C in fp32 at each boundary, there and back; the tied weight's gradient between the ends
        zero      gradients m times or once, parameters once or 2 m times,        Rajbhandari et al. 2020, section 7
                  each (p - 1) / p; what lies in no block is gathered once a micro-batch
        pstar     gradients once; parameters once, those without room near in every pass    Fang et al. 2023, section 7
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
    """Of what traffic() returned, all that is sent."""
    return found["sent_gradients"] + found["sent_parameters"] + found["sent_activations"]


def received_bytes(found: Bytes) -> int:
    """Of what traffic() returned, all that is received."""
    return found["received_gradients"] + found["received_parameters"] + found["received_activations"]


# ---- time -------------------------------------------------------------------------------------------------------------


def step_flops(job: Job) -> int:
    """Of a step over all ranks: forward 24 B T C^2 + 4 B T^2 C a block and 2 B T C V for the logits, backward twice as much,
    the blocks once more with checkpointing. (Narayanan et al. 2021, appendix.)"""
    tokens, c = job["batch"] * job["seq_len"], job["n_embd"]
    blocks = job["n_layer"] * (24 * tokens * c**2 + 4 * tokens * job["seq_len"] * c)
    return (4 if job["checkpointing"] else 3) * blocks + 3 * 2 * tokens * c * job["vocab_size"]


def bubble_fraction(strategy: str, p: int, m: int, v: int = 1) -> float:
    """Share of the time that a pipeline's ranks wait: (p - 1) / (v m + p - 1); one micro-batch at a time: (p - 1) / p.

    Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    rounds = 1 if strategy == "layer_split" else m * (v if strategy == "interleaved" else 1)
    return (p - 1) / (rounds + p - 1)


def compute_seconds(job: Job, flops_per_s: float) -> float:
    """Of a step, on ranks that each reach `flops_per_s`; a pipeline's bubble included."""
    seconds = step_flops(job) / (job["ranks"] * flops_per_s)
    if job["strategy"] in PIPELINES:
        seconds /= 1 - bubble_fraction(job["strategy"], job["ranks"], job["micro_batches"], stages_of(job))
    return seconds


def link_seconds(found: Bytes, bytes_per_s: float) -> float:
    """Of what traffic() returned, over a link that carries `bytes_per_s` each way at once."""
    return max(sent_bytes(found), received_bytes(found)) / bytes_per_s
