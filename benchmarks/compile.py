"""Compiled blocks: tokens/s of plain PyTorch, DDP and pstar, each with eager and with compiled blocks.

bash benchmarks/compile.sh                     # one process, then two: about eight minutes, of which two compile
bash benchmarks/compile.sh --nproc 1 --rounds 2 --steps 2

The work is that of ranks.sh: GPT-2 of 12 layers, 256 wide, vocabulary 21128, length 128, global batch 4, fp32, AdamW without
clipping. All contenders stay alive and run in turns, in an order that rotates. A ratio is the median over the rounds of the
ratio of tokens/s to the same program with eager blocks in the SAME round. Compilation is before the first round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import ranks
from command_line import at_least, parser_of, publish
from facts import bullets, processor, versions, when_and_how
from ranks import Contender, Step

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
GOAL = 1.05
TOLERANCE = 1e-5    # of the losses, relative


def make_compiled_model(job: ranks.Job) -> Any:
    model = job.make_model()
    for block in model.transformer.h:
        block.compile()
    return model


def plain_compiled(job: ranks.Job) -> Step:
    return ranks.plain_loop(make_compiled_model(job))


def ddp_compiled(job: ranks.Job) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return ranks.plain_loop(DistributedDataParallel(make_compiled_model(job), gradient_as_bucket_view=True))


def contenders() -> list[Contender]:
    """Pairs: eager, then compiled."""
    found = [Contender("plain", "one PyTorch process, all cores", ranks.plain, num_ranks=1),
             Contender("plain, compiled", "the same, blocks compiled", plain_compiled, num_ranks=1),
             Contender("ddp", "DDP of torch", ranks.ddp),
             Contender("ddp, compiled", "the same, blocks compiled", ddp_compiled)]  # fmt: skip
    for near in ("100%", "25%"):
        about = "pstar, everything near" if near == "100%" else f"pstar, near {near} of the model data"
        found += [Contender(f"pstar {near}", about, ranks.pstar_with(near_budget=near)),
                  Contender(f"pstar {near}, compiled", "the same, compile block",
                            ranks.pstar_with(near_budget=near, compile="block"))]
    return found


def table(num_ranks: int, options: argparse.Namespace) -> list[str]:
    """Measures with so many processes. Ends the program if the losses differ."""
    found = [each for each in contenders() if num_ranks > 1 or not each.name.startswith("ddp")]
    others = ranks.measure(found, num_ranks, options.rounds, options.steps, contenders)
    losses = [each.loss for each in found]
    if max(losses) - min(losses) > TOLERANCE * max(losses):
        names = ", ".join(f"{each.name} {each.loss:.6f}" for each in found)
        raise SystemExit(f"error: not all contenders do the same work; their losses are {names}")
    lines = [f"## {num_ranks} process{'es' if num_ranks > 1 else ''}", ""]
    if others > 0.1:
        lines += [f"**Others used {others:.1f} of {num_cores()} cores meanwhile**: only ratios in the same round mean "
                  "something.", ""]
    lines += [f"| | | tokens/s | against eager | middle half | loss after {ranks.WARM_UP_STEPS} steps |",
              "|---|---|---:|---:|---|---:|"]
    for eager, compiled in zip(found[::2], found[1::2], strict=True):
        for each in (eager, compiled):
            ratios = [b / a for a, b in zip(each.seconds, eager.seconds, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            tokens = ranks.BATCH * ranks.LENGTH / statistics.median(each.seconds)
            lines.append(f"| {each.name} | {each.about} | {tokens:,.0f} | {middle:.2f} | {low:.2f} to {high:.2f} | "
                         f"{each.loss:.5f} |")
    return [*lines, ""]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("compile.sh", __doc__)
    parser.add_argument("--nproc", default="1,2", help="numbers of processes, with commas [%(default)s]")
    parser.add_argument("--rounds", type=at_least(1), default=8, help="interleaved rounds [%(default)s]")
    parser.add_argument("--steps", type=at_least(1), default=3, help="steps of a contender in a round [%(default)s]")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    numbers = options.nproc.split(",")
    if not all(number.isdecimal() and int(number) and ranks.BATCH % int(number) == 0 for number in numbers):
        parser.error(f"--nproc {options.nproc}: give numbers that divide the global batch of {ranks.BATCH}")
    options.nproc = [int(number) for number in numbers]
    return options


def main(argv: list[str]) -> int:
    """Measures and writes compile.md."""
    options = parse(argv)
    sys.path.insert(0, str(HERE.parent))
    size = ranks.MODEL
    lines = [
        "# Compiled blocks", "",
        f"- work: GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, length "
        f"{ranks.LENGTH}, global batch {ranks.BATCH}, fp32, AdamW, no clipping; {num_cores()} cores ({processor()})",
        f"- versions: {versions()}",
        f"- rounds: {options.rounds} of {options.steps} steps each, interleaved",
        *bullets(when_and_how("compile.sh", argv)), "",
        "Against eager: median over the rounds of the ratio of tokens/s to the same program with eager blocks in the same "
        f"round, with the middle half. Goal for pstar: {GOAL}.", "",
    ]  # fmt: skip
    for num_ranks in options.nproc:
        lines += table(num_ranks, options)
    publish("\n".join(lines), options.results / "compile.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
