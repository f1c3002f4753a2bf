"""The ablation: the same work through chapters 00 to 07, a table and the data of two charts below benchmarks/results/.

bash benchmarks/ablation.sh                     # every chapter in this checkout, at 1, 2 and 4 processes, three rounds
bash benchmarks/ablation.sh --quick             # a few minutes: 1 and 2 processes, one round, a few steps
bash benchmarks/ablation.sh --seeds 42,43,44 --rounds 1 --steps 200 --keep    # with its uncertainty: hours on two cores
bash benchmarks/ablation.sh --chapters 00,02 --nproc 1,2,4,8 --model-config small

Rounds are interleaved (every program once, then all again) and medians are taken, so that other work on the machine slows
all programs down equally. With several seeds the table gives mean and standard deviation over the seeds; --keep runs only
those that earlier calls have not run. Only ratios within one table are comparable. A speed-up is given only between runs
with the same work: same global batch, vocabulary, length, precision, seed, model and corpus; otherwise the table says what
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import ablation_page
import ablation_rounds
from ablation_rounds import Failures, Rounds
from ablation_variants import VARIANTS, WARM_UP_STEPS, Result, Variant
from command_line import at_least, parser_of, set_missing
from facts import bullets, processor, versions, when_and_how
from processes import why_it_failed

from durable.cores import num_cores

__all__ = ["ROOT", "WARM_UP_STEPS", "Result", "Variant", "hardware", "run_once"]
ROOT = Path(__file__).resolve().parents[1]


def read_result(folder: Path, nproc: int) -> Result:
    """Reads a run's result from its --output-dir."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    about = json.loads((folder / "final" / "run.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Result(nproc, config, rows, about.get("peak_bytes_by_rank") or [rows[-1]["peak_bytes"]])


def run_once(variant: Variant, nproc: int, options: argparse.Namespace, folder: Path, seed: int) -> Result | str:
    """Runs a chapter's train.sh; returns the result, or the line that says why there is none."""
    work = ["--max-steps", options.steps, "--eval-every", options.steps, "--save-every", options.steps, "--log-every", 1,
            "--model-config", options.model_config, "--seed", seed,
            "--precision", variant.precision, "--nproc", nproc, "--resume", "never", "--output-dir", folder]  # fmt: skip
    for flag in ("batch_size", "seq_len", "lr"):
        if getattr(options, flag):
            work += ["--" + flag.replace("_", "-"), getattr(options, flag)]
    command = ["bash", ROOT / "chapters" / variant.chapter / "train.sh", *work,
               *(flag.format(p=nproc) for flag in variant.flags)]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run([str(c) for c in command], env={**os.environ, **threads, "PYTHON": sys.executable},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    if done.returncode:
        return why_it_failed(done.returncode, done.stdout)
    result = read_result(folder, nproc)
    shutil.rmtree(folder)
    return result


def run_all(jobs: list[tuple[Variant, int]], options: argparse.Namespace, rounds: Rounds, failures: Failures) -> None:
    """Runs all jobs in every round and with every seed that is not kept, and adds results to the variants and to `rounds`.

    A job that fails is not repeated; `failures` has the reason.
    """
    to_run = [seed for number in range(options.rounds) for seed in options.seeds if rounds.of(seed) <= number]
    with tempfile.TemporaryDirectory(prefix="ablation_") as folder:
        for number, seed in enumerate(to_run):
            runs: dict[str, list[Result]] = {}
            for place, (variant, nproc) in enumerate(jobs, start=1):
                name = variant.program
                if (name, nproc) in failures:
                    continue
                where = f"round {number + 1}/{len(to_run)}, seed {seed}, run {place}/{len(jobs)}"
                print(f"{where}: {name}, {nproc} processes: ", end="", flush=True)
                result = run_once(variant, nproc, options, Path(folder, "run"), seed)
                if isinstance(result, str):
                    failures[name, nproc] = result
                    print(result, flush=True)
                    shutil.rmtree(Path(folder, "run"), ignore_errors=True)
                else:
                    variant.runs.append(result)
                    runs.setdefault(name, []).append(result)
                    print(f"{result.tokens_per_s:,.0f} tokens/s", flush=True)
            rounds.add(seed, dict(when_and_how("ablation.sh", []))["date"], runs, failures)


# ---- the machine --------------------------------------------------------------------------------------------------------


def hardware() -> list[tuple[str, str]]:
    """The processor, accelerators and versions, without the machine's name."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [
        ("processor", f"{processor()}, {num_cores()} cores"),
        ("accelerators", ", ".join(gpus) or "none: all ran on the CPU, over gloo"),
        ("versions", f"{versions()}, {platform.system()}"),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("ablation.sh", __doc__)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--quick", action="store_true", help="1 and 2 processes, one round, 12 steps")
    parser.add_argument("--chapters", default="", help="their first two digits, 00,02 (default: all that are there)")
    parser.add_argument("--nproc", type=numbers, help="numbers of processes (default: 1,2,4; with --quick 1,2)")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds (default: 3; with --quick 1)")
    parser.add_argument("--steps", type=at_least(2), help="steps of a run (default: 40; with --quick 12)")
    parser.add_argument("--model-config", default="tiny", help="as in every chapter (default: tiny)")
    parser.add_argument("--batch-size", type=int, help="GLOBAL, as in every chapter (default: by config)")
    parser.add_argument("--seq-len", type=int, help="as in every chapter (default: by config)")
    parser.add_argument("--lr", type=float, help="as in every chapter (default: by config); with a batch below the "
                        "default one give a lower rate, or roundings grow to a tenth of the loss within 100 steps")
    parser.add_argument("--seeds", type=numbers, default=[42], help="runs each round with each of them (default: 42)")
    parser.add_argument("--keep", action="store_true", help="keep the complete rounds of earlier calls with the same work, "
                        "and run only those that are missing: hours of runs in several goes")
    parser.add_argument("--threads", type=at_least(1), default=1, help="of each process, whatever their number (default: 1)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where to write")
    options = parser.parse_args(argv)
    options.nproc = options.nproc or ([1, 2] if options.quick else [1, 2, 4])
    set_missing(options, rounds=(3, 1), steps=(40, 12))
    if min(options.nproc) < 1:
        parser.error("--nproc must be at least 1")
    return options


def main(argv: list[str]) -> int:
    """Runs everything and writes the results; returns 1 if no run succeeded."""
    options = parse(argv)
    wanted = options.chapters.split(",") if options.chapters else []
    variants = [replace(v, runs=[]) for v in VARIANTS if (ROOT / "chapters" / v.chapter / "train.sh").exists()
                and (not wanted or v.chapter[:2] in wanted)]  # fmt: skip
    jobs = [(v, n) for v in variants for n in options.nproc if not (v.one_process and n > 1)]
    jobs += [(v, 1) for v in variants if v.one_process and 1 not in options.nproc]
    work = {name: getattr(options, name) for name in ("steps", "model_config", "batch_size", "seq_len", "lr", "threads")}
    work |= {"programs": [[v.program, n] for v, n in jobs]}
    rounds = Rounds(options.results / ablation_rounds.FILE, work)
    try:
        if options.keep:
            rounds.load()
    except ablation_rounds.OtherWork as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failures = rounds.give(variants)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    facts = hardware()
    facts.append(("work", f"{options.steps} steps of {options.model_config}, {options.threads} thread a process"))
    facts.append(("load at the start", f"{load:.1f}" + (": others use this machine, mind the noise" if load > 0.5 else "")))
    for name, value in facts:
        print(f"  {name:<18}{value}")
    try:
        run_all(jobs, options, rounds, failures)
    except KeyboardInterrupt:
        print("\ninterrupted: the table has what was complete")
        facts.append(("interrupted", "not all rounds and seeds ran"))
    facts.append(("interleaved rounds by seed", rounds.seeds() or "none is complete"))
    variants = [variant for variant in variants if variant.runs]
    if not variants:
        print("error: no run succeeded", file=sys.stderr)
        return 1
    head = ["# The ablation", "", *bullets([*facts, *when_and_how("ablation.sh", argv)]), ""]
    failed = [(name, nproc, why) for (name, nproc), why in failures.items()]
    table = ablation_page.write(options.results, head, variants, failed, num_cores())
    print("\n".join(["", *table, "", f"written below {options.results}"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
