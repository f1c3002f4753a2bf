"""The ablation: the same work through chapters 00 to 04 and 07, a table and two figures below benchmarks/results/.

bash benchmarks/ablation.sh                     # every chapter in this checkout, at 1, 2 and 4 processes, three rounds
bash benchmarks/ablation.sh --quick             # a few minutes: 1 and 2 processes, one round, a few steps
bash benchmarks/ablation.sh --chapters 00,02 --nproc 1,2,4,8 --model-config small

Rounds are interleaved (every program once, then all again) and medians are taken, so that other work on the machine slows
all programs down equally. Only ratios within one table are comparable. A speed-up is given only between runs with the same
work: same global batch, vocabulary, length, precision, seed, model and corpus; otherwise the table says what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_line import parser_of
from facts import bullets, num_cores, processor, versions, when_and_how

ROOT = Path(__file__).resolve().parents[1]
SAME_WORK = ("batch_size", "vocab", "vocab_size", "seq_len", "precision", "seed", "model", "train_data", "grad_accum",
             "lr", "warmup_steps", "weight_decay", "clip_grad_norm", "max_steps", "device")  # fmt: skip
WARM_UP_STEPS = 3  # left out of the times

# (bytes that rank 0 sends in a step, bytes that it receives, the formula as text), in units of the gradients' bytes, for p
# processes.
RING = (lambda p: 2 * (p - 1) / p, lambda p: 2 * (p - 1) / p, "2 (p-1)/p each way")
SERVER = (lambda p: p - 1, lambda p: p - 1, "(p-1) each way")
CHUNKS = (lambda p: 3 * (p - 1) / p, lambda p: 3 * (p - 1) / p, "3 (p-1)/p each way, and the chunks' padding")
NONE = (lambda p: 0, lambda p: 0, "none")


@dataclass
class Variant:
    """One line of the ablation: a chapter with flags."""

    chapter: str
    name: str
    flags: tuple[str, ...] = ()
    formula: tuple[Any, Any, str] = RING
    precision: str = "fp32"
    sent_bits: int = 32  # bits of one element of a gradient in messages
    one_process: bool = False
    same_curve: bool = True  # False: its loss curve may differ from chapter 00's
    runs: list[Result] = field(default_factory=list)


VARIANTS = (
    Variant("00_single", "one process", formula=NONE, one_process=True),
    Variant("00_single", "one process, bf16", formula=NONE, precision="bf16", one_process=True, same_curve=False),
    Variant("01_parameter_server", "server", formula=SERVER),
    Variant("01_parameter_server", "server, async", ("--mode", "async"), SERVER, same_curve=False),
    Variant("02_ddp", "DDP naive", ("--variant", "naive")),
    Variant("02_ddp", "DDP buckets", ("--variant", "bucket")),
    Variant("02_ddp", "DDP buckets, weights never compared", ("--variant", "bucket", "--check-sync", "0")),
    Variant("02_ddp", "DDP ring", ("--variant", "ring")),
    Variant("02_ddp", "DDP of torch", ("--backend", "torch")),
    Variant("03_horovod", "Horovod"),
    Variant("03_horovod", "Horovod, fp16 on the way", ("--compression", "fp16"), sent_bits=16, same_curve=False),
    Variant("04_apex", "DDP + mixed precision", ("--opt-level", "O1"), precision="bf16", same_curve=False),
    Variant("04_apex", "Horovod + mixed precision", ("--opt-level", "O1", "--comm", "horovod"), precision="bf16",
            same_curve=False),
    Variant("07_patrickstar", "PatrickStar", ("--near-budget", "100%"), CHUNKS),
)  # fmt: skip


@dataclass
class Result:
    """One finished run, read from its output folder."""

    nproc: int
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    peaks: list[int]

    @property
    def step_s(self) -> float:
        """Median seconds of a step, without the first ones."""
        return statistics.median(row["step_s"] for row in self.rows[min(WARM_UP_STEPS, len(self.rows) - 1) :])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a global batch over the median step; an asynchronous step uses only the gradients that have arrived."""
        share = (self.mean("num_gradients") or self.nproc) / self.nproc
        return share * self.config["batch_size"] * self.config["seq_len"] / self.step_s

    def mean(self, key: str) -> float | None:
        """Mean over the steps after the first ones; None if it was not measured."""
        values = [row[key] for row in self.rows[min(WARM_UP_STEPS, len(self.rows) - 1) :] if row.get(key) is not None]
        return statistics.fmean(values) if values else None


class DifferentWork(ValueError):
    """Two runs did different work: their speeds must not be compared."""


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of the settings of SAME_WORK in which two runs differ."""
    return [name for name in SAME_WORK if ours.get(name) != theirs.get(name)]


def speed_up(ours: Result, base: Result) -> float:
    """The tokens per second of `ours` divided by those of `base`.

    Raises:
        DifferentWork: the runs did not do the same work; the message names what differs.
    """
    if names := differences(ours.config, base.config):
        raise DifferentWork(f"other {', '.join(names)}")
    return ours.tokens_per_s / base.tokens_per_s


def base_of(result: Result, bases: list[Result]) -> Result | None:
    """The run of chapter 00 with the same work; else its first run, for which speed_up raises DifferentWork."""
    return next((base for base in bases if not differences(result.config, base.config)), bases[0] if bases else None)


def read_result(folder: Path, nproc: int) -> Result:
    """Reads a run's result from its --output-dir."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    about = json.loads((folder / "final" / "run.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Result(nproc, config, rows, about.get("peak_bytes_by_rank") or [rows[-1]["peak_bytes"]])


def run_once(variant: Variant, nproc: int, options: argparse.Namespace, folder: Path) -> Result | str:
    """Runs a chapter's train.sh; returns the result, or the line that says why there is none."""
    work = ["--max-steps", options.steps, "--eval-every", options.steps, "--save-every", options.steps, "--log-every", 1,
            "--model-config", options.model_config, "--seed", options.seed, "--precision", variant.precision,
            "--nproc", nproc, "--resume", "never", "--output-dir", folder]  # fmt: skip
    for flag in ("batch_size", "seq_len"):
        if getattr(options, flag):
            work += ["--" + flag.replace("_", "-"), getattr(options, flag)]
    command = ["bash", ROOT / "chapters" / variant.chapter / "train.sh", *work, *variant.flags]
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run([str(c) for c in command], env={**os.environ, **threads, "PYTHON": sys.executable},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("error:")] or lines[-1:] or ["nothing was said"]
        return f"status {done.returncode}: {said[0].removeprefix('error: ')}"
    result = read_result(folder, nproc)
    shutil.rmtree(folder)
    return result


def median_result(results: list[Result]) -> Result:
    """The run of median speed among the rounds of a variant."""
    return sorted(results, key=lambda result: result.tokens_per_s)[len(results) // 2]


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


# ---- the table ----------------------------------------------------------------------------------------------------------


def mib(num_bytes: float | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**20:.2f}"


def lines_of(variants: list[Variant], failures: list[tuple[str, int, str]]) -> list[str]:
    """The Markdown table, and below it the runs that failed."""
    medians = {(v.chapter, v.name, n): median_result([r for r in v.runs if r.nproc == n])
               for v in variants for n in sorted({r.nproc for r in v.runs})}  # fmt: skip
    bases = [result for (chapter, _, _), result in medians.items() if chapter == "00_single"]
    table = [
        "| chapter | | p | tokens/s | speed-up | loss after the same tokens | largest gap to 00 | sent by rank 0, MiB "
        "| received | formula, MiB | peak memory by rank, MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in variants:
        for nproc in sorted({result.nproc for result in variant.runs}):
            result = medians[variant.chapter, variant.name, nproc]
            base = base_of(result, bases)
            try:
                ratio = f"{speed_up(result, base):.2f}" if base else "no run of 00"
            except DifferentWork as reason:
                ratio = f"— ({reason})"
            gap, base = "—", bases[0] if bases else None
            if base and len(base.rows) == len(result.rows):
                gaps = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(result.rows, base.rows, strict=True)]
                gap = f"{max(gaps):.0e}" + ("" if variant.same_curve else " (exception)")
            gradients = variant.sent_bits // 8 * result.config["num_parameters"]
            out, into, text = variant.formula
            formula = f"{mib(out(nproc) * gradients)} / {mib(into(nproc) * gradients)}" if nproc > 1 else "0 / 0"
            sent, received = (mib(result.mean(key)) if nproc > 1 else "0" for key in ("sent_bytes", "received_bytes"))
            peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in result.peaks)
            table.append(f"| {variant.chapter} | {variant.name} | {nproc} | {result.tokens_per_s:,.0f} | {ratio} | "
                         f"{result.rows[-1]['loss']:.4f} | {gap} | {sent} | {received} | {formula} | {peaks} |")  # fmt: skip
    formulas = [f"- formula of {v.chapter}: {v.formula[2]}, times 4 bytes a parameter" + (", 2 for fp16 on the way" if
                v.chapter.startswith("03") else "") for v in variants if v.runs]  # fmt: skip
    table += ["", "A speed-up is against chapter 00 in the same precision; the gap is against chapter 00 in fp32."]
    table += ["", *dict.fromkeys(formulas)]
    table += [f"- **not run**: {name} at {nproc} processes: {why}" for name, nproc, why in failures]
    return table


def draw(variants: list[Variant], folder: Path) -> None:
    """Speed-up against processes; loss against step and against time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bases = [median_result(v.runs) for v in variants if v.chapter == "00_single" and v.runs]
    points: dict[str, dict[int, float]] = {}
    for variant in (v for v in variants if v.runs and bases and not v.one_process):
        for nproc in sorted({result.nproc for result in variant.runs}):
            result = median_result([r for r in variant.runs if r.nproc == nproc])
            base = base_of(result, bases)
            if not differences(result.config, base.config):
                points.setdefault(f"{variant.chapter[:2]} {variant.name}", {})[nproc] = speed_up(result, base)
    draw_speed_up(points, num_cores(), folder / "ablation_speedup.png")

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for number, variant in enumerate(v for v in variants if v.runs):
        nproc = max(result.nproc for result in variant.runs)
        result = median_result([r for r in variant.runs if r.nproc == nproc])
        losses, label = [row["loss"] for row in result.rows], f"{variant.chapter[:2]} {variant.name}, p = {nproc}"
        style, color = "-" if variant.same_curve else "--", plt.get_cmap("tab20")(number * 2 % 20 + (number >= 10))
        by_step.plot([row["step"] for row in result.rows], losses, style, color=color, label=label)
        by_time.plot([result.step_s * row["step"] for row in result.rows], losses, style, color=color, label=label)
    by_step.set(xlabel="step", ylabel="loss, nats per token")
    by_time.set(xlabel="seconds in steps")
    by_time.legend(fontsize=8)
    figure.savefig(folder / "ablation_loss.png", dpi=120)


def draw_speed_up(points: dict[str, dict[int, float]], cores: int, path: Path) -> None:
    """points: label -> {processes: speed-up}; the background is grey for more processes than cores."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.5), layout="constrained")
    most = max(nproc for each in points.values() for nproc in each)
    for number, (label, each) in enumerate(points.items()):
        line = {"color": plt.get_cmap("tab20")(number * 2 % 20 + (number >= 10)), "marker": "os^D"[number % 4]}
        axes.plot(list(each), list(each.values()), label=label, **line)
    axes.plot([1, most], [1, most], ":", color="grey", label="one for each process")
    if most > cores:
        axes.axvspan(cores, most, color="#eeeeee", zorder=0, label=f"more processes than cores ({cores})")
    highest = max(value for each in points.values() for value in each.values())
    axes.set(xlabel="processes", ylabel="tokens/s against one process", xticks=range(1, most + 1), ylim=(0, highest + 0.4))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("ablation.sh", __doc__)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--quick", action="store_true", help="1 and 2 processes, one round, 12 steps")
    parser.add_argument("--chapters", default="", help="their first two digits, 00,02 (default: all that are there)")
    parser.add_argument("--nproc", type=numbers, help="numbers of processes (default: 1,2,4; with --quick 1,2)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 3; with --quick 1)")
    parser.add_argument("--steps", type=int, help="steps of a run (default: 40; with --quick 12)")
    parser.add_argument("--model-config", default="tiny", help="as in every chapter (default: tiny)")
    parser.add_argument("--batch-size", type=int, help="GLOBAL, as in every chapter (default: by config)")
    parser.add_argument("--seq-len", type=int, help="as in every chapter (default: by config)")
    parser.add_argument("--seed", type=int, default=42, help="as in every chapter (default: 42)")
    parser.add_argument("--threads", type=int, default=1, help="of each process, whatever their number (default: 1)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where to write")
    options = parser.parse_args(argv)
    quick = options.quick
    options.nproc = options.nproc or ([1, 2] if quick else [1, 2, 4])
    options.rounds, options.steps = options.rounds or (1 if quick else 3), options.steps or (12 if quick else 40)
    if min(options.nproc) < 1 or options.rounds < 1 or options.steps < 2 or options.threads < 1:
        parser.error("--nproc, --rounds and --threads must be at least 1, --steps at least 2")
    return options


def main(argv: list[str]) -> int:
    """Runs everything and writes the results; returns 1 if no run succeeded."""
    options = parse(argv)
    wanted = options.chapters.split(",") if options.chapters else []
    variants = [v for v in VARIANTS if (ROOT / "chapters" / v.chapter / "train.sh").exists()
                and (not wanted or v.chapter[:2] in wanted)]  # fmt: skip
    jobs = [(v, n) for v in variants for n in options.nproc if not (v.one_process and n > 1)]
    jobs += [(v, 1) for v in variants if v.one_process and 1 not in options.nproc]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    facts = hardware()
    facts.append(("work", f"{options.steps} steps of {options.model_config}, {options.rounds} interleaved rounds, "
                          f"{options.threads} thread a process"))  # fmt: skip
    facts.append(("load at the start", f"{load:.1f}" + (": others use this machine, mind the noise" if load > 0.5 else "")))
    for name, value in facts:
        print(f"  {name:<18}{value}")
    failures: dict[tuple[str, int], str] = {}
    with tempfile.TemporaryDirectory(prefix="ablation_") as folder:
        for number in range(options.rounds):
            for place, (variant, nproc) in enumerate(jobs, start=1):
                name = f"{variant.chapter}, {variant.name}"
                if (name, nproc) in failures:
                    continue
                where = f"round {number + 1}/{options.rounds}, run {place}/{len(jobs)}"
                print(f"{where}: {name}, {nproc} processes: ", end="", flush=True)
                result = run_once(variant, nproc, options, Path(folder, "run"))
                if isinstance(result, str):
                    failures[name, nproc] = result
                    print(result, flush=True)
                    shutil.rmtree(Path(folder, "run"), ignore_errors=True)
                else:
                    variant.runs.append(result)
                    print(f"{result.tokens_per_s:,.0f} tokens/s", flush=True)
    variants = [variant for variant in variants if variant.runs]
    if not variants:
        print("error: no run succeeded", file=sys.stderr)
        return 1
    options.results.mkdir(parents=True, exist_ok=True)
    facts += when_and_how("ablation.sh", argv)
    table = lines_of(variants, [(name, nproc, why) for (name, nproc), why in failures.items()])
    head = ["# The ablation", "", *bullets(facts), ""]
    tail = ["", "Bytes are the kernel's count of rank 0's TCP traffic in a step, means; chapter 07 exchanges its chunks",
            "through shared memory between processes of one machine: its sockets stay empty. Memory is the peak of the",
            "whole process on a CPU, and torch's on a GPU. Tokens/s say how fast, losses after the same tokens how well.",
            "", "![speed-up](ablation_speedup.png)", "", "![loss](ablation_loss.png)", ""]  # fmt: skip
    (options.results / "ablation.md").write_text("\n".join([*head, *table, *tail]), encoding="utf-8")
    try:
        draw(variants, options.results)
    except ImportError:
        print("no figures: matplotlib is not installed (pip install matplotlib)")
    print("\n".join(["", *table, "", f"written below {options.results}"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
