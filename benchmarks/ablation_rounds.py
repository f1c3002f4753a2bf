"""The complete rounds of an ablation, kept in ablation_rounds.json: hours of runs need not fit into one go.

A round is every program once, with one seed. Speeds are compared within a round only, so half a round is never kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablation_page import SAME_WORK
from ablation_variants import Result, Variant

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from durable.files import replacing  # noqa: E402

FILE = "ablation_rounds.json"
OF_CONFIG = (*SAME_WORK, "num_parameters")
OF_ROWS = ("sent_bytes", "received_bytes", "num_gradients")
Failures = dict[tuple[str, int], str]
"""(name of the program, processes) -> why it has no result."""


class OtherWork(ValueError):
    """The kept rounds did other work than the new ones would; the message says what to do."""


@dataclass
class Rounds:
    """The rounds that one table shows.

    Args:
        file: where they are kept.
        work: what all of them have in common; JSON-ready.
    """

    file: Path
    work: dict[str, Any]
    kept: list[dict[str, Any]] = field(default_factory=list)

    def load(self) -> None:
        """Reads the kept rounds, if there are any. Raises OtherWork."""
        if not self.file.exists():
            return
        found = json.loads(self.file.read_text(encoding="utf-8"))
        if names := [name for name, value in self.work.items() if found["work"].get(name) != value]:
            raise OtherWork(f"the rounds in {self.file} have other {', '.join(names)}: leave --keep out to begin anew")
        self.kept = found["rounds"]

    def of(self, seed: int) -> int:
        """How many rounds with this seed are complete."""
        return sum(one["seed"] == seed for one in self.kept)

    def add(self, seed: int, date: str, runs: dict[str, list[Result]], failures: Failures) -> None:
        """Keeps one more round, at once. runs: by the name of the program."""
        kept = {name: [condensed(one) for one in results] for name, results in runs.items()}
        failed = [[*job, why] for job, why in failures.items()]
        self.kept.append({"seed": seed, "date": date, "failures": failed, "runs": kept})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.file) as staging:
            staging.write_text(json.dumps({"work": self.work, "rounds": self.kept}) + "\n", encoding="utf-8")

    def give(self, variants: Sequence[Variant]) -> Failures:
        """Adds the results of all kept rounds to the variants; returns what has failed in them."""
        failures: Failures = {}
        for one in self.kept:
            failures |= {(name, nproc): why for name, nproc, why in one["failures"]}
            for variant in variants:
                variant.runs += [restored(run) for run in one["runs"].get(variant.program, [])]
        return failures

    def seeds(self) -> str:
        """'42 (2026-11-26), 43 (2026-11-27)'."""
        return ", ".join(f"{one['seed']} ({one['date'][:10]})" for one in self.kept)


def condensed(run: Result) -> dict[str, Any]:
    """A run without what no table shows: every loss, but of times and bytes the median or mean only; no absolute paths."""
    config = {name: run.config[name] for name in OF_CONFIG if name in run.config}
    config |= {name: value.removeprefix(f"{ROOT}/") for name, value in config.items() if isinstance(value, str)}
    losses = [round(row["loss"], 7) for row in run.rows]
    means = {name: run.mean(name) for name in OF_ROWS}
    return {"nproc": run.nproc, "peaks": run.peaks, "step_s": run.step_s, "losses": losses, "means": means, "config": config}


def restored(kept: dict[str, Any]) -> Result:
    """The run again; each of its steps took the median time and sent the mean bytes."""
    same = {"step_s": kept["step_s"], **kept["means"]}
    return Result(kept["nproc"], kept["config"], [{"loss": loss, **same} for loss in kept["losses"]], kept["peaks"])
