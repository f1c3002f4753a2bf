"""Bytes that a rank holds and sends, from a GPT-2's sizes and from how the ranks share it. Pure functions of numbers.

The layouts of this folder and the calculators of the pages (docs/generate/arithmetic/formulas.py) both build on these
functions. docs/assets/tools/formulas.js has them under the same names. tests/docs/test_formulas.py compares them with what
the chapters' programs count.

Bytes are whole numbers. A division that leaves a remainder is rounded up for held bytes and down for sent bytes.
"""

from __future__ import annotations

Bytes = dict[str, int]

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
HOST_KINDS = ("host_parameters", "host_gradients", "host_optimizer", "host_buffers")
GIB = 2**30


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def no_bytes() -> Bytes:
    """0 bytes for every kind."""
    return dict.fromkeys((*KINDS, *HOST_KINDS), 0)


# ---- what a parameter costs


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


# ---- who holds what


def block_parameters(n_embd: int, tensor: int = 1) -> int:
    """Parameters of a block on one of `tensor` ranks: two norms 4C, attention 4C^2 + 4C, MLP 8C^2 + 5C.

    Radford et al. 2019, section 2.3. Tensor parallelism cuts matrices and their first biases; norms and the biases after a
    sum, 6C, are whole on every rank (Shoeybi et al. 2019, section 3).
    """
    return 6 * n_embd + ceil_div(12 * n_embd**2 + 7 * n_embd, tensor)


def stage_outside(n_embd: int, n_positions: int, vocab_size: int, tensor: int, stages: int, rank: int) -> int:
    """Parameters in no block on a rank of a pipeline: embeddings in the first stage, last norm and tied head in the last.

    Both ends hold the tied weight. Tensor parallelism cuts the vocabulary.
    """
    first, last = rank == 0, rank == stages - 1
    tables = ceil_div(vocab_size, tensor) if first or last else 0
    return (tables + (n_positions if first else 0) + (2 if last else 0)) * n_embd


def zero_shares(costs: Bytes, outside: int, block: int, layers: int, shards: int, stage: int, offload: str) -> Bytes:
    """ZeRO: bytes of a rank by kind; the stage decides what is sharded. Gradients are counted at the end of backward.

    Rajbhandari et al. 2020, section 5; Ren et al. 2021 (ZeRO-Offload), section 3: host memory holds the states and the
    reduced gradients. In fp32 the parameters are the masters, unless the masters are offloaded and the parameters are not.
    A unit is a block, or all parameters in no block; 1/shards of each is padded to a whole number.

    Args:
        costs: of parameter_costs.
        outside, block, layers: parameters in no block, in a block, and the number of blocks.
        shards: ranks that share the states.
        stage: 0 to 3. Stage 0 is DDP: with several ranks it holds one copy of the gradients in buckets (Li et al. 2020,
            section 3.2).
        offload: none; optimizer; or optimizer,params: at stage 3 the parameters are in host memory too.
    """
    found, total = no_bytes(), outside + layers * block
    own = total if stage == 0 else ceil_div(outside, shards) + layers * ceil_div(block, shards)
    masters = 4 if offload == "optimizer" else costs["masters"]
    parameters = own if stage == 3 else total if stage == 0 else shards * own
    found["host_parameters" if offload == "optimizer,params" else "parameters"] = costs["parameters"] * parameters
    gradients = costs["gradients"] * (total if stage <= 1 else own)
    found["host_gradients" if offload != "none" and stage > 1 else "gradients"] = gradients
    found["host_optimizer" if offload != "none" else "optimizer"] = (masters + costs["moments"]) * own
    # Buffers: gradients of two units on their way; at stage 3 also the parameters of two blocks and those in no block.
    if stage == 0:
        found["buffers"] = gradients if shards > 1 else 0
    else:
        found["buffers"] = costs["gradients"] * (outside + block)
    if stage == 3:
        found["buffers"] += costs["parameters"] * (outside + min(2, layers) * block)
    return found


def pstar_shares(costs: Bytes, total: int, ranks: int, room: int) -> Bytes:
    """pstar: a rank owns 1/ranks of everything. Near, `room` bytes, is filled in this order: own parameters, gathered ones,
    gradients, states.

    Fang et al. 2023 (PatrickStar), sections 5 and 8. The padding of chunks is not counted.
    """
    own = ceil_div(total, ranks)
    wanted = {
        "parameters": costs["parameters"] * own, "buffers": costs["parameters"] * (total - own),
        "gradients": costs["gradients"] * own, "optimizer": (costs["masters"] + costs["moments"]) * own,
    }  # fmt: skip
    found = no_bytes()
    for kind, amount in wanted.items():
        near = min(room, amount)
        found[kind], room = near, room - near
        if kind != "buffers":
            found["host_" + kind] = amount - near
    return found


# ---- activations


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


def activation_bytes(costs: Bytes, logit: int, width: int, logits: int, layers: int, tensor: int, live: int, micros: int,
                     is_first: bool, is_last: bool, recompute: bool) -> int:  # fmt: skip
    """Bytes of activations at the worst moment of a step.

    Blocks keep what backward needs. With recomputation they keep their inputs, and one block at a time is computed again
    (Chen et al. 2016). The worst moment is the loss or a recomputed block's backward.

    Args:
        costs: of activation_costs.
        logit: bytes at the loss for each logit of one micro-batch.
        width: tokens of a micro-batch on this rank, times channels.
        logits: the same tokens, times this rank's part of the vocabulary.
        layers: blocks that a live micro-batch has passed.
        tensor: ranks that cut a block.
        live: forwards without their backward, at most.
        micros: live micro-batches at the ends.
        is_first, is_last: whether the embedding and the loss are on this rank.
    """
    block = (costs["whole"] * tensor + costs["cut"]) * width // tensor
    kept = live * layers * (costs["input"] * width if recompute else block)
    around = micros * width * ((costs["first"] if is_first else 0) + (costs["last"] if is_last else 0))
    return kept + around + max(logits * logit if is_last else 0, block if recompute else 0)


# ---- traffic and waiting


def ring_bytes(num_bytes: int, p: int) -> int:
    """Bytes that each rank sends, and receives, in an all-reduce: 2 (p - 1) / p. (Patarasuk and Yuan 2009, section 3.)"""
    return 2 * num_bytes * (p - 1) // p


def tensor_traffic(value: int, tokens: int, n_embd: int, layers: int, tensor: int, recompute: bool, ends: int = 2) -> int:
    """Tensor parallelism: bytes of the all-reduces of B T C that one micro-batch takes.

    Each block has two in forward and two in backward (Shoeybi et al. 2019, section 3), and one more with recomputation. The
    embedding has one, the head has one (`ends` of them on this rank), and the loss reduces three numbers per token.
    """
    calls = (5 if recompute else 4) * layers
    own = calls * ring_bytes(value * tokens * n_embd, tensor) + ends * ring_bytes(4 * tokens * n_embd, tensor)
    return own + ring_bytes(4 * tokens, tensor) + ring_bytes(8 * tokens, tensor)


def pstar_traffic(costs: Bytes, total: int, ranks: int, micros: int, room: int) -> Bytes:
    """pstar: bytes that a rank gathers and reduces in a step, and copies from and to the host.

    Gradients are reduced once. Parameters are gathered once, or in every pass if near has no room for them
    (Fang et al. 2023, section 7).
    """
    away = max(0, total - room // costs["parameters"])
    far = pstar_shares(costs, total, ranks, room)["host_optimizer"] // (costs["masters"] + costs["moments"])
    back = ceil_div(away, ranks)
    return {
        "gather": costs["parameters"] * (total + away * (2 * micros - 1)) * (ranks - 1) // ranks,
        "reduce": costs["gradients"] * total * (ranks - 1) // ranks,
        "host_out": costs["gradients"] * far,
        "host_in": costs["parameters"] * (max(far, back) + back * (2 * micros - 1)),
    }


def bubble_fraction(strategy: str, p: int, m: int, v: int = 1) -> float:
    """Share of the time that a pipeline's ranks wait: (p - 1) / (v m + p - 1), or (p - 1) / p without overlap.

    Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    rounds = 1 if strategy == "layer_split" else m * (v if strategy == "interleaved" else 1)
    return (p - 1) / (rounds + p - 1)
