"""The cost of chunks if everything fits, and how much of a slow link prefetch hides if it does not. One process.

bash benchmarks/memory_speed.sh                       # about ten minutes
bash benchmarks/memory_speed.sh --quick               # a small model, to see that it runs
bash benchmarks/memory_speed.sh --only link --near 20%

Everything fits: pstar with all model data in near against a plain training loop with torch's fused AdamW.

A slow link: near holds a part of the model data. One core does not compute: it copies, as a GPU's copy engines do. The batch
is twice that of the first table: Python's time for each module does not depend on the batch, and it is no wait for a link.
Copies take as long as over a link of a given speed (simulated_link). The speed is chosen so that the transfers of a step
take a given multiple of its compute time. Compute is the step with everything in near; transfer is the bytes of the busier
direction divided by the speed. A step is reported as a share of the longer of the two.

That bound allows loads at any time of a step. But no update can begin before the last gradient has arrived: the norm of all
gradients decides whether the step is skipped, and how much it is clipped. So parameters that were updated in far are loaded
after backward, and only forward can hide that, a third of the computation. Hence a second bound, the least time of any exact
schedule with this placement: backward, and then the longer of forward and the load of all that was updated in far. With all
states in far, the first bound can be reached only if transfers take up to a third of the computation. The gap between a step
and the second bound is due to the engine alone.

With near filled (near_states) the states of the first groups stay in near, and the parameters of the others are loaded twice
a step. That moves more bytes, but spreads them over both directions and all passes. A variant that moves more has a longer
bound, so its share alone looks too good: compare the seconds too, which each row gives against prefetch 0 in the same round.

Speculative updates (speculative_update) begin before the last gradient has arrived, and are undone if they were wrong.
So the second bound does not hold for them: what they updated is loaded during backward. Here nothing is clipped or undone.
Their copies are made in the order in which the next forward needs them. A copy under way is not interrupted, so the smaller
the chunks, the less an urgent one waits: hence the variants with three chunks a layer.

Each table has a separate file, memory_fits.md and memory_link.md: --only renews one of them.

All processes of a table stay alive and work in turns, in an order that rotates. A number is the median over the rounds of
the ratio to another process in the SAME round. All variants of pstar must compute the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ranks
from command_line import at_least, parser_of, set_missing
from facts import bullets, busy_seconds, processor, versions, when_and_how
from processes import started
from turns import in_turns

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
FULL = ranks.MODEL | {"batch": ranks.BATCH, "threads": num_cores()}
SMALL = {"n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 300, "batch": 2,
         "threads": 1}    # so small a model is not faster with more
LINK_VOCABULARY = 4096
"""Of the second table's model, as in the shipped vocabulary: 21128 would be a third of a model 256 wide, in one chunk."""
LINKS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Transfer time of a step in compute times."""
NEIGHBOUR_ELEMS = 8_000_000
"""Of the process beside which the second table computes once: no cache holds so many."""
SPECULATIVE = {"speculative_update": True, "speculative_log": "75%"}    # all that updates overwrite: 12 of 16 bytes
VARIANTS = {"0": {"prefetch": 0}, "2": {"prefetch": 2},
            "2, near filled": {"prefetch": 2, "near_states": "fill"},
            "2, speculative": {"prefetch": 2} | SPECULATIVE,
            "2, near filled, speculative": {"prefetch": 2, "near_states": "fill"} | SPECULATIVE,
            "6, speculative, chunks of a third": {"prefetch": 6, "default_chunk_size": "third"} | SPECULATIVE,
            "6, near filled, speculative, thirds": {"prefetch": 6, "near_states": "fill",
                                                    "default_chunk_size": "third"} | SPECULATIVE,
            "4, near filled, and overlap_update": {"prefetch": 4, "near_states": "fill", "overlap_update": True}}
WAYS = {"in": "far to near", "out": "near to far"}
WARM_UP_STEPS = 3    # the first is traced, the second follows the trace
FITS_GOAL, LINK_GOAL = 0.95, 1.10
PASSES = ("forward", "backward")


# ---- one process ---------------------------------------------------------------------------------------------------------


def make_model(size: dict[str, Any]) -> Any:
    """GPT-2; size also has batch, threads, and, from tiled_loss.py, loss_tiles."""
    import torch

    from gpt2_chinese import GPT2LMHeadModel, ModelConfig, tile_loss

    torch.manual_seed(0)
    others = ("batch", "threads", "loss_tiles")
    model = GPT2LMHeadModel(ModelConfig(**{key: value for key, value in size.items() if key not in others}))
    tile_loss(model, size.get("loss_tiles", "none"))
    return model


def plain_steps(size: dict[str, int], keep: bool) -> Callable[..., dict]:
    """A training step of torch alone. keep: keep freed memory for the next step, as pstar does."""
    from pstar.memory.tier import keep_freed_memory

    if keep:
        keep_freed_memory()
    step = ranks.plain_loop(make_model(size))
    return lambda inputs, targets: {"loss": float(step(inputs, targets))}


def pstar_steps(size: dict[str, int], config: dict) -> Callable[..., dict]:
    """A training step of the engine; also returns the seconds that it waited and the bytes that it moved."""
    import pstar
    from pstar.memory.tier import FAR

    keys = {"optimizer": {"type": "AdamW", "params": ranks.ADAM}}
    model, optimizer = pstar.initialize_engine(lambda: make_model(size), 0, keys | config)
    updated_far = sum(group.piece_elems * model._chunks.parameters.dtype.itemsize for group in model.layout.groups
                      if model._chunks.tiers.states_tier[group.index] == FAR)

    def step(inputs: Any, targets: Any) -> dict:
        moments = [time.perf_counter()]
        optimizer.zero_grad()
        loss = model(inputs, targets)
        moments.append(time.perf_counter())
        model.backward(loss)
        moments.append(time.perf_counter())
        optimizer.step()
        told: dict[str, Any] = {"loss": float(loss.detach()), "waited": model.ledger.step_copy_waited_s,
                                "updated far": updated_far}
        told |= {name: end - begin for name, begin, end in zip(PASSES, moments, moments[1:], strict=False)}
        told["near peak"] = model.near.peak_bytes + max(model.schedule.known_peaks(), default=0)
        told |= {f"bytes {short}": model.ledger.step_bytes[way] for short, way in WAYS.items()}
        return told | {"bytes": max(told["bytes in"], told["bytes out"])}

    step.finish = model._store.links.drain    # updates in the background count for these steps
    return step


def work(size: dict[str, int], kind: str, config: dict, pipe: Connection) -> None:
    """Receives numbers of steps; sends the means of a step's seconds and bytes over them, and all losses."""
    sys.path.insert(0, str(HERE.parent))
    import torch

    torch.set_num_threads(size["threads"])
    step = pstar_steps(size, config) if kind == "pstar" else plain_steps(size, kind == "plain-kept")
    tokens = torch.randint(0, size["vocab_size"], (size["batch"], size["n_positions"] + 1),
                           generator=torch.Generator().manual_seed(1))  # fmt: skip
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    while (steps := pipe.recv()) is not None:
        begin = time.perf_counter()
        told = [step(inputs, targets) for _ in range(steps)]
        getattr(step, "finish", lambda: None)()
        seconds = (time.perf_counter() - begin) / steps
        means = {key: statistics.fmean(each[key] for each in told) for key in told[0]}
        pipe.send(means | {"seconds": seconds, "losses": [each["loss"] for each in told]})


class Runner:
    """A process that trains the number of steps that run() asks for."""

    def __init__(self, name: str, size: dict[str, int], kind: str, config: dict | None = None):
        self.name, self.losses, self.rounds = name, [], []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "pstar", "gpt2_chinese.model.gpt2"])    # imported once for all
        process, self._pipe = started(context, work, size, kind, config or {})
        self.processes = [process]

    def run(self, steps: int) -> dict:
        self._pipe.send(steps)
        try:
            told = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"error: the process of {self.name} ended; see above for the reason") from None
        self.losses += told["losses"]
        return told

    def close(self) -> None:
        self._pipe.send(None)
        self.processes[0].join(20)


# ---- measuring -----------------------------------------------------------------------------------------------------------


def measure(runners: list[Runner], rounds: int, steps: int, close: bool = True) -> float:
    """Fills the rounds of all runners. Returns the number of cores that other programs used meanwhile. close: end them."""
    for runner in runners:
        runner.run(WARM_UP_STEPS)
    busy, own, begin = busy_seconds(), ranks.own_seconds(runners), time.perf_counter()
    for runner in in_turns(runners, rounds):
        runner.rounds.append(runner.run(steps))
    elapsed = time.perf_counter() - begin
    others = max(0.0, (busy_seconds() - busy) - (ranks.own_seconds(runners) - own)) / elapsed
    for runner in runners if close else ():
        runner.close()
    return others


def same_losses(runners: list[Runner]) -> None:
    """Exits with an error if a loss of one runner differs in a bit from the first runner's."""
    for runner in runners[1:]:
        if runner.losses != runners[0].losses:
            step = next(i for i, (a, b) in enumerate(zip(runner.losses, runners[0].losses, strict=True)) if a != b)
            raise SystemExit(f"error: step {step}: {runner.name} computes the loss {runner.losses[step]!r}, "
                             f"{runners[0].name} {runners[0].losses[step]!r}")


def bounds(base: dict, told: dict, bytes_per_s: float) -> tuple[float, float]:
    """Lower bounds of a step's seconds: (the longer of compute and transfer, the least of any exact schedule).

    base: the step with everything near in the same round.
    """
    longer = max(base["seconds"], told["bytes"] / bytes_per_s)
    return longer, max(longer, base["backward"] + max(base["forward"], told["updated far"] / bytes_per_s))


def spread(ratios: list[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{low:.2f} to {high:.2f}"


def busy_line(others: float) -> list[str]:
    if others <= 0.1:
        return []
    return [f"**Others used {others:.1f} of {num_cores()} cores meanwhile**: differences of a few per cent mean nothing.",
            ""]


def fits_table(size: dict[str, int], options: argparse.Namespace) -> list[str]:
    """The table of pstar with everything in near, against a plain loop."""
    about = {"plain": "one PyTorch process", "plain-kept": "the same, keeping the memory it frees, as pstar does",
             "pstar": "pstar, everything near", "pstar, near_memory": "the same, with room for activations counted"}
    configs = {"pstar, near_memory": {"near_memory": "64GiB"}}    # more than all needs: its steps are resident
    runners = [Runner(name, size, name.partition(",")[0], configs.get(name)) for name in about]
    others = measure(runners, options.rounds, options.steps)
    firsts = [runner.losses[WARM_UP_STEPS] for runner in runners]
    if max(firsts) - min(firsts) > 1e-4 * max(firsts):
        raise SystemExit(f"error: not all do the same work; their losses are {', '.join(f'{loss:.5f}' for loss in firsts)}")
    lines = ["Against the plain process of the same round: median over the rounds, and the middle "
             f"half. Goal of pstar: at least {FITS_GOAL} of both.", "", *busy_line(others),
             "| | | tokens/s | against plain | middle half | against plain-kept | middle half | "
             f"loss after {WARM_UP_STEPS} steps |", "|---|---|---:|---:|---|---:|---|---:|"]  # fmt: skip
    for runner, loss in zip(runners, firsts, strict=True):
        cells = []
        for base in runners[:2]:
            ratios = [b["seconds"] / a["seconds"] for a, b in zip(runner.rounds, base.rounds, strict=True)]
            cells += [f"{statistics.median(ratios):.2f}", spread(ratios)]
        tokens = size["batch"] * size["n_positions"] / statistics.median(each["seconds"] for each in runner.rounds)
        lines.append(f"| {runner.name} | {about[runner.name]} | {tokens:,.0f} | {' | '.join(cells)} | {loss:.5f} |")
    return [*lines, ""]


def behind_link(size: dict[str, int]) -> dict[str, int]:
    """The size of the second table: a smaller vocabulary, twice the batch, and one thread less."""
    return size | {"vocab_size": min(LINK_VOCABULARY, size["vocab_size"]), "batch": 2 * size["batch"],
                   "threads": max(1, size["threads"] - 1)}  # fmt: skip


def update_for_ever(numel: int, pipe: Connection) -> None:
    """A neighbour on the other core: updates numel elements by the engine's Adam, again and again."""
    sys.path.insert(0, str(HERE.parent))
    import torch

    import pstar

    torch.set_num_threads(1)
    param = torch.nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones(numel)
    optimizer = pstar.HybridAdam([param])
    optimizer.step()
    pipe.send(None)
    while True:
        optimizer.step()


def beside_adam(base: Runner, options: argparse.Namespace) -> str:
    """A sentence: how much slower everything near computes while the other core updates parameters."""
    ratios = []
    for _ in range(options.rounds):
        alone = base.run(options.steps)
        neighbour, pipe = started(multiprocessing.get_context("forkserver"), update_for_ever, NEIGHBOUR_ELEMS)
        pipe.recv()
        beside = base.run(options.steps)
        neighbour.kill()
        neighbour.join()
        ratios.append(sum(beside[name] for name in PASSES) / sum(alone[name] for name in PASSES))
    return ("All cores share one memory: beside a process that updates parameters by Adam, forward and backward of "
            f"everything near take {statistics.median(ratios):.2f} of their time (middle half {spread(ratios)}). Behind the "
            "link the other core copies and updates, too, which no bound below counts.")


def link_row(name: str, runner: Runner, base: Runner, at_need: Runner, speed: float) -> str:
    """One variant with one link speed, compared with everything in near and with prefetch 0 in the same rounds."""
    rounds = list(zip(runner.rounds, base.rounds, at_need.rounds, strict=True))
    shares = [(told["seconds"] / longer, told["seconds"] / exact)
              for told, near, _ in rounds for longer, exact in [bounds(near, told, speed)]]
    was = statistics.median(told["bytes"] / speed / near["seconds"] for told, near, _ in rounds)
    against = statistics.median(told["seconds"] / slow["seconds"] for told, _, slow in rounds)
    median = {key: statistics.median(told[key] for told in runner.rounds)
              for key in ("bytes in", "bytes out", "seconds", "waited")}
    waited = f"{median['waited']:.3f}" if VARIANTS[name]["prefetch"] else ""
    cells = [cell for ratios in zip(*shares, strict=True)
             for cell in (f"{statistics.median(ratios):.2f}", spread(list(ratios)))]
    return (f"| {was:.2f} | {speed / 1e6:,.0f} | {name} | {median['bytes in'] / 1e6:,.1f} | "
            f"{median['bytes out'] / 1e6:,.1f} | {median['seconds']:.3f} | {against:.2f} | {waited} | {' | '.join(cells)} |")


def link_table(size: dict[str, int], options: argparse.Namespace) -> list[str]:
    """The table of a near that holds a part: links of several speeds, several values of prefetch and near_states."""
    layer = 12 * size["n_embd"] ** 2 + 13 * size["n_embd"]
    third = 4 * size["n_embd"] ** 2 + 8 * size["n_embd"]    # attention with both norms; each matrix of the MLP is smaller
    small = {"near_budget": options.near, "default_chunk_size": layer}
    probes = [Runner("near", size, "pstar", {"default_chunk_size": layer}), Runner("no link", size, "pstar", small)]
    measure(probes, 2, options.steps, close=False)
    same_losses(probes)
    shared = beside_adam(probes[0], options)
    for probe in probes:
        probe.close()
    compute, moved = probes[0].rounds[-1]["seconds"], probes[1].rounds[-1]["bytes"]
    if not moved:
        raise SystemExit(f"error: --near {options.near}: nothing travels; give less")
    lines = [f"Near {options.near} of the model data, chunks of a layer ({layer:,} elements). In and out: bytes to near and "
             "from near. Step: share of the longer of compute and transfer (the busier direction), goal at most "
             f"{LINK_GOAL:.2f} with prefetch. Exact: share of what any exact schedule takes at least, backward and then "
             "forward or the load of what was updated far. Waiting: for copies in the background; without prefetch they are "
             "made at once instead. All losses are bitwise those of everything near.", "",
             "With all states far no exact schedule reaches the bound where transfers take more than a third of the "
             "computing. Near filled: more bytes, but in both directions and in all passes. Who moves more has a longer "
             "bound, so look at the seconds as well, here against prefetch 0 in the same round. Speculative: updates begin "
             "during backward, so they may stay below what an exact schedule without undoing takes.", "", shared, "",
             "| transfer / compute | link, MB/s | prefetch | in, MB a step | out, MB a step | step, s | "
             "against prefetch 0 | waiting, s | step | middle half | exact | middle half |",
             "|---:|---:|---|---:|---:|---:|---:|---:|---:|---|---:|---|"]
    busiest = 0.0
    for multiple in LINKS[:1] if options.quick else LINKS:
        speed = moved / (multiple * compute)
        keys = {name: small | {"simulated_link": speed} | more for name, more in VARIANTS.items()}
        for config in keys.values():
            if config["default_chunk_size"] == "third":
                config["default_chunk_size"] = third
        base = Runner("everything near", size, "pstar", {"default_chunk_size": layer})
        runners = [Runner(f"prefetch {name}", size, "pstar", config) for name, config in keys.items()]
        busiest = max(busiest, measure([base, *runners], options.rounds, options.steps))
        same_losses([base, *runners])
        lines += [link_row(name, runner, base, runners[0], speed) for name, runner in zip(VARIANTS, runners, strict=True)]
    return [*lines[:6], *busy_line(busiest), *lines[6:], ""]


# ---- the page ------------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("memory_speed.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, one link, 2 rounds of 2 steps")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds (default: 10; with --quick 2)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a process in a round (default: 4; with --quick 2)")
    parser.add_argument("--only", choices=("fits", "link"), help="one of the two tables; the other file stays as it is")
    parser.add_argument("--near", default="25%", help="near budget behind the slow link (default: 25%% of all model data)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    set_missing(options, rounds=(10, 2), steps=(4, 2))
    return options


def page(title: str, size: dict[str, int], options: argparse.Namespace, argv: list[str], table: list[str]) -> str:
    return "\n".join([
        f"# {title}", "",
        f"- work: GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, length "
        f"{size['n_positions']}, batch {size['batch']}, fp32, AdamW, no clipping; one process of {size['threads']} "
        f"thread(s) on {num_cores()} cores ({processor()})",
        f"- versions: {versions()}",
        f"- rounds: {options.rounds} of {options.steps} steps each, interleaved",
        *bullets(when_and_how("memory_speed.sh", argv)), "", *table,
    ])  # fmt: skip


def main(argv: list[str]) -> int:
    """Measures, and writes each table as soon as it is complete. Exits with status 1 if the losses differ."""
    options = parse(argv)
    sys.path.insert(0, str(HERE.parent))
    size = SMALL if options.quick else FULL
    parts = {"fits": ("Everything fits", size, fits_table), "link": ("A slow link", behind_link(size), link_table)}
    options.results.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else parts:
        title, its_size, make_table = parts[name]
        text = page(title, its_size, options, argv, make_table(its_size, options))
        (options.results / f"memory_{name}.md").write_text(text, encoding="utf-8")
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
