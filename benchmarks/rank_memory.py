"""Each rank's measured peak memory, start included, against the engine's formula.

bash benchmarks/rank_memory.sh                       # 4 processes, 58 million parameters: about two minutes
bash benchmarks/rank_memory.sh --nproc 2 --layers 4

    peak  <=  share + working set + activations + staging

share: 16 bytes a parameter, divided by the ranks. Working set: the near budget "min", that is, the chunks of the module that
needs most, and the gradients of one of them. Activations: measured bytes that forward and backward of a plain process need
in addition to weights and gradients. Staging: the shared memory through which the ranks exchange chunks; the kernel counts
it once for every rank. The peak is the kernel's count for the whole process (VmHWM), less the memory of torch and its
libraries before the engine is made. The chunks' bytes are exact. Memory that the allocator leaves unused between them is not
in the formula, so a rank is too large only above 1.1 times the formula. MALLOC_MMAP_THRESHOLD_=262144 in the environment
shows a run without such holes (and with a page fault for every 4096 bytes of a step; see keep_freed_memory).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from command_line import parser_of, publish
from facts import bullets, versions, when_and_how
from process_memory import status
from processes import started

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
LENGTH, STEPS, MIB, TOO_LARGE = 64, 3, 2**20, 1.1
CHUNK = {"default_chunk_size": 768 * 3072 + 4096}    # elements: the largest matrix of a layer and its bias
MODES = {
    "whole chunks, group at once": {"ownership": "whole"},
    "whole chunks, one at a time": {"ownership": "whole", "communication": "chunk"},
    "sharded chunks": {"ownership": "sharded"},
}


def make_model(layers: int) -> Any:
    import torch

    from gpt2_chinese.model.config import ModelConfig
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(ModelConfig(n_layer=layers, n_embd=768, n_head=12, n_positions=LENGTH, vocab_size=2000))


def reset_peak() -> int:
    """Resets VmHWM; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def batch(rank: int) -> tuple[Any, Any]:
    import torch

    tokens = torch.randint(0, 2000, (1, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def warm_up() -> None:
    """Runs a start and a step, which load all code: code is not model data."""
    import torch

    import pstar

    model, optimizer = pstar.initialize_engine(lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), 0)
    model.backward(model(torch.ones(8, 64)).sum())
    optimizer.step()


def measure_plain(layers: int, pipe: Connection) -> None:
    """Sends the bytes that forward and backward need in addition to weights and gradients."""
    import torch

    torch.set_num_threads(1)
    model, (inputs, targets) = make_model(layers), batch(0)
    model(inputs, targets).backward()
    before = reset_peak()
    model(inputs, targets).backward()
    pipe.send(status("VmHWM") - before)


def measure_rank(rank: int, num_ranks: int, layers: int, keys: dict, folder: str, pipe: Connection) -> None:
    """Sends {"start": peak of the start, "peak": peak of start and steps, ...}, in bytes."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "meet").as_uri(), rank=rank, world_size=num_ranks)
    dist.barrier()
    import pstar
    from pstar.comm.shared_memory import SLICE_BYTES

    warm_up()
    gc.collect()
    before = reset_peak()
    model, optimizer = pstar.initialize_engine(lambda: make_model(layers), 0, {"near_budget": "min"} | CHUNK | keys)
    found = {"start": status("VmHWM") - before}
    for _ in range(STEPS):
        model.backward(model(*batch(rank)))
        optimizer.step()
    layout = model.layout
    found |= {
        "peak": status("VmHWM") - before, "share": model.costs.total * layout.elems_per_rank,
        "working": model.near.budget_bytes, "params": layout.num_params, "chunk": 4 * layout.chunk_elems,
        "staging": 2 * SLICE_BYTES * num_ranks, "near": model.near.peak_bytes, "far": model.far.peak_bytes,
    }  # fmt: skip
    pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def run(target: Any, jobs: list[tuple]) -> list[Any]:
    """Runs target(*job, pipe) in one process for each job; returns what they send."""
    context = multiprocessing.get_context("spawn")
    workers = [started(context, target, *job) for job in jobs]
    try:
        answers = [pipe.recv() for _, pipe in workers]
    except EOFError:
        raise SystemExit("error: a process ended; see above for the reason") from None
    for process, _ in workers:
        process.join(20)
    return answers


def report(results: dict[str, list[dict]], activations: int, options: argparse.Namespace,
           argv: list[str]) -> tuple[str, bool]:
    """(the page, whether no rank was too large)."""
    first = next(iter(results.values()))[0]
    whole = 16 * first["params"]
    lines = [
        "# Each rank's memory", "",
        f"- work: GPT-2 of {options.layers} layers, 768 wide, {first['params'] / 1e6:.1f} million parameters, fp32, AdamW; "
        f"one sequence of {LENGTH} tokens a rank, {STEPS} steps; {options.nproc} processes",
        *bullets([("versions", f"{versions()}, {platform.system()}"), *when_and_how("rank_memory.sh", argv)]), "",
        f"All model data are {whole / MIB:.0f} MiB. Columns in MiB; peaks are those of the rank that needed most, counted "
        f"by the kernel. Formula: share + working set + activations ({activations / MIB:.0f}) + staging "
        f"({first['staging'] / MIB:.0f}).", "",
        "| | chunk | share | working set | formula | peak of the start | peak | of the formula |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    kept = True
    for name, ranks in results.items():
        formula = ranks[0]["share"] + ranks[0]["working"] + activations + ranks[0]["staging"]
        start, peak = max(each["start"] for each in ranks), max(each["peak"] for each in ranks)
        fits = peak <= TOO_LARGE * formula
        kept &= fits
        numbers = [ranks[0]["chunk"], ranks[0]["share"], ranks[0]["working"], formula, start, peak]
        cells = " | ".join(f"{number / MIB:.0f}" for number in numbers)
        lines.append(f"| {name} | {cells} | {peak / formula:.0%}{'' if fits else ', **too large**'} |")
    return "\n".join(lines) + "\n", kept


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("rank_memory.sh", __doc__)
    parser.add_argument("--nproc", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--layers", type=int, default=8, help="of 7 million parameters each (default: 8)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    if options.nproc < 2 or options.layers < 1:
        parser.error("--nproc must be at least 2, --layers at least 1")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this benchmark reads the kernel's counts in /proc, which are not here")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes; returns 1 if a rank was too large."""
    options = parse(argv)
    activations = run(measure_plain, [(options.layers,)])[0]
    results = {}
    for name, keys in MODES.items():
        with tempfile.TemporaryDirectory(prefix="rank_memory_") as folder:
            jobs = [(rank, options.nproc, options.layers, keys, folder) for rank in range(options.nproc)]
            results[name] = run(measure_rank, jobs)
    page, kept = report(results, activations, options, argv)
    publish(page, options.results / "rank_memory.md")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
