"""Head and loss by tiles of tokens against whole logits: seconds of a step, and the most bytes in near. One process.

bash benchmarks/tiled_loss.sh                # about five minutes
bash benchmarks/tiled_loss.sh --quick        # a small model, to see that it runs

A plain training loop and pstar, each with whole logits and with --loss-tiles auto. The processes stay alive and work in
turns, in an order that rotates. A ratio is the median over the rounds of the ratio to the same loop with whole logits in the
SAME round. The most bytes in near are chunks and activations as pstar's ledger counts them, with the least near budget that
works. Two more processes count them, because counting takes time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from command_line import at_least, parser_of, publish, set_missing
from facts import bullets, processor, versions, when_and_how
from memory_speed import WARM_UP_STEPS, Runner, busy_line, measure, spread

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
MIB = 2**20
FULL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 512, "vocab_size": 21128, "batch": 8,
        "threads": num_cores()}
SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 2000, "batch": 4, "threads": 1}
LOOPS = {"plain": "one PyTorch process", "pstar": "pstar, everything near"}
TILES = ("none", "auto")
SPEED_GOAL, PEAK_GOAL = 1.05, 0.35
TOLERANCE = 1e-5    # relative, after a few steps: both add in another order, and Adam's division magnifies it


def near_peaks(size: dict[str, Any]) -> dict[str, float]:
    """The most bytes in near by tiles: chunks and activations, with the least near budget."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for tiles in TILES:
            config = {"near_budget": "min", "profile": str(Path(folder, f"{tiles}.json"))}
            runner = Runner(f"near, {tiles}", size | {"loss_tiles": tiles}, "pstar", config)
            found[tiles] = max(runner.run(1)["near peak"] for _ in range(3))
            runner.close()
    return found


def table(size: dict[str, Any], options: argparse.Namespace) -> list[str]:
    runners = {(loop, tiles): Runner(f"{loop}, {tiles}", size | {"loss_tiles": tiles}, loop)
               for loop in LOOPS for tiles in TILES}  # fmt: skip
    others = measure(list(runners.values()), options.rounds, options.steps)
    losses = [runner.losses[WARM_UP_STEPS] for runner in runners.values()]
    if max(losses) - min(losses) > TOLERANCE * max(losses):
        raise SystemExit(f"error: not all do the same work; their losses are {', '.join(f'{loss:.6f}' for loss in losses)}")
    peaks = near_peaks(size)
    lines = [f"Seconds: against whole logits in the same loop, goal at most {SPEED_GOAL}. Near: against whole logits, goal "
             f"at most {PEAK_GOAL}.", "", *busy_line(others),
             f"| | | tiles | step, s | against whole | middle half | near at most, MiB | against whole | loss after "
             f"{WARM_UP_STEPS} steps |", "|---|---|---|---:|---:|---|---:|---:|---:|"]  # fmt: skip
    for (loop, tiles), runner in runners.items():
        ratios = [ours["seconds"] / theirs["seconds"]
                  for ours, theirs in zip(runner.rounds, runners[loop, "none"].rounds, strict=True)]
        seconds = statistics.median(each["seconds"] for each in runner.rounds)
        near = ("", "") if loop == "plain" else (f"{peaks[tiles] / MIB:,.1f}", f"{peaks[tiles] / peaks['none']:.2f}")
        lines.append(f"| {loop} | {LOOPS[loop]} | {tiles} | {seconds:.3f} | {statistics.median(ratios):.2f} | "
                     f"{spread(ratios)} | {' | '.join(near)} | {runner.losses[WARM_UP_STEPS]:.5f} |")
    return [*lines, ""]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("tiled_loss.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, 2 rounds of 2 steps")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds (default: 8; with --quick 2)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a process in a round (default: 2)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    set_missing(options, rounds=(8, 2), steps=(2, 2))
    return options


def main(argv: list[str]) -> int:
    """Measures and writes tiled_loss.md. Exits with status 1 if the losses differ."""
    options = parse(argv)
    sys.path.insert(0, str(HERE.parent))
    size = SMALL if options.quick else FULL
    text = "\n".join([
        "# Head and loss by tiles", "",
        f"- work: GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, batch "
        f"{size['batch']} x {size['n_positions']} tokens, fp32, AdamW, no clipping; one process of {size['threads']} "
        f"thread(s) on {num_cores()} cores ({processor()})",
        f"- versions: {versions()}",
        f"- rounds: {options.rounds} of {options.steps} steps each, interleaved",
        *bullets(when_and_how("tiled_loss.sh", argv)), "", *table(size, options),
    ])  # fmt: skip
    publish(text, options.results / "tiled_loss.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
