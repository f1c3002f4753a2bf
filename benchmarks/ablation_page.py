"""What the ablation writes: the table with its spread over the seeds, and ablation.json for the site's charts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation_variants import Result, Variant

SAME_WORK = ("batch_size", "vocab", "vocab_size", "seq_len", "precision", "seed", "model", "train_data", "grad_accum",
             "lr", "warmup_steps", "weight_decay", "clip_grad_norm", "max_steps", "device")  # fmt: skip


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


def median_result(results: list[Result]) -> Result:
    """The run of median speed among the rounds of a variant."""
    return sorted(results, key=lambda result: result.tokens_per_s)[len(results) // 2]


def medians_of(variant: Variant) -> dict[int, list[Result]]:
    """Number of processes -> the median run of each seed, in the order of the seeds."""
    found: dict[int, dict[int, list[Result]]] = {}
    for run in variant.runs:
        found.setdefault(run.nproc, {}).setdefault(run.config["seed"], []).append(run)
    return {nproc: [median_result(rounds) for _, rounds in sorted(found[nproc].items())] for nproc in sorted(found)}


def bases_of(variants: list[Variant]) -> list[Result]:
    """The median runs of chapter 00, the first variant first."""
    return [result for v in variants if v.chapter == "00_single" for results in medians_of(v).values() for result in results]


def spread(values: Sequence[float], digits: str) -> str:
    """'1.71', or '1.71 ± 0.03' with several values: their mean and standard deviation."""
    if len(values) == 1:
        return format(values[0], digits)
    return f"{statistics.fmean(values):{digits}} ± {statistics.stdev(values):{digits}}"


def mib(num_bytes: float | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**20:.2f}"


def gap_of(results: list[Result], bases: list[Result]) -> float | None:
    """The largest relative difference of losses from chapter 00's first variant with the same seed; None without one."""
    gaps = []
    for result in results:
        base = next((one for one in bases if one.config["seed"] == result.config["seed"]), None)
        if base and len(base.rows) == len(result.rows):
            gaps += [abs(a["loss"] / b["loss"] - 1) for a, b in zip(result.rows, base.rows, strict=True)]
    return max(gaps, default=None)


def lines_of(variants: list[Variant], failures: list[tuple[str, int, str]]) -> list[str]:
    """The Markdown table, and below it the runs that failed."""
    bases = bases_of(variants)
    table = [
        "| chapter | | p | tokens/s | speed-up | loss after the same tokens | largest gap to 00 | sent by rank 0, MiB "
        "| received | formula, MiB | peak memory by rank, MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in variants:
        for nproc, results in medians_of(variant).items():
            result = results[0]
            try:
                ratios = [speed_up(one, base) for one in results if (base := base_of(one, bases))]
                ratio = spread(ratios, ".2f") if ratios else "no run of 00"
            except DifferentWork as reason:
                ratio = f"— ({reason})"
            gap = gap_of(results, bases)
            gap = "—" if gap is None else f"{gap:.0e}" + ("" if variant.same_curve else " (exception)")
            formula = mib(variant.formula.num_bytes(nproc, result.config, variant.sent_bits // 8)) if nproc > 1 else "0"
            sent, received = (mib(result.mean(key)) if nproc > 1 else "0" for key in ("sent_bytes", "received_bytes"))
            peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in result.peaks)
            losses = spread([one.rows[-1]["loss"] for one in results], ".4f")
            speed = spread([one.tokens_per_s for one in results], ",.0f")
            table.append(f"| {variant.chapter} | {variant.name} | {nproc} | {speed} | {ratio} | {losses} | {gap} | {sent} | "
                         f"{received} | {formula} / {formula} | {peaks} |")  # fmt: skip
    formulas = [f"- formula of {v.chapter}, {v.name}: {v.formula.text}, {v.sent_bits // 8} bytes an element"
                for v in variants if v.runs and v.formula.text != "none"]  # fmt: skip
    table += ["", "A speed-up is against chapter 00 with the same work and seed; the gap is against chapter 00 in fp32."]
    table += ["With several seeds: mean ± standard deviation over the seeds, each of them the median of its rounds."]
    table += ["", *dict.fromkeys(formulas)]
    table += [f"- **not run**: {name} at {nproc} processes: {why}" for name, nproc, why in failures]
    return table


def honest(cores: int, nproc: Sequence[int]) -> str:
    """What a machine of so many cores can show, and what it cannot."""
    crowded = [number for number in nproc if number > cores]
    most = min(cores, max(nproc))
    said = (f"{cores} cores can show that all techniques train the same curve, how many bytes they send, what memory they "
            f"take, and what synchronising {most} processes costs when messages are copies in memory.")  # fmt: skip
    if crowded:
        said += f" With {' or '.join(map(str, crowded))} processes they share cores: those rows show overhead, no speed-up."
    return f"{said} They cannot show scaling to many GPUs, nor the time of real links: for these see the formulas."


def data(variants: list[Variant], cores: int) -> dict[str, Any]:
    """What docs/generate/pictures/results.py draws: a speed-up for each seed, and the losses of the first seed."""
    bases, rows = bases_of(variants), []
    for variant in variants:
        for nproc, results in medians_of(variant).items():
            pairs = [(one, base_of(one, bases)) for one in results]
            ratios = [speed_up(one, base) for one, base in pairs if base and not differences(one.config, base.config)]
            rows.append({"chapter": variant.chapter, "name": variant.name, "nproc": nproc, "same_curve": variant.same_curve,
                         "speed_up": [round(ratio, 4) for ratio in ratios],
                         "losses": [round(row["loss"], 5) for row in results[0].rows]})  # fmt: skip
    most = {(row["chapter"], row["name"]): row["nproc"] for row in rows}  # only the curves that are drawn are kept
    for row in rows:
        if row["nproc"] != most[row["chapter"], row["name"]]:
            del row["losses"]
    return {"cores": cores, "rows": rows}


def write(folder: Path, head: list[str], variants: list[Variant], failures: list[tuple[str, int, str]],
          cores: int) -> list[str]:  # fmt: skip
    """Writes ablation.md and ablation.json; returns the table's lines."""
    table, nproc = lines_of(variants, failures), sorted({run.nproc for v in variants for run in v.runs})
    tail = ["", "Bytes are the kernel's count of rank 0's TCP traffic in a step, means; chapter 07 exchanges its chunks",
            "through shared memory between processes of one machine: its sockets stay empty. Memory is the peak of the",
            "whole process on a CPU, and torch's on a GPU. Tokens/s say how fast, losses after the same tokens how well.",
            "", honest(cores, nproc), ""]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.md").write_text("\n".join([*head, *table, *tail]), encoding="utf-8")
    (folder / "ablation.json").write_text(json.dumps(data(variants, cores), indent=1) + "\n", encoding="utf-8")
    return table
