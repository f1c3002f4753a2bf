"""pstar against no engine at all: one process and two, everything near and a quarter of it, beside DDP and FSDP2.

bash benchmarks/parity.sh                             # both models, three runs each: about a quarter of an hour
bash benchmarks/parity.sh --quick                     # one short run of each, to see that it works
bash benchmarks/parity.sh --keep                      # add three runs to those of an earlier day

All processes of a run stay alive and work in turns, as in ranks.py; a ratio compares two turns of the SAME round. A run
starts all processes anew. Its number is the median over its rounds; the page shows the median over the runs, with the least
and the largest of them. Results are kept in parity.json, so that runs of several days can share a page.

Peak: the most that a process has ever held, less what it held with torch loaded; of several processes the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import ranks
from command_line import at_least, parser_of, publish, set_missing
from facts import bullets, processor, versions, when_and_how
from ranks import Contender, Job

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
JOBS = {
    "wide": Job(ranks.MODEL),
    "tiny": Job({"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 3980}, batch=24),
}
ABOUT = {"wide": "the model of ranks.sh", "tiny": "the model and batch of chapter 00"}
GOALS = {"100%": 1.0, "25%": 0.97}
"""The least ratio of pstar's tokens/s to those of the plain process, by near budget."""
PEAK_GOAL = 1.05


def pstar_about(near: str, num_ranks: int) -> str:
    placed = "everything near" if near == "100%" else f"near {near} of the model data"
    return f"pstar, {placed}, {num_ranks} process{'es' if num_ranks > 1 else ''}"


def contenders() -> list[Contender]:
    """The plain process and all that are compared with it."""
    return [
        Contender("plain", "one PyTorch process, all cores, fused AdamW", ranks.plain, num_ranks=1),
        Contender("ddp", "DDP of torch, 2 processes", ranks.ddp),
        Contender("fsdp2", "FSDP2 of torch, by block, 2 processes", ranks.fsdp2),
        *(Contender(f"pstar {count}, {near}", pstar_about(near, count), ranks.pstar_with(near_budget=near), num_ranks=count)
          for count in (1, 2) for near in GOALS),
    ]  # fmt: skip


def run(job: Job, rounds: int, steps: int) -> dict[str, Any]:
    """One run of all contenders. Ends the program if their losses differ."""
    found = contenders()
    others = ranks.measure(found, 2, rounds, steps, contenders, job)
    losses = [each.loss for each in found]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        names = ", ".join(f"{each.name} {each.loss:.5f}" for each in found)
        raise SystemExit(f"error: not all contenders do the same work; their losses are {names}")
    base = found[0]
    rows = {}
    for each in found:
        cpu = statistics.median(a.cpu / b.cpu for a, b in zip(each.turns, base.turns, strict=True))
        rows[each.name] = {"speed": ranks.speed(each, base), "cpu": cpu, "peak": each.turns[-1].peak,
                           "tokens_per_s": job.batch * job.length / statistics.median(each.seconds)}  # fmt: skip
    facts = dict(when_and_how("parity.sh", []))
    return {"date": facts["date"], "versions": versions(), "processor": processor(), "others": others, "rows": rows}


def table(runs: list[dict[str, Any]]) -> list[str]:
    """The runs of one model: a row for each contender, and a line with the goals for each of pstar's."""
    lines = ["| | tokens/s | of plain | runs | CPU seconds of plain's | peak, MiB | of plain's |",
             "|---|---:|---:|---|---:|---:|---:|"]  # fmt: skip
    said = []
    of = {each.name: [one["rows"][each.name] for one in runs] for each in contenders()}
    for each in contenders():
        rows = of[each.name]
        speeds, cpu = [row["speed"] for row in rows], statistics.median(row["cpu"] for row in rows)
        peak = statistics.median(row["peak"] for row in rows)
        share = statistics.median(row["peak"] / base["peak"] for row, base in zip(rows, of["plain"], strict=True))
        tokens, speed = statistics.median(row["tokens_per_s"] for row in rows), statistics.median(speeds)
        lines.append(f"| {each.about} | {tokens:,.0f} | {speed:.2f} | {min(speeds):.2f} to {max(speeds):.2f} | {cpu:.2f} | "
                     f"{peak / 2**20:,.0f} | {share:.2f} |")
        if goal := GOALS.get(each.name.partition(", ")[2]):
            said.append(f"- {each.about}: {speed:.2f} of plain's tokens/s (goal {goal}), {share:.2f} of its peak "
                        f"(goal at most {PEAK_GOAL})")
    return [*lines, "", *said, ""]


def page(kept: dict[str, list[dict[str, Any]]], options: argparse.Namespace, argv: list[str]) -> str:
    """The page, in Markdown."""
    newest = next(iter(kept.values()))[-1]
    lines = ["# As fast as no engine", "",
             f"- work: a training step in fp32, AdamW, no clipping; {num_cores()} cores ({newest['processor']}); the plain "
             f"process uses all cores, each of two processes half of them",
             f"- versions: {newest['versions']}",
             f"- a run: all processes started anew, {options.rounds} interleaved rounds of {options.steps} steps",
             *bullets(when_and_how("parity.sh", argv)), "",
             "Of plain: the median over the runs, each the median of its rounds; runs: the least and the largest.", ""]
    for name, runs in kept.items():
        job, dates = JOBS[name], sorted({one["date"][:10] for one in runs})
        size = job.model
        lines += [f"## {ABOUT[name][0].upper()}{ABOUT[name][1:]}", "",
                  f"GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, batch "
                  f"{job.batch} x {job.length}; {len(runs)} runs, {', '.join(dates)}.", ""]
        others = max(one["others"] for one in runs)
        if others > 0.1:
            lines += [f"**Others used up to {others:.1f} of {num_cores()} cores meanwhile.**", ""]
        lines += table(runs)
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("parity.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="one run of 2 rounds of 2 steps")
    parser.add_argument("--only", choices=JOBS, help="one of the models (default: all)")
    parser.add_argument("--runs", type=at_least(1), help="runs of each model (default: 3; with --quick 1)")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds of a run (default: 8; with --quick 2)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a contender in a round (default: 4; with --quick 2)")
    parser.add_argument("--keep", action="store_true", help="keep the runs that parity.json already has")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    set_missing(options, runs=(3, 1), rounds=(8, 2), steps=(4, 2))
    return options


def main(argv: list[str]) -> int:
    """Measures, and writes parity.json after every run, then parity.md."""
    options = parse(argv)
    sys.path.insert(0, str(HERE.parent))
    from durable.files import write_json

    options.results.mkdir(parents=True, exist_ok=True)
    store = options.results / "parity.json"
    kept = json.loads(store.read_text()) if store.exists() else {}
    names = [options.only] if options.only else list(JOBS)
    kept = {name: runs for name, runs in kept.items() if options.keep or name not in names}
    for _ in range(options.runs):
        for name in names:
            kept.setdefault(name, []).append(run(JOBS[name], options.rounds, options.steps))
            write_json(store, {name: kept[name] for name in JOBS if name in kept})
    text = page({name: kept[name] for name in JOBS if name in kept}, options, argv)
    publish(text, options.results / "parity.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
