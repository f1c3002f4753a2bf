"""A model whose data exceed near and far together: the rest is on disk.

bash benchmarks/disk_model.sh                         # 500 million parameters, 8 GB of model data; three runs in six minutes
bash benchmarks/disk_model.sh --disk-path /mnt/nvme
bash benchmarks/disk_model.sh --quick                 # 5 million parameters, budgets in proportion

In each run three processes, one after the other, train the same GPT on the same random tokens: with everything in host
memory (near holds all, no bytes move), with near and far alone, and with near, far and disk. All losses must be the same,
bit for bit.
Blocks are recomputed in backward. The peak is the kernel's count for the whole process (VmHWM), start included. It is
compared with interpreter + near budget + far budget + activations. Interpreter: the process's memory after training a toy
model, so that all code is loaded. Activations are counted in the first process (Schedule.known_peaks). Without direct I/O
written bytes may still be in the page cache; the page says whether the file system has it. Seconds: the median of all steps
of all runs but the first of each process, which is traced.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from command_line import at_least, parser_of, publish
from facts import bullets, busy_seconds, processor, versions, when_and_how
from process_memory import status
from rank_memory import reset_peak, run, warm_up

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
MIB, GIB = 2**20, 2**30
FULL = {"n_layer": 24, "n_embd": 1280, "n_head": 20, "n_positions": 128, "vocab_size": 21128}
SMALL = {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": 32, "vocab_size": 2000}
BUDGETS = {"near_budget": GIB, "far_budget": 2 * GIB}
FULL_PARAMS = 499_000_000
STEPS, BATCH = 3, 1


def modes(quick: bool, folder: str) -> dict[str, dict]:
    """Configurations by name; the first counts activations."""
    size = SMALL if quick else FULL
    share = num_params(size) / FULL_PARAMS if quick else 1.0
    budgets = {key: int(share * num_bytes) for key, num_bytes in BUDGETS.items()}
    chunk = {"default_chunk_size": 12 * size["n_embd"] ** 2 + 13 * size["n_embd"]}    # a layer
    found = {
        "everything in host memory": chunk | {"profile": str(Path(folder, "profile.json"))},
        "near and far": chunk | {"near_budget": budgets["near_budget"]},
        "near, far and disk": chunk | budgets | {"disk_path": folder},
    }
    if quick:
        del found["near and far"]
    return found


def num_params(size: dict[str, int]) -> int:
    """Parameters of a GPT-2 with a tied head."""
    width = size["n_embd"]
    layers = size["n_layer"] * (12 * width**2 + 13 * width)
    return layers + (size["vocab_size"] + size["n_positions"] + 2) * width


def make_model(size: dict[str, int]) -> Any:
    import torch

    sys.path.append(str(HERE.parent / "chapters" / "07_patrickstar"))
    from recompute import build_model

    from gpt2_chinese.model.config import ModelConfig

    torch.manual_seed(0)
    return build_model(SimpleNamespace(model=ModelConfig(**size), activation_checkpointing=True, loss_tiles="none"))


def train(size: dict[str, int], config: dict, pipe: Connection) -> None:
    """Trains STEPS steps in this process, and sends losses, seconds and bytes."""
    import torch

    import pstar
    from pstar.layout.budget import model_data_bytes
    from pstar.planner.disk_traffic import disk_traffic

    torch.set_num_threads(num_cores())
    warm_up()
    gc.collect()
    found: dict[str, Any] = {"interpreter": reset_peak()}
    begin = time.perf_counter()
    model, optimizer = pstar.initialize_engine(lambda: make_model(size), 0, config)
    found |= {"start_s": time.perf_counter() - begin, "start": status("VmHWM"), "losses": [], "seconds": []}
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, size["vocab_size"], (BATCH, size["n_positions"] + 1), generator=generator)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        model.backward(loss)
        optimizer.step()
        model._store.links.drain()    # writes in the background count for the step
        found["seconds"].append(time.perf_counter() - begin)
        found["losses"].append(float(loss.detach()))
    tiers = [tier for tier in (model.near, model.far, model.disk) if tier is not None]
    found |= {
        "peak": status("VmHWM"), "params": model.layout.num_params, "moved": dict(model.ledger.step_bytes),
        "model_data": model_data_bytes(model.layout, model.costs), "groups": len(model.layout.groups),
        "tiers": {tier.name: tier.peak_bytes for tier in tiers},
        "budgets": (model.near.budget_bytes, model.far.budget_bytes),
        "non_model": max(model.schedule.known_peaks(), default=0), "direct": model.disk.direct if model.disk else None,
    }  # fmt: skip
    if model.disk is not None:
        found["planned"] = disk_traffic(model.layout, [], model.costs, *found["budgets"], prefetch=model.config.prefetch)
    pipe.send(found)


# ---- the page ------------------------------------------------------------------------------------------------------------


def report(size: dict[str, int], runs: dict[str, list[dict]], others: float, argv: list[str]) -> str:
    """The page, in Markdown. runs: what each process of each configuration has sent."""
    results = {name: each[-1] for name, each in runs.items()}
    first, last = next(iter(results.values())), results["near, far and disk"]
    seconds = {name: [second for one in each for second in one["seconds"][1:]] for name, each in runs.items()}
    whole = median(seconds[next(iter(runs))])
    near, far = last["budgets"]
    lines = [
        "# A model larger than memory", "",
        f"- work: GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, "
        f"{first['params'] / 1e6:.1f} million parameters in {first['groups']} chunks, {BATCH} x {size['n_positions']} "
        f"random tokens a step, fp32, AdamW, blocks recomputed; {STEPS} steps, "
        f"{len(runs['near, far and disk'])} run(s), one process on {num_cores()} cores ({processor()})",
        f"- budgets: near {near / MIB:,.0f} MiB, far {far / MIB:,.0f} MiB, of {first['model_data'] / MIB:,.0f} MiB of model "
        f"data; the rest on disk, {'with' if last['direct'] else 'without'} direct I/O",
        f"- versions: {versions()}",
        *bullets(when_and_how("disk_model.sh", argv)), "",
    ]  # fmt: skip
    if others > 0.1:
        lines += [f"**Others used {others:.1f} of {num_cores()} cores meanwhile**: the seconds mean little.", ""]
    losses = ", ".join(f"{loss:.6f}" for loss in last["losses"])
    lines += [f"Losses of the {STEPS} steps, bitwise the same in all: {losses}.", "",
              "Seconds of a step until all its copies have ended: median, least to most. MiB.", "",
              "| | start, s | a step, s | of memory's | near at most | far at most | disk at most | near in | near out | "
              "disk read | disk written |", "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, each in results.items():
        held = [each["tiers"].get(tier, 0) for tier in ("near", "far", "disk")]
        moved = [each["moved"].get(way, 0) for way in ("far to near", "near to far", "disk to far", "far to disk")]
        cells = " | ".join(f"{num_bytes / MIB:,.0f}" for num_bytes in held + moved)
        middle = median(seconds[name])
        step = f"{middle:.2f} ({min(seconds[name]):.2f} to {max(seconds[name]):.2f}) | {middle / whole:.2f}"
        lines.append(f"| {name} | {each['start_s']:.1f} | {step} | {cells} |")
    planned = " and ".join(f"{last['planned'][way] / MIB:,.0f} {did}"
                           for way, did in (("disk to far", "read"), ("far to disk", "written")))
    lines += ["", f"`pstar plan` predicts {planned} through the disk: the fewest bytes that must move."]
    formula = last["interpreter"] + near + far + first["non_model"]
    lines += ["", "Moved: in the last step. Resident memory of the process with the disk, MiB, by the kernel's count:", "",
              "| interpreter | near budget | far budget | activations | sum | peak of the start | peak | of the sum |",
              "|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    numbers = [last["interpreter"], near, far, first["non_model"], formula, last["start"], last["peak"]]
    lines.append(f"| {' | '.join(f'{number / MIB:,.0f}' for number in numbers)} | {last['peak'] / formula:.0%} |")
    lines += ["", "Peak of the others: " + ", ".join(f"{name} {each['peak'] / MIB:,.0f} MiB"
                                                     for name, each in results.items() if each is not last) + "."]
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("disk_model.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, not with near and far alone")
    parser.add_argument("--runs", type=at_least(1), default=3, help="runs of all configurations (default: %(default)s)")
    parser.add_argument("--disk-path", type=Path, help="a folder on a local disk (default: where temporary files go)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    if options.disk_path is not None and not options.disk_path.is_dir():
        parser.error(f"--disk-path {options.disk_path}: there is no such folder")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this benchmark reads the kernel's counts in /proc, which are not here")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes; returns 1 if the losses differ."""
    options = parse(argv)
    size, runs = SMALL if options.quick else FULL, {}
    others = 0.0
    for _ in range(1 if options.quick else options.runs):
        with tempfile.TemporaryDirectory(prefix="disk_model_", dir=options.disk_path) as folder:
            for name, config in modes(options.quick, folder).items():
                busy, own, begin = busy_seconds(), children_seconds(), time.perf_counter()
                runs.setdefault(name, []).append(run(train, [(size, config)])[0])
                by_others = (busy_seconds() - busy) - (children_seconds() - own)
                others = max(others, by_others / (time.perf_counter() - begin))
    losses = {name: [one["losses"] for one in each] for name, each in runs.items()}
    if len({tuple(one) for each in losses.values() for one in each}) > 1:
        print(f"error: the losses differ: {losses}", file=sys.stderr)
        return 1
    page = report(size, runs, others, argv)
    publish(page, options.results / "disk_model.md")
    return 0


def children_seconds() -> float:
    """CPU seconds of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
