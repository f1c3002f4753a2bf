"""Adam on a GPU: equal bits with the CPU kernel, and speed against a device copy and torch's fused AdamW.

    python benchmarks/gpu/adam.py
    python benchmarks/gpu/adam.py --quick --device cpu     # small arrays, to see that it runs

Writes benchmarks/results/gpu_adam.md. Goals: 0.90 of the bandwidth of a device copy, and not slower than fused AdamW.
Every contender is timed once a round, in an order that rotates; ratios are medians over the rounds. A time is that of
--calls calls between two events. They are queued while the GPU is busy with something else, so it is the GPU's time, without
Python's. Python's time of a call has a column of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import torch  # noqa: E402
from common import check_device, facts_of, gpu_parser, name_of, write_page  # noqa: E402
from facts import bullets  # noqa: E402
from turns import in_turns  # noqa: E402

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WARM_UP_ROUNDS = 3
BUSY_CYCLES = 20_000_000
"""The GPU counts so far while calls are queued: 10 ms at 2 GHz, the time of 100 calls of Python."""

Contenders = dict[str, tuple[int, Callable[[], object]]]
"""{name: (bytes that must move for an element, function)}"""


def contenders(numel: int, num_chunks: int, device: torch.device) -> Contenders:
    """All of them work on the same arrays of numel elements; pstar's runs are cut into num_chunks."""
    from pstar.kernels import AdamOptions, AdamUpdate, adam_steps, split_master, squared_norms

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


def agrees_with_the_cpu(device: torch.device, numel: int = 1_000_003) -> str:
    """Runs three steps on CPU and device and compares all bits."""
    from pstar.kernels import AdamOptions, AdamUpdate, adam_steps

    torch.manual_seed(0)
    here = [torch.randn(numel), torch.randn(numel), torch.zeros(numel), torch.zeros(numel)]
    there = [tensor.to(device, copy=True) for tensor in here]
    for step in (1, 2, 3):
        for tensors in (here, there):
            adam_steps([AdamUpdate(*tensors, options=AdamOptions(**OPTIONS), step=step)])
    different = sum(int((one != other.cpu()).sum()) for one, other in zip(here, there, strict=True))
    return f"**{different} numbers differ from the CPU kernel's**" if different else "bit for bit the CPU kernel's results"


def timed(function: Callable[[], object], calls: int, device: torch.device) -> tuple[float, float]:
    """(seconds of the device, seconds of Python) a call; on a CPU they are the same."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        seconds = (time.perf_counter() - begin) / calls
        return seconds, seconds
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    first.record()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    python = (time.perf_counter() - begin) / calls
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls, python


def measure(found: Contenders, rounds: int, calls: int, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """{name: for each round `timed`}."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for name in in_turns(list(found), rounds + WARM_UP_ROUNDS):
        times[name].append(timed(found[name][1], calls, device))
    return {name: each[WARM_UP_ROUNDS:] for name, each in times.items()}


def table(found: Contenders, times: dict[str, list[tuple[float, float]]], numel: int) -> list[str]:
    """The rows of the page."""
    speed = {name: [found[name][0] / seconds for seconds, _ in each] for name, each in times.items()}
    lines = ["| | bytes a parameter | ms | GB/s | share of a device copy's bandwidth | times as fast as torch fused "
             "| Python's time, µs |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, (size, _) in found.items():
        seconds, python = (statistics.median(each) for each in zip(*times[name], strict=True))
        share = statistics.median(a / b for a, b in zip(speed[name], speed["device copy"], strict=True))
        faster = statistics.median(b / a for (a, _), (b, _) in zip(times[name], times["torch AdamW(fused)"], strict=True))
        lines.append(f"| {name} | {size} | {seconds * 1e3:.3f} | {size * numel / seconds / 1e9:.0f} | {share:.2f} | "
                     f"{f'{faster:.2f}' if size > 8 else ''} | {python * 1e6:.0f} |")
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = gpu_parser("adam.py", __doc__, "small arrays")
    parser.add_argument("--numel", type=int, help="elements (default: 200 million, with --quick 20 thousand)")
    parser.add_argument("--chunks", type=int, default=8, help="runs that one launch updates (default: 8)")
    parser.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    parser.add_argument("--calls", type=int, default=10, help="calls that are timed together (default: 10)")
    options = parser.parse_args(argv)
    options.numel = options.numel or (20_000 if options.quick else 200_000_000)
    for name in ("numel", "chunks", "rounds", "calls"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0")
    check_device(parser, options.device, "--quick --device cpu")
    from pstar.kernels import cuda  # late: without a GPU this line is not reached

    if options.device == "cuda" and cuda.library() is None:
        parser.error("needs NVRTC, which torch's CUDA build brings; the line above says why it is not used")
    return options


def main(argv: list[str]) -> int:
    """Measures, prints, writes. Returns 1 if a bit differs from the CPU kernel's."""
    from models import pinned_copy

    options = parse(argv)
    device = torch.device(options.device)
    link, agrees = pinned_copy(device), agrees_with_the_cpu(device)
    found = contenders(options.numel, options.chunks, device)
    times = measure(found, options.rounds, options.calls, device)
    copies = ", ".join(f"{way} {speed / 1e9:.1f} GB/s" for way, speed in link.items())
    facts = [("work", f"{options.numel / 1e6:g} million elements in {options.chunks} runs, {options.rounds} rounds of "
                      f"{options.calls} calls"),
             ("bits", agrees), ("pinned host memory, one large copy", copies or "not on a CPU"),
             ("device", name_of(options.device)), *facts_of("adam.py", argv)]  # fmt: skip
    text = "\n".join(["# Adam on a GPU", "", *bullets(facts), "", *table(found, times, options.numel), ""])
    write_page(options.results, "gpu_adam.md", text)
    return int("differ" in agrees)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
