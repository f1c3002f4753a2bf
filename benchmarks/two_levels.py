"""pstar on two nodes with a slow link: chunks exchanged in two levels, flat, and replicated (ownership node).

bash benchmarks/two_levels.sh                       # as root on Linux: 200 Mbit/s, about six minutes
bash benchmarks/two_levels.sh --quick               # a look
bash benchmarks/two_levels.sh --mbit-per-s 1000

Two nodes of two ranks each are made of namespaces and a veth pair (tests/cluster/nodes.py). Each rank makes all engines:
for each kind of chunks one in two levels and one flat, through one process group of all ranks; for sharded chunks also one
in which each node has all chunks. The engines take steps in turns, in an order that rotates. A ratio is the median over the
rounds of all runs of the ratio to the flat engine in the SAME round. The kernel counts what crosses the veth in the last
step of each turn; given is the mean of both directions. The losses of all engines must be equal, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from command_line import at_least, parser_of, publish, set_missing
from facts import bullets, processor, versions, when_and_how
from turns import in_turns

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
MODEL = {"n_layer": 4, "n_embd": 192, "n_head": 4, "n_positions": 64, "vocab_size": 3980}
LENGTH, BATCH = 64, 4
RANKS_A_NODE, NUM_RANKS = 2, 4
WARM_UP_STEPS = 2
NEAR = "50%"
KINDS = {
    "whole chunks, p at once": {},
    "whole chunks, one at a time": {"communication": "chunk"},
    "sharded chunks": {"ownership": "sharded"},
    "sharded chunks, least room": {"ownership": "sharded", "near_budget": "min"},
}
LEVELS = ("flat", "two levels", "replicated")
CONTENDERS = [(kind, levels) for kind in KINDS for levels in (LEVELS if "sharded" in kind else LEVELS[:2])]
SPEED_GOAL, BYTES_GOAL = 1.5, 0.55


@dataclass
class Engine:
    """An engine of this rank, and what rank 0 has measured with it.

    Attributes:
        kind, levels: one of CONTENDERS.
        turns: a dictionary each: seconds of a step, sent bytes of a node, bytes by the formula, loss.
    """

    kind: str
    levels: str
    turns: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from unittest import mock

        from ranks import ADAM, Job

        import pstar

        self.job = Job(MODEL, LENGTH, BATCH)
        config = {"optimizer": {"type": "AdamW", "params": ADAM}, "near_budget": NEAR} | KINDS[self.kind]
        config |= {"ownership": "node"} if self.levels == "replicated" else {}
        flat = partial(pstar.engine.Collectives, through_memory=False)
        with mock.patch.object(pstar.engine, "Collectives", flat if self.levels == "flat" else pstar.engine.Collectives):
            self.model, self.optimizer = pstar.initialize_engine(self.job.make_model, 0, config)

    def step(self, rank: int) -> float:
        """One step; returns this rank's loss."""
        self.optimizer.zero_grad()
        loss = self.model(*self.job.share(rank, NUM_RANKS))
        self.model.backward(loss)
        self.optimizer.step()
        return float(loss.detach())

    def turn(self, rank: int, steps: int) -> None:
        import torch
        import torch.distributed as dist

        from pstar.layout.nodes import sent_by_replicas, sent_in_two_levels
        from tests.cluster.nodes import counts_of

        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            dist.barrier()
            before = counts_of("self")
            dist.barrier()    # no rank sends bytes of the step before this one has read the count
            loss = self.step(rank)
            dist.barrier()
        seconds = (time.perf_counter() - begin) / steps
        crossed = sum(now.since(then).payload_bytes for now, then in zip(counts_of("self"), before, strict=True))
        moved = self.model.ledger.step_bytes
        numbers = torch.tensor([loss, moved["gather"], moved["reduce"]], dtype=torch.float64)
        dist.all_reduce(numbers)
        if self.levels == "replicated":    # each node receives all pieces but one, of its own ranks
            loss, gathered, reduced = (numbers / torch.tensor([NUM_RANKS, 2, 2])).tolist()
            formula = sent_by_replicas(2, reduced, moved["sum"])
        else:
            loss, gathered, reduced = (numbers / torch.tensor([NUM_RANKS, NUM_RANKS - 1, NUM_RANKS - 1])).tolist()
            formula = sent_in_two_levels(2, gathered, reduced, moved["sum"])
        self.turns.append({"seconds": seconds, "sent": crossed / 2, "formula": formula, "loss": loss})


def work(rounds: int, steps: int) -> None:
    """One rank: takes its turns; rank 0 prints the engines' turns as one line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engines = [Engine(*contender) for contender in CONTENDERS]
    for engine in engines:
        for _ in range(WARM_UP_STEPS):
            engine.step(rank)
    for engine in in_turns(engines, rounds):
        engine.turn(rank, steps)
    if rank == 0:
        print(json.dumps([[engine.kind, engine.levels, engine.turns] for engine in engines]))
    dist.barrier()
    dist.destroy_process_group()


def measure(mbit_per_s: float, rounds: int, steps: int) -> dict[tuple[str, str], list[dict[str, float]]]:
    """One run on two new nodes: the turns of each engine, by (kind, levels)."""
    from tests.cluster.nodes import two_nodes

    with tempfile.TemporaryDirectory(prefix="two_levels_") as name, two_nodes(Path(name), mbit_per_s) as nodes:
        started = []
        for rank in range(NUM_RANKS):
            node, log = nodes[rank // RANKS_A_NODE], Path(name, f"rank{rank}.log")
            own = {"RANK": rank, "LOCAL_RANK": rank % RANKS_A_NODE, "WORLD_SIZE": NUM_RANKS, "MASTER_PORT": 29500,
                   "MASTER_ADDR": nodes[0].address, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}  # fmt: skip
            command = [sys.executable, "-W", "ignore", __file__, "--rank-of", f"{rounds},{steps}"]
            process = node.start(command, log, os.environ | {key: str(value) for key, value in own.items()})
            started.append((process, log))
        while any(process.poll() is None for process, _ in started) and not any(process.poll() for process, _ in started):
            time.sleep(0.1)
        for process, log in started:
            if process.poll():
                raise SystemExit(f"error: a rank ended with status {process.returncode}:\n{log.read_text()}")
        line = started[0][1].read_text().splitlines()[-1]
    return {(kind, levels): turns for kind, levels, turns in json.loads(line)}


def report(runs: list[dict[tuple[str, str], list[dict[str, float]]]], options: argparse.Namespace, argv: list[str]) -> str:
    """The page, in Markdown."""
    lines = [
        "# Two nodes with a slow link", "",
        f"- work: GPT-2 of {MODEL['n_layer']} layers, {MODEL['n_embd']} wide, vocabulary {MODEL['vocab_size']}, length "
        f"{LENGTH}, global batch {BATCH}, fp32, AdamW; near budget {NEAR}, least room: min",
        "- exchanged: flat: one ring through all ranks; two levels: each byte crosses the network once; replicated: "
        "ownership node, each node has all chunks, and only gradients cross the network",
        f"- nodes: two namespaces on one machine with {num_cores()} cores ({processor()}), {RANKS_A_NODE} ranks of one "
        f"thread each; a veth pair of {options.mbit_per_s:g} Mbit/s in each direction",
        f"- versions: {versions()}",
        f"- runs: {options.runs} of {options.rounds} rounds of {options.steps} steps, interleaved",
        f"- goals: two levels at least {SPEED_GOAL} times as fast as flat, and at most {BYTES_GOAL} of its bytes for groups",
        *bullets(when_and_how("two_levels.sh", argv)), "",
        "Time and speed: medians over the rounds; speed: of the ratio in the same round, with the least and the largest "
        "median of a run. Sent: by a node in a step, as the kernel counted on the veth.", "",
        "| chunks | exchanged | step, s | speed against flat | of the runs | sent, MB | against flat | by the formula, MB |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]  # fmt: skip
    for kind, levels in CONTENDERS:
        flat = [turn for run in runs for turn in run[kind, "flat"]]
        ratios = [[theirs["seconds"] / ours["seconds"]
                   for ours, theirs in zip(run[kind, levels], run[kind, "flat"], strict=True)] for run in runs]
        medians = [statistics.median(each) for each in ratios]
        turns = [turn for run in runs for turn in run[kind, levels]]
        keys = ("seconds", "sent", "formula")
        seconds, sent, formula = (statistics.median(turn[key] for turn in turns) for key in keys)
        ratio = statistics.median(ratio for each in ratios for ratio in each)
        less = sent / statistics.median(turn["sent"] for turn in flat)
        lines.append(f"| {kind} | {levels} | {seconds:.2f} | {ratio:.2f} | {min(medians):.2f} to {max(medians):.2f} | "
                     f"{sent / 1e6:.2f} | {less:.2f} | {'' if levels == 'flat' else f'{formula / 1e6:.2f}'} |")
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("two_levels.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="one run of 2 rounds of a step")
    parser.add_argument("--mbit-per-s", type=float, default=200, help="rate of the link (default: 200)")
    parser.add_argument("--runs", type=at_least(1), help="on new nodes (default: 3; with --quick 1)")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds of a run (default: 4; with --quick 2)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a turn (default: 2; with --quick 1)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)    # rounds,steps: this process is a rank
    options = parser.parse_args(argv)
    set_missing(options, runs=(3, 1), rounds=(4, 2), steps=(2, 1))
    if not options.mbit_per_s >= 1:
        parser.error("--mbit-per-s must be at least 1")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes two_levels.md; returns 1 if losses differ, 2 if this machine cannot have two nodes."""
    options = parse(argv)
    if options.rank_of:
        work(*map(int, options.rank_of.split(",")))
        return 0
    from tests.cluster.nodes import reason_why_not

    if (why := reason_why_not()[0]):
        print(f"error: {why}", file=sys.stderr)
        return 2
    runs: list[Any] = [measure(options.mbit_per_s, options.rounds, options.steps) for _ in range(options.runs)]
    for turns in zip(*(turns for run in runs for turns in run.values()), strict=True):
        losses = [turn["loss"] for turn in turns]
        if max(losses) - min(losses) > 1e-4 * max(losses):
            print(f"error: not all engines do the same work; their losses are {losses}", file=sys.stderr)
            return 1
    publish(report(runs, options, argv), options.results / "two_levels.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
