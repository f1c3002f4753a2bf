"""Small GPT-2 models on one device: whatever memory is near, losses and weights are those with everything near, bit for bit.

    python benchmarks/gpu/equal.py

Deterministic torch operations, attention by matrix products. Writes gpu_equal.md; status 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")    # read when CUDA starts; else cuBLAS may add in another order
import torch  # noqa: E402
from common import check_device, facts_of, gpu_parser, name_of, write_page  # noqa: E402
from facts import bullets  # noqa: E402

MODEL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 256, "vocab_size": 21128}
QUICK = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 300}
BATCH, STEPS = 8, 5
HOST_ADAM = {"optimizer": {"params": {"use_hybrid_adam": False}}}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "everything near": {"near_budget": "100%"},
    "60 % near": {"near_budget": "60%"},
    "30 % near": {"near_budget": "30%"},
    "least near": {"near_budget": "min"},
    "least near, nothing prefetched": {"near_budget": "min", "prefetch": 0},
    "least near, activations in host memory": {"near_budget": "min", "offload_activations": True},
    "60 % near, states updated near": {"near_budget": "60%", "far_states": "stream"},
    "60 % near, as many states near as fit": {"near_budget": "60%", "near_states": "fill"},
    "least near, updated during backward": {"near_budget": "min", "speculative_update": True},
    "least near, updated during the next forward": {"near_budget": "min", "overlap_update": True},
    "least near and far, the rest on disk": {"near_budget": "min", "far_budget": "min", "disk_path": "a folder"},
    "everything near, host's Adam": {"near_budget": "100%", **HOST_ADAM},
}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def train(keys: dict[str, Any], shape: dict[str, int], device: torch.device) -> tuple[list[float], dict, dict[str, float]]:
    """(losses, weights by name on the host, numbers of the row) of STEPS steps."""
    import pstar
    from gpt2_chinese.model.config import ModelConfig
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    torch.manual_seed(0)
    optimizer_keys = {"type": "AdamW", "params": {"lr": 1e-3, **keys.get("optimizer", {}).get("params", {})}}
    config = keys | {"optimizer": optimizer_keys, "gradient_clipping": 1.0}
    model, optimizer = pstar.initialize_engine(lambda: GPT2LMHeadModel(ModelConfig(**shape)), 0, config, device=device)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        tokens = torch.randint(0, shape["vocab_size"], (BATCH, shape["n_positions"] + 1), generator=generator)
        optimizer.zero_grad()
        loss = model(tokens[:, :-1].to(device), tokens[:, 1:].contiguous().to(device))
        model.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    weights, _ = model.gather_state()
    moved = sum(model.ledger.step_bytes.values())
    return losses, weights, {"near": model.near.peak_bytes, "moved": moved}


def compare(shape: dict[str, int], device: torch.device) -> tuple[list[str], int]:
    """(rows of the table, number of rows that differ from the first of their precision)."""
    lines, wrong = [], 0
    for precision, more in PRECISIONS.items():
        expected = None
        for placement, keys in PLACEMENTS.items():
            with tempfile.TemporaryDirectory(prefix="equal_") as folder:
                here = {"disk_path": folder} if "disk_path" in keys else {}
                losses, weights, told = train(keys | here | more, shape, device)
            expected = expected or (losses, weights)
            off = [name for name, weight in weights.items() if not torch.equal(weight, expected[1][name])]
            gap = max(abs(one / other - 1) for one, other in zip(losses, expected[0], strict=True))
            same = losses == expected[0] and not off
            wrong += not same
            lines.append(f"| {precision} | {placement} | {told['near'] / 2**20:.1f} | {told['moved'] / 2**20:.1f} | "
                         f"{losses[-1]:.6f} | "
                         f"{'equal' if losses == expected[0] else f'**off by {gap:.1e}**'} | "
                         f"{f'**{len(off)} of {len(weights)} differ**' if off else 'equal'} |")
            print(f"{precision}, {placement}: {'equal' if same else 'NOT EQUAL'}", flush=True)
    return lines, wrong


def parse(argv: list[str]) -> argparse.Namespace:
    parser = gpu_parser("equal.py", __doc__, "a toy model")
    options = parser.parse_args(argv)
    check_device(parser, options.device, "--quick --device cpu")
    return options


def main(argv: list[str]) -> int:
    """Compares, writes, prints. Returns 1 if a bit differs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = parse(argv)
    torch.use_deterministic_algorithms(True, warn_only=True)    # the comparison decides, whatever torch has no such form of
    if options.device == "cpu":
        torch.set_num_threads(1)
    shape = QUICK if options.quick else MODEL
    with sdpa_kernel(SDPBackend.MATH):
        lines, wrong = compare(shape, torch.device("cuda:0" if options.device == "cuda" else "cpu"))
    facts = [("work", f"GPT-2, {shape['n_layer']} layers, {shape['n_embd']} wide, {STEPS} steps of {BATCH} x "
                      f"{shape['n_positions']} tokens, gradients clipped; deterministic operations"),
             ("device", name_of(options.device)), *facts_of("equal.py", argv)]  # fmt: skip
    text = "\n".join(["# Equal numbers on a GPU", "", *bullets(facts), "",
                      "Losses and weights are compared bit for bit with the first row of the same precision.", "",
                      "| precision | where the memory is | chunks near, MiB | copied, MiB a step | last loss | losses "
                      "| weights |", "|---|---|---:|---:|---:|---|---|", *lines, ""])
    write_page(options.results, "gpu_equal.md", text)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
