"""Chapter 06 in bytes: a rank's model states and sent bytes in a step, measured and by the formulas of the ZeRO paper.

bash benchmarks/zero.sh                               # stages 0 to 3 and offload at 1, 2 and 4 processes, about two minutes
bash benchmarks/zero.sh --nproc 2                     # some of it

The work: GPT-2 of 12 layers, 256 wide, vocabulary 21128, length 64, global batch 4. Model states are the tensors alive when
backward has ended. Sent bytes are those that the kernel counted on rank 0's sockets in a step. The peak is that of the whole
process in the last step, activations and Python included. Formulas: Rajbhandari et al. 2020, with the padding of the units.
The second page, zero_pays.md, is computed: what sharding saves for each size of model, and what its buffers cost.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command_line import parser_of
from facts import bullets, versions, when_and_how
from process_memory import status

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "chapters" / "06_zero")]
MODEL = {"n_layer": 12, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 21128}
LENGTH, BATCH, STEPS, MIB = 64, 4, 3, 1 << 20
CASES = [(stage, "none", precision) for precision in ("fp32", "bf16") for stage in range(4)]
CASES += [(2, "optimizer", "bf16"), (3, "optimizer,params", "bf16")]
SIZES = ("tiny", "small", "medium", "large", "xl")


def work(rank: int, num_ranks: int, case: tuple[int, str, str], folder: str, queue: Any) -> None:
    """One rank of one case: trains some steps, and puts its measured bytes and seconds into the queue."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from zero import shard
    from zero.ledger import sent_formula

    from gpt2_chinese.distributed.ranks import Ranks
    from gpt2_chinese.distributed.socket_bytes import between, tcp_bytes
    from gpt2_chinese.model.config import ModelConfig
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    torch.set_num_threads(max(1, num_cores() // num_ranks))
    if num_ranks > 1:
        rendezvous = Path(folder, "_".join(map(str, (num_ranks, *case)))).as_uri()
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    ranks = Ranks(rank, num_ranks, rank, torch.device("cpu"), dist.group.WORLD if num_ranks > 1 else None)
    stage, offload, precision = case
    torch.manual_seed(0)
    model = GPT2LMHeadModel(ModelConfig(**MODEL))
    settings = SimpleNamespace(zero_stage=stage, offload=offload, precision=precision, backend="own", loss_scale=None,
                               activation_checkpointing=False, weight_decay=0.1, lr=1e-4)  # fmt: skip
    sharded, scaler = shard(model, ranks, settings)
    optimizer = sharded.make_optimizer(settings)
    tokens = torch.randint(0, MODEL["vocab_size"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    share = tokens[rank * BATCH // num_ranks : (rank + 1) * BATCH // num_ranks]
    seconds, sent = [], 0
    for step in range(STEPS):
        if step == STEPS - 1:
            gc.collect()
            forget_peak()
        before, begin = tcp_bytes(), time.perf_counter()
        sharded(share[:, :-1], share[:, 1:]).backward()
        sharded.wait()
        sharded.clip_gradients(1.0)
        scaler.step(optimizer)
        sharded.step_scalars()
        ranks.barrier()
        seconds.append(time.perf_counter() - begin)
        sent = between(before, tcp_bytes())[0] if before is not None else 0
    numels = [unit.numel for unit in sharded.units]
    queue.put((rank, {
        "states": sum(sharded.ledger.states["after backward"].values()),
        "host": sum(n for kind, n in sharded.ledger.states["after backward"].items() if kind.startswith("host")),
        "formula": sum(sharded.ledger.formula().values()), "peak": status("VmHWM"), "sent": sent if num_ranks > 1 else 0,
        "sent_formula": sent_formula(numels, stage, num_ranks, sharded.units[0].full.element_size()),
        "moved": sum(sharded.host.last.values()) if sharded.host else 0,
        "seconds": statistics.median(seconds[1:]), "numel": sum(numels),
    }))  # fmt: skip
    if num_ranks > 1:
        sharded.comm.group = None
        dist.destroy_process_group()


def forget_peak() -> None:
    """Resets the kernel's count of this process's peak memory, if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure(num_ranks: int, case: tuple[int, str, str], folder: str) -> dict[str, Any]:
    """Rank 0's numbers of a case; the peak is the largest of all ranks."""
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(rank, num_ranks, case, folder, queue)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    answers = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(20)
    return answers[0] | {"peak": max(answer["peak"] for answer in answers.values())}


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}"


def facts(argv: list[str], work_done: str) -> list[str]:
    """The work, versions, date and command, as Markdown."""
    return [*bullets([("work", work_done), ("versions", versions()), *when_and_how("zero.sh", argv)]), ""]


def page(found: list[tuple[int, tuple[int, str, str], dict[str, Any]]], argv: list[str]) -> str:
    """The measured page, in Markdown."""
    done = (f"GPT-2 of {MODEL['n_layer']} layers, {MODEL['n_embd']} wide, vocabulary {MODEL['vocab_size']}, "
            f"{found[0][2]['numel']:,} parameters, length {LENGTH}, global batch {BATCH}, {num_cores()} cores")  # fmt: skip
    lines = ["# ZeRO in bytes", "", *facts(argv, done), "All in MiB, of rank 0; the peak is the largest of all ranks.", "",
             "| stage | offload | precision | p | model states | by the formula | of that on the host | sent in a step | "
             "by the formula | moved to and from the host | process peak | s/step |",
             "|---|---|---|" + "---:|" * 9]  # fmt: skip
    for num_ranks, (stage, offload, precision), book in found:
        lines.append(f"| {stage} | {offload} | {precision} | {num_ranks} | {mib(book['states'])} | {mib(book['formula'])} | "
                     f"{mib(book['host'])} | {mib(book['sent'])} | {mib(book['sent_formula'])} | {mib(book['moved'])} | "
                     f"{mib(book['peak'])} | {book['seconds']:.2f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def buffers(numels: list[int], stage: int, num_bytes: int) -> int:
    """Bytes that stages 2 and 3 hold temporarily. Stage 0 does not need them: its gradients and parameters are whole.

    In backward two reductions are under way, each with the flat gradients and the received pieces. Gradients of parameters
    outside of blocks are whole until the end. At stage 3 these parameters and two blocks are whole, too.
    """
    outside, block = numels[0], max(numels[1:])
    reducing = 2 * (outside + block) + outside
    return num_bytes * (reducing + (outside + 2 * block if stage == 3 else 0))


def numels_of(size: str) -> list[int]:
    """Parameters in each unit of a preset, from a model without storage."""
    import torch
    from zero.units import groups_of

    from gpt2_chinese.model.config import PRESETS
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    config = replace(PRESETS[size], vocab_size=MODEL["vocab_size"])
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    return [sum(p.numel() for p in parameters.values()) for _, parameters in groups_of(model)]


def pays(argv: list[str]) -> str:
    """The computed page, in Markdown: what sharding saves for each size of model, and what its buffers cost."""
    from zero.ledger import state_formula

    done = f"computed: presets of GPT-2, vocabulary {MODEL['vocab_size']}, 16 bit, 4 processes, activations left out"
    columns = ("parameters", "share in no block", "stage 0", "stage 2", "with its buffers", "stage 3", "with its buffers")
    lines = ["# From which size ZeRO pays", "", *facts(argv, done), f"| model | {' | '.join(columns)} |"]
    lines.append("|---|" + "---:|" * len(columns))
    for size in SIZES:
        numels = numels_of(size)
        states = [sum(state_formula(numels, stage, 4, 2).values()) for stage in range(4)]
        cells = [f"{sum(numels):,}", f"{numels[0] / sum(numels):.0%}", f"{mib(states[0])} MiB"]
        for stage in (2, 3):
            with_buffers = states[stage] + buffers(numels, stage, 2)
            cells += [f"{states[stage] / states[0]:.0%}", f"{with_buffers / states[0]:.0%}"]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("zero.sh", __doc__)
    parser.add_argument("--nproc", default="1,2,4", help="numbers of processes, with commas (default: 1,2,4)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    try:
        options.nproc = [int(each) for each in options.nproc.split(",")]
    except ValueError:
        parser.error(f"--nproc {options.nproc}: give numbers with commas")
    if any(each < 1 or BATCH % each for each in options.nproc):
        parser.error(f"--nproc must divide the global batch of {BATCH}")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes; returns 1 if measured model states differ from the formula."""
    options = parse(argv)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    forkserver.ensure_running()
    with tempfile.TemporaryDirectory(prefix="zero_") as folder:
        found = [(p, case, measure(p, case, folder)) for case in CASES for p in options.nproc]
    wrong = [(p, case) for p, case, book in found if book["states"] != book["formula"]]
    options.results.mkdir(parents=True, exist_ok=True)
    for name, text in (("zero.md", page(found, argv)), ("zero_pays.md", pays(argv))):
        (options.results / name).write_text(text, encoding="utf-8")
        print(text)
    if wrong:
        print(f"error: model states are not what the formula says, of {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
