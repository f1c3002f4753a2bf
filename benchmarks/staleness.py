"""The effect of stale gradients on the loss curve: chapter 01 synchronous, and asynchronous with several bounds.

bash benchmarks/staleness.sh                    # four processes, bounds 1, 4 and 16; about six minutes on two cores
bash benchmarks/staleness.sh --nproc 8 --bounds 2,32 --steps 400

Same model, corpus, seed, learning rate and number of server steps; only the bound of staleness differs. Rank 1 idles in each
of its steps (--slow-worker-s): equally fast workers are hardly ever more than one step behind.
Writes a table and a figure below benchmarks/results/.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from ablation import ROOT, WARM_UP_STEPS, Result, Variant, hardware, run_once
from command_line import parser_of
from facts import bullets, when_and_how


def variants(bounds: list[int], slow_worker_s: float, lr: float) -> list[Variant]:
    """The variants: first synchronous ones, without and with the slow worker, then one for each bound."""
    chapter, rate = "01_parameter_server", ("--lr", str(lr))
    slow = (*rate, "--slow-worker-s", str(slow_worker_s))
    found = [Variant(chapter, "synchronous, no slow worker", rate), Variant(chapter, "synchronous", slow)]
    return found + [Variant(chapter, f"asynchronous, at most {b} behind", ("--mode", "async", "--staleness", str(b), *slow))
                    for b in bounds]  # fmt: skip


def last_loss(result: Result) -> float:
    """Mean training loss of the last tenth of the steps."""
    rows = result.rows[-max(1, len(result.rows) // 10) :]
    return statistics.fmean(row["loss"] for row in rows)


def steps_per_s(result: Result) -> float:
    """Mean over the run without its first steps: a median would hide a step that waits, which is one of many."""
    rows = result.rows[WARM_UP_STEPS:]
    return len(rows) / sum(row["step_s"] for row in rows)


def lines_of(results: dict[str, Result]) -> list[str]:
    """The markdown table."""
    base = next(iter(results.values()))
    table = ["| | loss of the last tenth | against synchronous | validation loss | staleness, mean | most "
             "| gradients a step | steps/s | tokens/s |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, result in results.items():
        rows = result.rows
        used = result.mean("num_gradients") / result.nproc
        tokens = used * result.config["batch_size"] * result.config["seq_len"]
        table.append(
            f"| {name} | {last_loss(result):.3f} | {last_loss(result) / last_loss(base) - 1:+.1%} "
            f"| {rows[-1]['valid_loss']:.3f} | {statistics.fmean(row['staleness_mean'] for row in rows):.2f} "
            f"| {max(row['staleness_max'] for row in rows)} | {result.mean('num_gradients'):.2f} of {result.nproc} "
            f"| {steps_per_s(result):.2f} | {tokens * steps_per_s(result):,.0f} |"
        )
    return table


def draw(results: dict[str, Result], path: Path) -> None:
    """Loss against steps of the server, and against tokens whose gradients were used."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_tokens) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for name, result in results.items():
        steps, smooth, tokens, used = [], [], [], 0.0
        for place, row in enumerate(result.rows):
            used += row["num_gradients"] / result.nproc * result.config["batch_size"] * result.config["seq_len"]
            window = result.rows[max(0, place - 9) : place + 1]
            steps.append(row["step"])
            tokens.append(used)
            smooth.append(statistics.fmean(r["loss"] for r in window))
        by_step.plot(steps, smooth, label=name)
        by_tokens.plot(tokens, smooth, label=name)
    by_step.set(xlabel="steps of the server", ylabel="training loss, mean of 10 steps, nats per token")
    by_tokens.set(xlabel="tokens whose gradients were used")
    by_step.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str]) -> int:
    """Runs all variants once and writes the results."""
    parser = parser_of("staleness.sh", __doc__)
    parser.add_argument("--bounds", type=lambda text: [int(b) for b in text.split(",")], default=[1, 4, 16],
                        help="server steps that weights may be behind (default: 1,4,16)")  # fmt: skip
    parser.add_argument("--slow-worker-s", type=float, default=1.0, help="seconds rank 1 idles in each step (default: 1)")
    parser.add_argument("--nproc", type=int, default=4, help="processes, one of them the server (default: 4)")
    parser.add_argument("--steps", type=int, default=200, help="steps of the server (default: 200)")
    parser.add_argument("--model-config", default="tiny", help="as in every chapter (default: tiny)")
    parser.add_argument("--batch-size", type=int, default=24, help="GLOBAL, as in every chapter (default: 24)")
    parser.add_argument("--seq-len", type=int, default=32, help="as in every chapter (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak; sharp steps would hide the rest (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=42, help="as in every chapter (default: 42)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where to write")
    options = parser.parse_args(argv)
    if options.nproc < 2 or options.steps < 20 or min(options.bounds) < 0:
        parser.error("--nproc must be at least 2, --steps at least 20, each of --bounds at least 0")
    options.threads = 1
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="staleness_") as folder:
        for variant in variants(options.bounds, options.slow_worker_s, options.lr):
            print(f"{variant.name}: ", end="", flush=True)
            result = run_once(variant, options.nproc, options, Path(folder, "run"), options.seed)
            if isinstance(result, str):
                print(f"error: {result}", file=sys.stderr)
                return 1
            results[variant.name] = result
            print(f"loss {last_loss(result):.3f}", flush=True)
    table = lines_of(results)
    facts = [*hardware(), ("work", f"{options.steps} steps of {options.model_config}, {options.nproc} processes, batch "
                                   f"{options.batch_size} of {options.seq_len} tokens, fp32, lr {options.lr:g}; rank 1 "
                                   f"idles {options.slow_worker_s:g} s a step"),
             ("load at the end", f"{os.getloadavg()[0]:.1f}"), *when_and_how("staleness.sh", argv)]  # fmt: skip
    lines = ["# Stale gradients", "", *bullets(facts), "", *table, "",
             "![loss](staleness.png)", ""]  # fmt: skip
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "staleness.md").write_text("\n".join(lines), encoding="utf-8")
    draw(results, options.results / "staleness.png")
    print("\n".join(["", *table, "", f"written below {options.results}"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
