"""Adam on a GPU: equal bits with the CPU kernel, and speed against a device copy and torch's fused AdamW.

    python benchmarks/gpu/adam.py

Writes benchmarks/results/gpu_adam.md. Goals: 0.90 of the bandwidth of a device copy, and not slower than fused AdamW.
Every contender is timed once a round, in an order that rotates; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pstar.kernels import AdamOptions, AdamUpdate, adam_steps, cuda, split_master, squared_norms

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu_adam.md"
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def contenders(numel: int, num_chunks: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """{name: (bytes that must move for an element, function)}."""
    device = torch.device("cuda")
    param, grad, exp_avg, exp_avg_sq, other = (torch.rand(numel, device=device) for _ in range(5))
    grad16 = (grad - 0.5).to(torch.bfloat16)
    high, low = torch.empty_like(grad16), torch.empty(numel, dtype=torch.int16, device=device)
    copy16, slot = torch.empty_like(grad16), grad16.clone()
    split_master(param, high, low)
    leaf = torch.nn.Parameter(param)
    leaf.grad = grad
    fused = torch.optim.AdamW([leaf], fused=True, **OPTIONS)

    def chain() -> None:
        grad.copy_(grad16)
        fused.step()
        copy16.copy_(param)

    def ours(*tensors: torch.Tensor, **places: torch.Tensor) -> Callable[[], None]:
        cut = [tensor.chunk(num_chunks) for tensor in tensors]
        places = {name: tensor.chunk(num_chunks) for name, tensor in places.items()}
        fields = {"options": AdamOptions(**OPTIONS), "step": 10}
        updates = [AdamUpdate(*parts, **fields, **{name: pieces[number] for name, pieces in places.items()})
                   for number, parts in enumerate(zip(*cut, strict=True))]
        return lambda: adam_steps(updates)

    return {
        "device copy": (8, lambda: other.copy_(grad)),
        "torch AdamW(fused)": (28, fused.step),
        "pstar fp32": (28, ours(param, grad, exp_avg, exp_avg_sq)),
        "pstar bf16, separate master": (28, ours(param, grad16, exp_avg, exp_avg_sq, copy16=copy16)),
        "pstar bf16, shared slot": (28, ours(param, slot, exp_avg, exp_avg_sq, copy16=slot)),
        "pstar bf16, split master": (26, ours(high, grad16, exp_avg, exp_avg_sq, low=low)),
        "chain: copy, torch fused, copy": (28, chain),
        "pstar squared norm, fp32": (4, lambda: squared_norms([grad])),
        "pstar squared norm, bf16": (2, lambda: squared_norms([grad16])),
    }


def agrees_with_the_cpu(numel: int = 1_000_003) -> str:
    """Runs three steps on CPU and GPU and compares all bits."""
    torch.manual_seed(0)
    here = [torch.randn(numel), torch.randn(numel), torch.zeros(numel), torch.zeros(numel)]
    there = [tensor.cuda() for tensor in here]
    for step in (1, 2, 3):
        for tensors in (here, there):
            adam_steps([AdamUpdate(*tensors, options=AdamOptions(**OPTIONS), step=step)])
    different = sum(int((one != other.cpu()).sum()) for one, other in zip(here, there, strict=True))
    return f"**{different} numbers differ from the CPU kernel's**" if different else "bit for bit the CPU kernel's results"


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=200_000_000)
    parser.add_argument("--chunks", type=int, default=8, help="runs that one launch updates")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or cuda.library() is None:
        sys.exit("error: this benchmark needs a GPU, and torch's CUDA build with NVRTC")
    found = contenders(arguments.numel, arguments.chunks)
    times: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for number in range(arguments.rounds + 3):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            found[name][1]()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(begin.elapsed_time(end))
    speed = {name: [found[name][0] / each for each in times[name]] for name in names}

    def against(name: str, base: str) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(speed[name], speed[base], strict=True))

    lines = ["# Adam on a GPU", "",
             f"{arguments.numel / 1e6:g} million elements in {arguments.chunks} runs, {arguments.rounds} rounds; "
             f"{datetime.date.today()}; {torch.cuda.get_device_name()}; torch {torch.__version__}, "
             f"CUDA {torch.version.cuda}; {agrees_with_the_cpu()}.", "",
             f"    python benchmarks/gpu/adam.py --numel {arguments.numel} --chunks {arguments.chunks} "
             f"--rounds {arguments.rounds}", "",
             "| | bytes a parameter | ms | GB/s | share of a device copy's bandwidth | times as fast as torch fused |",
             "|---|---|---|---|---|---|"]
    for name in names:
        milliseconds, size = statistics.median(times[name]), found[name][0]
        faster = statistics.median(b / a for a, b in zip(times[name], times["torch AdamW(fused)"], strict=True))
        lines.append(f"| {name} | {size} | {milliseconds:.2f} | {size * arguments.numel / milliseconds / 1e6:.0f} | "
                     f"{against(name, 'device copy'):.2f} | {f'{faster:.2f}' if size > 8 else ''} |")
    page = "\n".join(lines) + "\n"
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(page)
    print(page, end="")


if __name__ == "__main__":
    main()
