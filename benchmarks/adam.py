"""Adam on the CPU against other implementations and against the memory's bandwidth.

    bash scripts/python.sh benchmarks/adam.py                                 # 50 million elements: about a minute, 4 GB
    bash scripts/python.sh benchmarks/adam.py --numel 5000000 --rounds 5      # a quick look

Every contender is timed once a round, in an order that rotates from round to round. Reported is the median over rounds of
its ratio to the stream kernel of the SAME round, so that other work on the machine affects all equally. Writes
benchmarks/results/adam.md and adam.png. DeepSpeed's CPUAdam and bitsandbytes' AdamW8bit take part if they are installed.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path

import torch
from facts import bullets, busy_seconds, processor, versions
from turns import in_turns

from pstar.kernels import QUANT_BLOCK, AdamOptions, AdamUpdate, adam_steps, cpu, split_master
from pstar.kernels.build import find_compiler

HERE = Path(__file__).resolve().parent
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WARM_UP = 2


class Contender:
    """A name, the memory traffic of an update in bytes a parameter, the stream to compare with, and a function to time."""

    def __init__(self, name: str, bytes_per_param: int, stream: str, run: Callable[[], object]):
        self.name, self.bytes_per_param, self.stream, self.run = name, bytes_per_param, stream, run
        self.seconds: list[float] = []


def contenders(numel: int) -> list[Contender]:
    """All contenders that can run here. Those with the same layout share their arrays."""
    threads = torch.get_num_threads()
    param, grad, exp_avg, exp_avg_sq = (torch.rand(numel) for _ in range(4))
    grad16 = (grad - 0.5).to(torch.bfloat16)
    slot, copy16, high = grad16.clone(), torch.empty_like(grad16), torch.empty_like(grad16)
    low = torch.empty(numel, dtype=torch.int16)
    split_master(param, high, low)
    codes = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
    scales = torch.zeros(-(-numel // QUANT_BLOCK)), torch.zeros(-(-numel // QUANT_BLOCK))
    found = []

    def stream(name: str, bytes_per_param: int, *tensors: torch.Tensor) -> None:
        function, size = getattr(library, f"stream_{name}"), ctypes.c_long(numel)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        found.append(Contender(f"stream, {name}", bytes_per_param, name, lambda: function(size, *pointers, threads)))

    def ours(name: str, bytes_per_param: int, stream: str, *tensors: torch.Tensor, **places) -> None:
        update = AdamUpdate(*tensors, options=AdamOptions(**OPTIONS), step=10, **places)
        found.append(Contender(name, bytes_per_param, stream, lambda: adam_steps([update])))

    library = compile_stream()
    stream("fp32", 28, param, grad, exp_avg, exp_avg_sq)
    ours("pstar fp32", 28, "fp32", param, grad, exp_avg, exp_avg_sq)
    for name, options in (("torch AdamW(fused)", {"fused": True}), ("torch AdamW(foreach)", {"foreach": True})):
        optimizer = torch_adamw(param, grad, exp_avg, exp_avg_sq, options)
        found.append(Contender(name, 28, "fp32", optimizer.step))
        if options.get("fused"):
            fused = optimizer
    deepspeed = deepspeed_adam(param, grad)
    if deepspeed is not None:
        found.append(Contender("DeepSpeed CPUAdam", 28, "fp32", deepspeed.step))

    def chain() -> None:
        """The steps of a mixed-precision optimizer without a fused kernel: unpack, update, pack."""
        grad.copy_(grad16)
        fused.step()
        copy16.copy_(param)

    stream("separate", 28, param, grad16, exp_avg, exp_avg_sq, copy16)
    stream("shared", 28, param, slot, exp_avg, exp_avg_sq)
    stream("split", 26, high, low, grad16, exp_avg, exp_avg_sq)
    ours("pstar bf16, separate master", 28, "separate", param, grad16, exp_avg, exp_avg_sq, copy16=copy16)
    ours("pstar bf16, shared slot", 28, "shared", param, slot, exp_avg, exp_avg_sq, copy16=slot)
    ours("pstar bf16, split master", 26, "split", high, grad16, exp_avg, exp_avg_sq, low=low)
    ours("pstar bf16, split master, 8-bit moments", 14, "split", high, grad16, *codes, low=low, scales=scales)
    ours("pstar fp32, 8-bit moments", 16, "fp32", param, grad, *codes, scales=scales)
    bitsandbytes = bitsandbytes_adam(param, grad)
    if bitsandbytes is not None:
        found.append(Contender("bitsandbytes fp32, 8-bit moments", 16, "fp32", bitsandbytes.step))
    found.append(Contender("chain: copy, torch fused, copy", 28, "separate", chain))
    return found


def compile_stream() -> ctypes.CDLL:
    """Compiles stream.cpp for this machine."""
    compiler = find_compiler()
    if compiler is None or not cpu.paths():
        sys.exit("error: this benchmark needs a C++ compiler")
    target = Path(tempfile.mkdtemp()) / "stream.so"
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, HERE / "stream.cpp", "-o", target], check=True)
    return ctypes.CDLL(str(target))


def torch_adamw(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
                options: dict) -> torch.optim.AdamW:
    """torch's AdamW with the given moments, so that all contenders use the same pages of memory."""
    leaf = torch.nn.Parameter(param)
    leaf.grad = grad
    optimizer = torch.optim.AdamW([leaf], **OPTIONS, **options)
    optimizer.state[leaf] = {"step": torch.tensor(10.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer


def deepspeed_adam(param: torch.Tensor, grad: torch.Tensor) -> torch.optim.Optimizer | None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    leaf = torch.nn.Parameter(param)
    leaf.grad = grad
    return DeepSpeedCPUAdam([leaf], **OPTIONS, adamw_mode=True)


def bitsandbytes_adam(param: torch.Tensor, grad: torch.Tensor) -> torch.optim.Optimizer | None:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        return None
    leaf = torch.nn.Parameter(param)
    leaf.grad = grad
    return AdamW8bit([leaf], **OPTIONS)


def measure(found: list[Contender], rounds: int) -> float:
    """Times every contender once a round. Returns the number of cores that other programs used meanwhile."""
    busy, own, begin = busy_seconds(), time.process_time(), time.perf_counter()
    for contender in in_turns(found, rounds + WARM_UP):
        at = time.perf_counter()
        contender.run()
        contender.seconds.append(time.perf_counter() - at)
    for contender in found:
        del contender.seconds[:WARM_UP]
    elapsed = time.perf_counter() - begin
    return max(0.0, (busy_seconds() - busy) - (time.process_time() - own)) / elapsed


def ratio(first: Contender, second: Contender) -> float:
    """Seconds of the first divided by seconds of the second: the median of the rounds."""
    return statistics.median(a / b for a, b in zip(first.seconds, second.seconds, strict=True))


def report(found: list[Contender], numel: int, rounds: int, others: float) -> str:
    """The page, in Markdown."""
    by_name = {contender.name: contender for contender in found}
    chain, ours = by_name["chain: copy, torch fused, copy"], by_name["pstar fp32"]
    peers = {name: version_of(name.lower()) if any(each.startswith(name) for each in by_name) else "not installed"
             for name in ("DeepSpeed", "bitsandbytes")}
    lines = [
        "# Adam on the CPU", "",
        *bullets([
            ("work", f"{numel / 1e6:g} million elements, {torch.get_num_threads()} threads, {rounds} rounds"),
            ("processor", processor()),
            ("versions", f"{versions(**peers)}, path {cpu.paths()[-1]}"),
            ("date", str(datetime.date.today())),
            ("command", f"`bash scripts/python.sh benchmarks/adam.py --numel {numel} --rounds {rounds}`"),
        ]), "",
        "Share of the stream: median over the rounds of (time of a kernel that moves the same bytes / time), in the same "
        "round. GB/s: bytes that must move / median time.", "",
    ]
    if others > 0.1:
        lines += [f"**Other processes used {others:.1f} of {os.cpu_count()} cores meanwhile**: only ratios mean something, "
                  "and differences of a few percent do not.", ""]
    lines += ["| | bytes a parameter | ms | GB/s | share of the stream | times as fast as the chain |",
              "|---|---|---|---|---|---|"]
    for contender in found:
        median = statistics.median(contender.seconds)
        stream = by_name[f"stream, {contender.stream}"]
        share = ratio(stream, contender) if "8-bit" not in contender.name else None
        against = f"{ratio(chain, contender):.2f}" if contender.stream != "fp32" or share is None else ""
        lines.append(f"| {contender.name} | {contender.bytes_per_param} | {median * 1e3:.1f} | "
                     f"{contender.bytes_per_param * numel / median / 1e9:.1f} | {'' if share is None else f'{share:.2f}'} | "
                     f"{against} |")
    peers = [each for each in found if each.stream == "fp32" and not each.name.startswith(("pstar", "stream"))
             and "8-bit" not in each.name]
    compared = ", ".join(f"{ratio(each, ours):.2f} times as fast as {each.name}" for each in peers)
    lines += ["", f"pstar fp32 is {compared}."]
    return "\n".join(lines) + "\n"


def draw(found: list[Contender], path: Path) -> None:
    """Bars: the share of the stream of the same bytes, with the middle half of the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    streams = {each.stream: each for each in found if each.name.startswith("stream")}
    shown = [each for each in found if not each.name.startswith("stream") and "8-bit" not in each.name]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(shown) + 1.2), layout="constrained")
    for place, contender in enumerate(reversed(shown)):
        shares = [a / b for a, b in zip(streams[contender.stream].seconds, contender.seconds, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        axes.barh(place, middle, color="#2a7" if contender.name.startswith("pstar") else "#999",
                  xerr=[[middle - low], [high - middle]], ecolor="#333")
    axes.set_yticks(range(len(shown)), [each.name for each in reversed(shown)])
    axes.axvline(1, color="#333", linewidth=1)
    axes.set_xlabel("share of the speed of a kernel that only moves the same bytes")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Reads the command line, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=50_000_000, help="elements")
    parser.add_argument("--rounds", type=int, default=21, help="rounds that count; two more warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder that adam.md and adam.png go to")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = contenders(arguments.numel)
    others = measure(found, arguments.rounds)
    arguments.results.mkdir(parents=True, exist_ok=True)
    page = report(found, arguments.numel, arguments.rounds, others)
    (arguments.results / "adam.md").write_text(page)
    draw(found, arguments.results / "adam.png")
    print(page, end="")


if __name__ == "__main__":
    main()
