"""Several processes on one machine: pstar, DDP, FSDP2 and DeepSpeed ZeRO-3 against one plain PyTorch process.

bash benchmarks/ranks.sh                              # two processes, about four minutes
bash benchmarks/ranks.sh --quick                      # a look, less than a minute
bash benchmarks/ranks.sh --only plain,pstar-whole --rounds 5

The work: GPT-2 of 12 layers, 256 wide, vocabulary 21128, length 128, global batch 4, fp32, AdamW without clipping. All
contenders stay alive. In every round each of them runs some steps while the others sleep, in an order that rotates. Reported
is the median over the rounds of the ratio to the plain process of the SAME round, so that other work on the machine affects
all equally. All start from the same weights and must compute the same losses, up to rounding, which the page shows.
DeepSpeed takes part if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from command_line import at_least, parser_of, publish, set_missing
from facts import bullets, busy_seconds, processor, versions, when_and_how
from process_memory import status
from processes import started
from turns import in_turns

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
MODEL = {"n_layer": 12, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 21128}
LENGTH, BATCH = 128, 4
ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WARM_UP_STEPS = 4
GOALS = {"plain": 0.95, "fsdp2": 1.4, "zero3": 1.7}
"""The least ratio of pstar's tokens/s to those of each contender."""

Step = Callable[[Any, Any], Any]
"""From this rank's (inputs, targets) to its loss, a detached tensor; one whole training step."""


@dataclass(frozen=True)
class Job:
    """What all contenders train: a GPT-2 (fields of ModelConfig), the tokens of a row, and the rows of the global batch."""

    model: dict[str, Any]
    length: int = LENGTH
    batch: int = BATCH

    def make_model(self) -> Any:
        import torch

        from gpt2_chinese.model.config import ModelConfig
        from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

        torch.manual_seed(0)
        return GPT2LMHeadModel(ModelConfig(**self.model))

    def share(self, rank: int, num_ranks: int) -> tuple[Any, Any]:
        """This rank's (inputs, targets), (batch / num_ranks, length) each, of random tokens."""
        import torch

        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, self.model["vocab_size"], (self.batch, self.length + 1), generator=generator)
        mine = tokens[rank * self.batch // num_ranks : (rank + 1) * self.batch // num_ranks]
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


JOB = Job(MODEL)


@dataclass
class Turn:
    """What a contender's turn of some steps took; of several ranks the largest, and the means of loss and waiting."""

    seconds: float
    """Of one step."""
    loss: float
    waited: float | None
    """Seconds of a step in which a rank only waited for other ranks; None if not known."""
    cpu: float
    """CPU seconds of a step, of all ranks together."""
    peak: int
    """Bytes: the most that the process has ever held, less what it held with torch loaded; 0 if the system does not say."""


@dataclass
class Contender:
    name: str
    about: str
    prepare: Callable[[Job], Step]
    num_ranks: int | None = None
    """Its processes; None: as many as the benchmark has."""
    turns: list[Turn] = field(default_factory=list)
    """By round."""
    loss: float = float("nan")
    """Mean loss over the ranks after the warm-up."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of one step, by round."""
        return [turn.seconds for turn in self.turns]

    @property
    def waits(self) -> list[float]:
        """Seconds that a rank waited for others in a step, by round; empty if not known."""
        return [turn.waited for turn in self.turns if turn.waited is not None]


# ---- the contenders: each makes the model, shards or replicates it, and returns one training step ------------------------


def plain_loop(model: Any) -> Step:
    """A plain training loop with torch's fastest AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)

    def step(inputs: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain(job: Job) -> Step:
    return plain_loop(job.make_model())


def plain_kept(job: Job) -> Step:
    """A plain loop that keeps freed memory between steps: a part of pstar's speed that any program can have."""
    from pstar.memory.tier import keep_freed_memory

    keep_freed_memory()
    return plain(job)


def ddp(job: Job) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return plain_loop(DistributedDataParallel(job.make_model(), gradient_as_bucket_view=True))


def fsdp2(job: Job) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), job.make_model()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return plain_loop(fully_shard(model, mesh=mesh))


def zero3(job: Job) -> Step:
    import warnings

    import deepspeed
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)    # it calls torch's collectives by their old names at every step
    model = job.make_model()
    settings = {
        "train_micro_batch_size_per_gpu": job.batch // dist.get_world_size(), "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,    # without this key it clips at 1.0
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), **ADAM, fused=True), config=settings)

    def step(inputs: Any, targets: Any) -> Any:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def pstar_with(**keys: Any) -> Callable[[Job], Step]:
    def prepare(job: Job) -> Step:
        import pstar

        waits = []
        optimizer_keys = {"type": "AdamW", "params": ADAM}
        model, optimizer = pstar.initialize_engine(job.make_model, 0, {"optimizer": optimizer_keys} | keys)

        def step(inputs: Any, targets: Any) -> Any:
            optimizer.zero_grad()
            loss = model(inputs, targets)
            model.backward(loss)
            optimizer.step()
            waits.append(model.step_scalars()["wait_s"])
            return loss.detach()

        step.waits = waits
        return step

    return prepare


def contenders() -> list[Contender]:
    """All contenders that can run here."""
    found = [
        Contender("plain", "one PyTorch process, all cores", plain, num_ranks=1),
        Contender("plain-kept", "the same, keeping the memory it frees, as pstar does", plain_kept, num_ranks=1),
        Contender("ddp", "DDP of torch", ddp),
        Contender("fsdp2", "FSDP2 of torch, by block", fsdp2),
        Contender("zero3", "DeepSpeed ZeRO-3", zero3),
        Contender("pstar-whole", "pstar, whole chunks", pstar_with(ownership="whole")),
        Contender("pstar-sharded", "pstar, sharded chunks", pstar_with(ownership="sharded")),
        Contender("pstar-chunk", "pstar, whole chunks, one at a time", pstar_with(communication="chunk")),
        Contender("pstar-late", "pstar, whole chunks, nothing gathered ahead", pstar_with(prefetch=False)),
    ]
    return [each for each in found if each.name != "zero3" or importlib.util.find_spec("deepspeed")]


# ---- processes -----------------------------------------------------------------------------------------------------------


def work(name: str, listed: Callable[[], list[Contender]], job: Job, rank: int, num_ranks: int, folder: str,
         pipe: Connection) -> None:
    """A rank of a contender, one of `listed`: receives numbers of steps, sends the turn of each."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    sys.path.insert(0, str(HERE.parent))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, num_cores() // num_ranks))
    dist.init_process_group("gloo", init_method=Path(folder, name).as_uri(), rank=rank, world_size=num_ranks)
    if num_ranks == 1:
        dist.destroy_process_group()
    from gpt2_chinese.model import gpt2  # noqa: F401  what every contender imports belongs to no contender's peak

    contender, loaded = next(each for each in listed() if each.name == name), status("VmRSS")
    step, (inputs, targets) = contender.prepare(job), job.share(rank, num_ranks)
    while (steps := pipe.recv()) is not None:
        if num_ranks > 1:
            dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step(inputs, targets)
        seconds, cpu = (time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps
        waits = getattr(step, "waits", [])
        waited = statistics.fmean(waits[-steps:]) if waits else None
        pipe.send(Turn(seconds, float(loss), waited, cpu, status("VmHWM") - loaded))
    if num_ranks > 1:
        dist.destroy_process_group()


class Team:
    """The processes of one contender."""

    def __init__(self, contender: Contender, listed: Callable[[], list[Contender]], job: Job, num_ranks: int, folder: str):
        context = multiprocessing.get_context("spawn")
        self.contender, self.pipes, self.processes = contender, [], []
        num_ranks = contender.num_ranks or num_ranks
        for rank in range(num_ranks):
            process, pipe = started(context, work, contender.name, listed, job, rank, num_ranks, folder)
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, steps: int) -> Turn:
        """The turn of all ranks together."""
        for pipe in self.pipes:
            pipe.send(steps)
        try:
            answers = [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise SystemExit(f"error: a process of {self.contender.name} ended; see above for the reason") from None
        waits = [turn.waited for turn in answers]
        return Turn(max(turn.seconds for turn in answers), statistics.fmean(turn.loss for turn in answers),
                    None if None in waits else statistics.fmean(waits), sum(turn.cpu for turn in answers),
                    max(turn.peak for turn in answers))

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)


# ---- measuring -----------------------------------------------------------------------------------------------------------


def own_seconds(teams: list[Team]) -> float:
    """CPU seconds of this process and of the teams' processes."""
    total = time.process_time()
    for process in (process for team in teams for process in team.processes):
        try:
            after_name = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            pass
    return total


def measure(found: list[Contender], num_ranks: int, rounds: int, steps: int,
            listed: Callable[[], list[Contender]] = contenders, job: Job = JOB) -> float:
    """Fills turns and loss of every contender, all of them in `listed`. Returns the number of cores that other programs
    used meanwhile."""
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        teams = []
        for contender in found:    # one after the other: some time out if all start at once
            teams.append(Team(contender, listed, job, num_ranks, folder))
            contender.loss = teams[-1].run(WARM_UP_STEPS).loss
        busy, own, begin = busy_seconds(), own_seconds(teams), time.perf_counter()
        for team in in_turns(teams, rounds):
            team.contender.turns.append(team.run(steps))
        elapsed = time.perf_counter() - begin
        others = max(0.0, (busy_seconds() - busy) - (own_seconds(teams) - own)) / elapsed
        for team in teams:
            team.close()
    return others


def speed(first: Contender, second: Contender) -> float:
    """The tokens/s of the first divided by those of the second: the median of the rounds."""
    return statistics.median(b / a for a, b in zip(first.seconds, second.seconds, strict=True))


# ---- the page ------------------------------------------------------------------------------------------------------------


def report(found: list[Contender], options: argparse.Namespace, others: float, argv: list[str]) -> str:
    """The page, in Markdown."""
    by_name = {contender.name: contender for contender in found}
    base = by_name.get("plain", found[0])
    zero3 = "not installed"
    if "zero3" in by_name:
        from importlib.metadata import version

        zero3 = version("deepspeed")
    lines = [
        "# Several processes on one machine", "",
        f"- work: GPT-2 of {MODEL['n_layer']} layers, {MODEL['n_embd']} wide, vocabulary {MODEL['vocab_size']}, "
        f"length {LENGTH}, global batch {BATCH}, fp32, AdamW, no clipping",
        f"- processes: {options.nproc}, on {num_cores()} cores ({processor()}), "
        f"{max(1, num_cores() // options.nproc)} thread(s) each; the plain process has {num_cores()}",
        f"- versions: {versions(DeepSpeed=zero3)}",
        f"- rounds: {options.rounds} of {options.steps} steps each, interleaved",
        *bullets(when_and_how("ranks.sh", argv)), "",
        f"Against {base.name}: median over the rounds of the ratio of tokens/s in the same round, with the middle half.", "",
    ]  # fmt: skip
    if others > 0.1:
        lines += [f"**Others used {others:.1f} of {num_cores()} cores meanwhile**: differences of a few per cent mean "
                  "nothing.", ""]
    lines += [f"| | | tokens/s | against {base.name} | middle half | waiting, ms a step | "
              f"loss after {WARM_UP_STEPS} steps |", "|---|---|---:|---:|---|---:|---:|"]
    for each in found:
        ratios = [b / a for a, b in zip(each.seconds, base.seconds, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios * 3)
        tokens = BATCH * LENGTH / statistics.median(each.seconds)
        waits = f"{1e3 * statistics.median(each.waits):.1f}" if each.waits else ""
        lines.append(f"| {each.name} | {each.about} | {tokens:,.0f} | {speed(each, base):.2f} | {low:.2f} to {high:.2f} | "
                     f"{waits} | {each.loss:.5f} |")
    lines.append("")
    for ours in (each for each in found if each.name.startswith("pstar")):
        against = [f"{speed(ours, by_name[name]):.2f} of {name} (goal {goal})"
                   for name, goal in GOALS.items() if name in by_name]
        lines.append(f"- {ours.name}: {', '.join(against)}")
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("ranks.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="4 rounds of 3 steps")
    parser.add_argument("--nproc", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds (default: 12; with --quick 4)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a contender in a round (default: 4; with --quick 3)")
    parser.add_argument("--only", default="", help="names, with commas (default: all that are installed)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    set_missing(options, rounds=(12, 4), steps=(4, 3))
    if options.nproc < 1 or BATCH % options.nproc:
        parser.error(f"--nproc must divide the global batch of {BATCH}")
    names = [each.name for each in contenders()]
    options.only = options.only.split(",") if options.only else names
    for name in options.only:
        if name not in names:
            parser.error(f"--only {name}: not known or not installed; choose from {', '.join(names)}")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes; returns 1 if a contender's loss differs from the others'."""
    options = parse(argv)
    found = [each for each in contenders() if each.name in options.only]
    others = measure(found, options.nproc, options.rounds, options.steps)
    losses = [each.loss for each in found]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        names = ", ".join(f"{each.name} {each.loss:.5f}" for each in found)
        print(f"error: not all contenders do the same work; their losses are {names}", file=sys.stderr)
        return 1
    sys.path.insert(0, str(HERE.parent))
    page = report(found, options, others, argv)
    publish(page, options.results / "ranks.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
