"""Bits a weight against perplexity: chapter 08's formats on a model that chapter 00 trained, with and without outliers.

bash benchmarks/quantization.sh                          # trains once, below runs/: some minutes; then a minute
bash benchmarks/quantization.sh --model runs/00_single   # any other model

The second table is of the same model with a large model's outlier features planted in it, which do not change its function.
Writes quantization.md and quantization.png below benchmarks/results/.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ablation import ROOT, hardware
from command_line import at_least, parser_of
from facts import bullets, when_and_how
from processes import finding_this_checkout

CHAPTERS = ROOT / "chapters"
# narrow, and short windows: it trains in minutes, for enough steps that its loss depends on all of its matrices
SHAPE = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 128}
TRAINING = {"--seq-len": 32, "--batch-size": 24, "--lr": 0.008}
Row = dict[str, Any]


def train(steps: int) -> Path:
    """Trains the model in runs/quantization_STEPS, or goes on there, unless it is there already; returns the run."""
    run = ROOT / f"runs/quantization_{steps}"
    if not (run / "final").is_dir():
        run.mkdir(parents=True, exist_ok=True)
        (run / "shape.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        flags = {**TRAINING, "--model-config": run / "shape.json", "--max-steps": steps, "--output-dir": run}
        start(CHAPTERS / "00_single/train.py", *(str(part) for pair in flags.items() for part in pair))
    return run


def measure(model: Path, outliers: int) -> list[Row]:
    """The rows of compress.py."""
    with tempfile.TemporaryDirectory(prefix="quantization_") as folder:
        rows = Path(folder, "rows.json")
        start(CHAPTERS / "08_param_efficient/compress.py", "--model", str(model), "--plant-outliers", str(outliers),
              "--json", str(rows))  # fmt: skip
        return json.loads(rows.read_text(encoding="utf-8"))


def start(program: Path, *flags: str) -> None:
    """Runs a program of this checkout. Raises SystemExit when it fails; it has said why."""
    done = subprocess.run([sys.executable, str(program), *flags], env=finding_this_checkout())
    if done.returncode:
        raise SystemExit(done.returncode)


def lines_of(rows: list[Row]) -> list[str]:
    """The markdown table."""
    base = next((row for row in rows if row["format"] == "fp32"), rows[0])
    table = ["| format | bits a weight | MB of weights | error of weights | error of logits | perplexity | against fp32 |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        table.append(
            f"| {row['format']} | {row['bits']:.2f} | {row['bytes'] / 1e6:.2f} | {row['weight_error']:.2%} "
            f"| {row['logit_error']:.2%} | {row['perplexity']:.2f} | {row['perplexity'] / base['perplexity'] - 1:+.3%} |"
        )
    return table


def draw(rows: dict[str, list[Row]], path: Path) -> None:
    """Perplexity against bits a weight, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(rows), figsize=(11, 4.6), layout="constrained", squeeze=False)
    for axes, (title, points) in zip(panels[0], rows.items(), strict=True):
        axes.plot([row["bits"] for row in points], [row["perplexity"] for row in points], "o", color="#2a7")
        axes.axhline(next(row["perplexity"] for row in points if row["format"] == "fp32"), color="#999", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlim(3.5, 64)
        axes.set_xticks([4, 8, 16, 32], ["4", "8", "16", "32"])
        axes.set(title=title, xlabel="bits a weight of the blocks, scales included", ylabel="perplexity on held-out text")
        axes.ticklabel_format(axis="y", useOffset=False)
        name(axes, points)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def name(axes: Any, points: list[Row]) -> None:
    """Writes the formats' names to the right of their points, one above the other where the points are close."""
    low, high = axes.get_ylim()
    line = (high - low) / 24  # the height of a name, in units of the axis
    axes.set_ylim(low, high + 2 * line)
    for first, last in ((0, 6), (6, 12), (12, 99)):  # names of 4 and of 8 bits side by side do not meet
        free = low
        group = sorted((row for row in points if first <= row["bits"] < last), key=lambda row: row["perplexity"])
        for row in group:
            free = max(free, row["perplexity"])
            right = max(each["bits"] for each in group) if last < 99 else row["bits"]
            axes.annotate(row["format"], (row["bits"], row["perplexity"]), (right * 1.12, free), fontsize=8, va="bottom",
                          arrowprops={"arrowstyle": "-", "color": "#ccc", "shrinkB": 3, "shrinkA": 0})  # fmt: skip
            free += line if last < 99 else 0


def main(argv: list[str]) -> int:
    """Trains if need be, measures, writes the results."""
    parser = parser_of("quantization.sh", __doc__)
    parser.add_argument("--model", type=Path, help="a run, or anything that compress.sh takes (default: trains one)")
    parser.add_argument("--steps", type=at_least(1), default=1000, help="of that training (default: 1000)")
    parser.add_argument("--outliers", type=at_least(1), default=4,
                        help="features to plant for the second table (default: 4)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where to write")
    options = parser.parse_args(argv)
    if options.model and not options.model.exists():
        parser.error(f"--model {options.model} does not exist: give a run of a chapter, or leave it out")
    work = f"the model in {options.model}" if options.model else (
        f"{SHAPE['n_layer']} layers, {SHAPE['n_embd']} wide, trained by chapter 00 for {options.steps} steps of "
        f"{TRAINING['--batch-size']} × {TRAINING['--seq-len']} tokens, lr {TRAINING['--lr']}")  # fmt: skip
    model = options.model or train(options.steps)
    rows = {"as trained": measure(model, 0), f"with {options.outliers} outlier features": measure(model, options.outliers)}
    facts = [*hardware(), ("work", f"{work}; 32 windows of training text for calibration, blocks of 64, perplexity on the "
                                   "shipped validation text"), *when_and_how("quantization.sh", argv)]  # fmt: skip
    lines = ["# Bits against perplexity", "", *bullets(facts), ""]
    for title, table in rows.items():
        lines += [f"## The model {title}", "", *lines_of(table), ""]
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "quantization.md").write_text("\n".join([*lines, "![bits](quantization.png)", ""]), encoding="utf-8")
    draw(rows, options.results / "quantization.png")
    print(f"written below {options.results}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
