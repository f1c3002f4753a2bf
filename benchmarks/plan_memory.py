"""One training process's measured peak memory, against pstar's plan before the model is made.

bash benchmarks/plan_memory.sh                        # 53 million parameters: about two minutes
bash benchmarks/plan_memory.sh --quick                # a small model, to see that it runs

    peak  =  interpreter + near + far + activations

Interpreter: resident memory of the same process before the model is made. A toy model was trained before, so that all code
is loaded. Matrices of the model's shapes were multiplied and freed: the library keeps workspace for each shape (MKL, which
takes none with MKL_DISABLE_FAST_MM=1 in the environment). On a GPU that workspace is in the reserves of `pstar plan`.
Near and far: the planned peak of each tier, in far with offloaded activations (without a GPU both are in host memory).
Activations, those in near, are given twice. First as planned by GptShape.activation_bytes, which counts what a GPU keeps,
dropout masks included. Then as counted by the engine in a separate process (Schedule.known_peaks, and the bytes that
offloading adds in far). The first is a plan, from numbers alone; the second is not, it shows whether the rest of the sum is
right. The peak is the kernel's count for the whole process (VmHWM).
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from command_line import parser_of, publish
from facts import bullets, processor, versions, when_and_how
from process_memory import status
from rank_memory import reset_peak, run, warm_up

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
MIB, STEPS, TOLERANCE = 2**20, 5, 0.05
FULL = {"n_layer": 8, "n_embd": 640, "n_head": 10, "n_positions": 128, "vocab_size": 21128, "batch": 4}
SMALL = {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_positions": 64, "vocab_size": 1000, "batch": 2}
MODES = {
    "everything near": {},
    "near 25 %": {"near_budget": "25%"},
    "everything near, activations offloaded": {"offload_activations": True},
    "near 25 %, activations offloaded": {"near_budget": "25%", "offload_activations": True},
}


def make_model(size: dict[str, int]) -> Any:
    import torch

    from gpt2_chinese.model.config import ModelConfig
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(ModelConfig(**{key: value for key, value in size.items() if key != "batch"}))


def planned(size: dict[str, int], config: dict) -> dict[str, int]:
    """Planned peak bytes of near, far and activations, from numbers alone; far also without offloaded activations."""
    from pstar.planner.gpt_shape import GptShape
    from pstar.planner.machines import Machine, MachineSpeeds, Reserves
    from pstar.planner.plan import plan_engine
    from pstar.planner.predict import Job, Prediction, predict

    plan = plan_engine(lambda: make_model(size), config)
    shape = GptShape(size["n_layer"], size["n_embd"], size["n_head"], size["vocab_size"], size["n_positions"])

    def ask(offload: bool) -> Prediction:
        job = Job(size["batch"], size["n_positions"], "fp32", recompute=False, chunk_elems=plan.layout.chunk_elems,
                  offload_activations=offload)  # fmt: skip
        near = plan.near_budget + job.activations_of(shape)[0]
        machine = Machine("this one", 1, near, 2**50, MachineSpeeds(1e9, 1e9, 1e9, 1e9),
                          reserves=Reserves(0, 0.0, 0, 0, host_page_bytes=1))  # fmt: skip
        return predict(shape, machine, job)

    answer = ask(config.get("offload_activations", False))
    if answer.layout != plan.layout or answer.near_groups != len(plan.near_state_groups):
        raise SystemExit("error: pstar.planner.predict expects other chunks than the engine makes")
    return {"near": answer.near_bytes, "far": answer.far_bytes, "far chunks": ask(False).far_bytes,
            "activations": answer.activation_bytes, "params": answer.num_params}  # fmt: skip


def take_workspace(size: dict[str, int]) -> None:
    """Multiplies matrices of the model's shapes, forward and backward, so that the library allocates its workspace."""
    import torch

    from pstar.memory.tier import keep_freed_memory

    keep_freed_memory(False)    # return the matrices' memory: if kept, it would hide the engine's
    width = size["n_embd"]
    for wide, out in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        weight = torch.ones(wide, out, requires_grad=True)    # stored as GPT-2 stores it
        inputs = torch.ones(size["batch"], size["n_positions"], wide, requires_grad=True)
        torch.nn.functional.linear(inputs, weight.t(), torch.ones(out, requires_grad=True)).sum().backward()
    head = torch.ones(size["vocab_size"], width, requires_grad=True)
    inputs = torch.ones(size["batch"], size["n_positions"], width, requires_grad=True)
    torch.nn.functional.linear(inputs, head).sum().backward()


def train(size: dict[str, int], config: dict, pipe: Connection) -> None:
    """Trains in this process, and sends its peak and the peaks of its tiers, in bytes."""
    import torch

    import pstar

    torch.set_num_threads(num_cores())
    warm_up()
    take_workspace(size)
    gc.collect()
    found = {"interpreter": reset_peak()}
    model, optimizer = pstar.initialize_engine(lambda: make_model(size), 0, config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, size["vocab_size"], (size["batch"], size["n_positions"] + 1), generator=generator)
        optimizer.zero_grad()
        model.backward(model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        optimizer.step()
    found |= {"peak": status("VmHWM"), "near": model.near.peak_bytes, "far": model.far.peak_bytes,
              "non_model": max(model.schedule.known_peaks(), default=0)}
    pipe.send(found | {"plan": planned(size, config)})    # planned last, so that planning is not in the peak


def measure(size: dict[str, int], config: dict) -> dict[str, dict]:
    """{"plan": ..., "run": ..., "counted": ...}, the last two from one process each. A profile makes the engine count."""
    with tempfile.TemporaryDirectory(prefix="plan_memory_") as folder:
        counting = config | {"profile": str(Path(folder, "profile.json"))}
        ran, counted = (run(train, [(size, keys)])[0] for keys in (config, counting))
        return {"plan": ran["plan"], "run": ran, "counted": counted}


# ---- the page ------------------------------------------------------------------------------------------------------------


def share(peak: int, formula: int) -> str:
    """Peak divided by formula, marked if it misses the goal."""
    return f"{peak / formula:.1%}" + ("" if abs(peak / formula - 1) <= TOLERANCE else ", **off**")


def report(size: dict[str, int], results: dict[str, dict], argv: list[str]) -> str:
    """The page, in Markdown."""
    params = next(iter(results.values()))["plan"]["params"]
    lines = [
        "# Memory as planned", "",
        f"- work: GPT-2 of {size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, "
        f"{params / 1e6:.1f} million parameters, {size['batch']} x {size['n_positions']} tokens, fp32, AdamW, no "
        f"recomputation; {STEPS} steps, one process on {num_cores()} cores ({processor()})",
        f"- versions: {versions()}",
        *bullets(when_and_how("plan_memory.sh", argv)), "",
        "MiB. Planned: interpreter (with the workspace of the library for matrices, measured before the model) + near + far "
        "(with offloaded activations) + activations near, all three as planned. Goal: the peak within "
        f"{TOLERANCE:.0%}.", "",
        "| | interpreter | near | far | activations | planned | peak | of planned |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip

    def cells(numbers: list[int]) -> str:
        return " | ".join(f"{number / MIB:,.1f}" for number in numbers)

    for name, each in results.items():
        plan, ran = each["plan"], each["run"]
        parts = [ran["interpreter"], plan["near"], plan["far"], plan["activations"]]
        lines.append(f"| {name} | {cells([*parts, sum(parts), ran['peak']])} | {share(ran['peak'], sum(parts))} |")
    lines += ["", "The same with activations as the engine counted them in another process: what is no chunk near, and "
              "what offloading added to the peak of far. This is no plan: it tells the plan of the activations from the "
              "rest of the sum.", "",
              "| | activations planned | counted near | counted far | near, peak of the tier | far, peak of the tier | "
              "planned, with those counted | peak | of that |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, each in results.items():
        plan, ran, counted = each["plan"], each["run"], each["counted"]
        away = max(0, counted["far"] - plan["far chunks"])
        formula = ran["interpreter"] + plan["near"] + plan["far chunks"] + counted["non_model"] + away
        numbers = [plan["activations"], counted["non_model"], away, ran["near"], ran["far"], formula, ran["peak"]]
        lines.append(f"| {name} | {cells(numbers)} | {share(ran['peak'], formula)} |")
    return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("plan_memory.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, one of the modes")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this benchmark reads the kernel's counts in /proc, which are not here")
    return options


def main(argv: list[str]) -> int:
    """Measures and writes."""
    options = parse(argv)
    size = SMALL if options.quick else FULL
    names = ["near 25 %, activations offloaded"] if options.quick else list(MODES)
    results = {name: measure(size, MODES[name]) for name in names}
    page = report(size, results, argv)
    publish(page, options.results / "plan_memory.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
