"""What a forward keeps for backward under each --recompute, and what backward computes again: formulas. Imports no torch.

One block, B sequences of T tokens, C wide, H heads, N = B T tokens, I wide inside the MLP (4 C), fp32, no dropout:

    kept for backward         elements          computed again by backward (FLOPs, 2 for a multiplication and an addition)
    ln_1   input, mean, 1/std   N C + 2 N
    c_attn input                N C                6 N C C      c_attn
    q, k, v                   3 N C                4 N T C      attention, the masked half counted like the other one
    attention out, logsumexp    N C + N H          2 N C C      attn.c_proj
    ln_2   input, mean, 1/std   N C + 2 N
    c_fc   input                N C                2 N C I      c_fc
    gelu   input, output      2 N I                2 N I C      mlp.c_proj, only where a block of the same segment follows

Outside of the blocks: the ids, the last norm, the input of the head, and the log-probabilities, N V numbers.
"""

from __future__ import annotations

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.recompute_plan import Plan

BYTES, ID_BYTES = 4, 8  # of a float32 and of an int64


def block_elements(config: ModelConfig, num_rows: int, num_tokens: int) -> int:
    """Numbers that one block keeps: the table at the top."""
    n = num_rows * num_tokens
    return n * (8 * config.n_embd + 2 * config.inner + 4 + config.n_head)


def kept_bytes(config: ModelConfig, num_rows: int, num_tokens: int, plan: Plan, tiled: bool = False) -> int:
    """Bytes that autograd holds between forward and backward of (num_rows, num_tokens) ids, parameters not counted.

    For fp32 without dropout, on the CPU; every parameter has a gradient. `tiled`: with --loss-tiles.
    """
    n, width = num_rows * num_tokens, config.n_embd
    if tiled:
        head = n * (2 * width + 2) + config.vocab_size * width  # last norm, gradients of the head's input and weight
        ids = n + num_tokens  # inputs, positions
    else:
        head = n * (2 * width + 2) + n * config.vocab_size + 1  # last norm, head's input, log-probabilities, divisor
        ids = 2 * n + num_tokens  # inputs, targets, positions
    return BYTES * (kept_inside(config, num_rows, num_tokens, plan) + head) + ID_BYTES * ids


def kept_inside(config: ModelConfig, num_rows: int, num_tokens: int, plan: Plan) -> int:
    """Numbers that all blocks together keep."""
    n, width, layers = num_rows * num_tokens, config.n_embd, config.n_layer
    if not plan.length:
        return layers * block_elements(config, num_rows, num_tokens)
    if plan.selective:  # the input, c_attn, attention with its logsumexp, attn.c_proj, c_fc
        return layers * n * (width + 3 * width + width + config.n_head + width + config.inner)
    return len(plan.cut(layers)) * n * width


def offloaded_bytes(config: ModelConfig, num_rows: int, num_tokens: int, plan: Plan) -> int:
    """Bytes that --offload-activations copies to the host in a forward. Without recomputation attention's result goes twice:
    attention saves it, and so does attn.c_proj."""
    twice = 0 if plan.length else config.n_layer * num_rows * num_tokens * config.n_embd
    return BYTES * (kept_inside(config, num_rows, num_tokens, plan) + twice)


def again_bytes(config: ModelConfig, num_rows: int, num_tokens: int, plan: Plan) -> int:
    """Bytes of one segment during backward, beyond those kept: its blocks then keep all, until backward has used it.

    kept_bytes + again_bytes is the least memory for activations: gradients and temporary results are not counted.
    """
    n, width = num_rows * num_tokens, config.n_embd
    of_one = block_elements(config, num_rows, num_tokens) - n * width  # its input is kept, or the block before made it
    if plan.selective:
        of_one -= n * (4 * width + config.n_head + config.inner)  # c_attn, attention, c_fc are kept
    between = max(0, plan.length - 1) * n * width  # inputs of the segment's other blocks
    return BYTES * (plan.length * of_one + between)


def block_flops(config: ModelConfig, num_rows: int, num_tokens: int) -> int:
    """FLOPs of one block's forward, matrix products and attention only."""
    n, width = num_rows * num_tokens, config.n_embd
    return n * (8 * width * width + 4 * num_tokens * width + 4 * width * config.inner)


def recomputed_flops(config: ModelConfig, num_rows: int, num_tokens: int, plan: Plan) -> int:
    """FLOPs that backward spends on computing activations again.

    A segment is computed up to the last tensor that backward needs, so its last product, mlp.c_proj, is left out.
    """
    if not plan.length or plan.selective:
        return 0
    last = 2 * num_rows * num_tokens * config.n_embd * config.inner
    return config.n_layer * block_flops(config, num_rows, num_tokens) - len(plan.cut(config.n_layer)) * last
