"""The chapters on one GPU, one process each: their losses beside those of chapter 00 on the same GPU.

    python benchmarks/gpu/chapters.py
    python benchmarks/gpu/chapters.py --quick --device cpu     # few steps, to see that it runs

One process sends nothing. The table shows that each chapter computes the same curve on a GPU: in fp32 with deterministic
kernels, within the contract's 1e-4 of chapter 00; in 16 bits, where chapters cast at different places, within 1e-2 (rounding
to bf16 is 4e-3). The first row trains on the CPU and is compared with the second. The last rows go on from a checkpoint of
the middle, with deterministic kernels: their losses must be those of the uninterrupted run, bit for bit. Several programs
run at the same time, so no speed is given. Writes gpu_chapters.md; status 1 if a chapter fails or its losses are further
away.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(REPO)]
from command_line import at_least  # noqa: E402
from common import check_device, facts_of, gpu_parser, name_of, write_page  # noqa: E402
from facts import bullets  # noqa: E402
from processes import finding_this_checkout, why_it_failed  # noqa: E402

STEPS, QUICK_STEPS, AT_ONCE = 30, 4, 6
LR = 3e-4
FP32, HALF = 1e-4, 1e-2
LIMIT_S = 240


@dataclass(frozen=True)
class Row:
    """A chapter with flags."""

    chapter: str
    precision: str = "fp32"
    flags: tuple[str, ...] = ()
    device: str = ""
    """The GPU, unless it says cpu."""
    resumed: bool = False
    """It goes on from a checkpoint, and is compared with the run that wrote it."""

    @property
    def what(self) -> str:
        return " ".join(self.flags) + ", resumed" * self.resumed or "—"


@dataclass(frozen=True)
class Result:
    """A finished run."""

    losses: list[float]
    peak_bytes: int
    """The most that torch's allocator gave."""
    beside: list[float] | None = None
    """The losses of the same steps with which a resumed run is compared."""


def _rows(chapter: str, *more: tuple[str, ...], precision: str = "fp32") -> tuple[Row, ...]:
    return tuple(Row(chapter, precision, flags) for flags in more)


ROWS = (
    Row("00_single", device="cpu"), Row("00_single"), Row("00_single", flags=("--grad-accum", "4")),
    Row("00_single", flags=("--recompute", "block", "--loss-tiles", "auto")),
    Row("01_parameter_server"),
    *_rows("02_ddp", ("--variant", "bucket"), ("--backend", "torch")),
    Row("04_apex", flags=("--opt-level", "O0")),
    Row("05_model_parallel"),
    *_rows("06_zero", ("--zero-stage", "1"), ("--zero-stage", "3"), ("--zero-stage", "3", "--offload", "optimizer,params")),
    *_rows("07_patrickstar", ("--backend", "own", "--near-budget", "min"), ("--near-budget", "100%"),
           ("--near-budget", "min"), ("--near-budget", "min", "--speculative-update"),
           ("--near-budget", "min", "--offload-activations")),
    Row("00_single", "bf16"), Row("02_ddp", "bf16"),
    *_rows("04_apex", ("--opt-level", "O1"), ("--opt-level", "O2"), ("--opt-level", "O1", "--backend", "torch"),
           precision="bf16"),
    *_rows("07_patrickstar", ("--near-budget", "100%"), ("--near-budget", "min"),
           ("--near-budget", "100%", "--compile", "block"), precision="bf16"),
    Row("00_single", "fp16"), *_rows("04_apex", ("--opt-level", "O1"), ("--opt-level", "O2"), precision="fp16"),
    Row("06_zero", "fp16"), Row("07_patrickstar", "fp16", ("--near-budget", "min")),
    Row("00_single", "bf16", ("--deterministic",), resumed=True),
    Row("04_apex", "fp16", ("--opt-level", "O2", "--deterministic"), resumed=True),
    Row("06_zero", "bf16", ("--deterministic",), resumed=True),
    Row("07_patrickstar", "bf16", ("--near-budget", "min", "--deterministic"), resumed=True),
)  # fmt: skip


def few() -> tuple[Row, ...]:
    """The first row of each chapter in each precision."""
    return tuple({(row.chapter, row.precision, row.device, row.resumed): row for row in reversed(ROWS)}.values())[::-1]


def run(row: Row, device: str, steps: int, folder: Path, resume: str = "never") -> Result | str:
    """Trains; returns the line that says why it failed, if it did."""
    work = ["--device", row.device or device, "--nproc", "1", "--precision", row.precision, "--max-steps", str(steps),
            "--eval-every", str(steps), "--save-every", str(steps // 2), "--log-every", "1", "--lr", str(LR),
            "--resume", resume, "--output-dir", str(folder)]  # fmt: skip
    if row.precision == "fp32":
        work.append("--deterministic")
    command = [sys.executable, str(REPO / "chapters" / row.chapter / "train.py"), *work, *row.flags]
    environment = finding_this_checkout() | {"OMP_NUM_THREADS": "1" if device == "cpu" else "4"}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=LIMIT_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not ended after {LIMIT_S} s"
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        return why_it_failed(done.returncode, done.stdout)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Result([row["loss"] for row in rows], rows[-1]["peak_bytes"])


def train(row: Row, device: str, steps: int, folder: Path) -> Result | str:
    """Trains, and if the row says so, goes on from the checkpoint of the middle once more."""
    first = run(row, device, steps, folder / "first")
    if not row.resumed or isinstance(first, str):
        return first
    middle = folder / "first" / "checkpoints" / f"step_{steps // 2:06d}"
    second = run(row, device, steps, folder / "second", str(middle))
    if isinstance(second, str):
        return second
    return Result(second.losses, second.peak_bytes, first.losses[-len(second.losses) :])


def table(results: dict[Row, Result | str]) -> tuple[list[str], int]:
    """(lines of the table, number of rows that failed or are too far away)."""
    lines = ["| chapter | flags | precision | where | last loss | largest gap to chapter 00 | at most | GPU at most, MiB |",
             "|---|---|---|---|---:|---:|---:|---:|"]  # fmt: skip
    wrong = 0
    for row, result in results.items():
        cells = [row.chapter, row.what, row.precision, row.device or "GPU"]
        base = results.get(Row("00_single", row.precision))
        if isinstance(result, str) or not isinstance(base, Result):
            wrong += 1
            lines.append(f"| {' | '.join(cells)} | **{result if isinstance(result, str) else 'no chapter 00'}** | | | |")
            continue
        losses, others = result.losses, result.beside or base.losses
        most = 0 if row.resumed else FP32 if row.precision == "fp32" else HALF
        gap = max(abs(one - other) / other for one, other in zip(losses, others, strict=True))
        said = "same bits" if losses == others else f"{gap:.1e}"
        wrong += not gap <= most
        lines.append(f"| {' | '.join(cells)} | {losses[-1]:.6f} | {said if gap <= most else f'**{said}**'} | {most:g} | "
                     f"{'' if row.device else f'{result.peak_bytes / 2**20:.0f}'} |")
    return lines, wrong


def main(argv: list[str]) -> int:
    """Trains, compares, writes. Returns 1 if a row is wrong."""
    parser = gpu_parser("chapters.py", __doc__, "few steps of few rows")
    parser.add_argument("--jobs", type=at_least(1), default=AT_ONCE, help="programs at the same time (default: %(default)s)")
    options: argparse.Namespace = parser.parse_args(argv)
    check_device(parser, options.device, "--quick --device cpu")
    steps, rows = (QUICK_STEPS, few()) if options.quick else (STEPS, ROWS)
    with tempfile.TemporaryDirectory(prefix="chapters_") as folder, ThreadPoolExecutor(options.jobs) as pool:
        def one(number_and_row: tuple[int, Row]) -> Result | str:
            number, row = number_and_row
            result = train(row, options.device, steps, Path(folder, str(number)))
            said = result if isinstance(result, str) else "trained"
            print(f"{row.chapter} {row.what} {row.precision}: {said}", flush=True)
            return result

        results = dict(zip(rows, pool.map(one, enumerate(rows)), strict=True))
    lines, wrong = table(results)
    facts = [("work", f"tiny, {steps} steps, rate {LR:g}, one process; fp32 with --deterministic"),
             ("device", name_of(options.device)), *facts_of("chapters.py", argv)]  # fmt: skip
    text = "\n".join(["# Chapters on a GPU", "", *bullets(facts), "",
                      "Gap: relative, over all steps, to chapter 00 in the same precision on the same device. Chapter 03 is "
                      "missing: this needs no installation, and Horovod does.", "", *lines, ""])  # fmt: skip
    write_page(options.results, "gpu_chapters.md", text)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
