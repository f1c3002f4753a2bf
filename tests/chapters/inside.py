"""A chapter's own train.py inside ranks that already run: a test of one more flag starts no process.

The program runs unchanged: settings, data, loop, evaluation, checkpoint, final/. Only launch() is replaced: it hands out
the existing ranks of a `RankPool` or of one horovodrun. No text is generated from the trained model at the end, and no file
is forced to the disk, which only a machine that loses power would show. Other tests, one for each chapter, start the program
by its launcher and do both. In addition, each rank reports the steps of its optimizer and the gradients that it received.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from gpt2_chinese.distributed import torchrun
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.model.recomputation import Segment
from gpt2_chinese.run.run import Run
from tests.chapters.horovod import horovodrun
from tests.chapters.program import ROOT, Chapter, run
from tests.limits import HANGS_S


@dataclasses.dataclass
class Report:
    """What one rank's optimizer did.

    Attributes:
        seen: global norm of the gradients at each of its steps, as the optimizer was given them.
        skipped: steps that a loss scale left out.
        segments: of --recompute, that backward ran again.
    """

    seen: list[float] = dataclasses.field(default_factory=list)
    skipped: int = 0
    segments: int = 0


class Stays(Ranks):
    """Ranks that outlive the program."""

    def close(self) -> None:
        """Leaves the process group to its maker.

        DTensor caches how it sharded an operation, together with the mesh. A counter names the mesh's groups and restarts
        with each case. So the cache must be cleared, or the next program would reduce over a group that no longer exists.
        """
        _clear_sharding_prop_cache()


def run_here(name: str, flags: list[str], ranks: Ranks) -> Report:
    """Runs chapters/NAME/train.py on this rank, as `python train.py FLAGS` would under a launcher."""
    report, program = Report(), ROOT / "chapters" / name / "train.py"
    step, update, run_again = torch.optim.AdamW.step, torch.amp.GradScaler.update, Segment._run_again

    def noting(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        report.seen.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters)))
        return step(optimizer, closure)

    def watching(scaler: torch.amp.GradScaler, *args: Any) -> None:
        before = scaler.get_scale()
        update(scaler, *args)
        report.skipped += scaler.get_scale() < before

    def counting(segment: Segment) -> None:
        report.segments += 1
        run_again(segment)

    variables = {"RANK": ranks.rank, "LOCAL_RANK": ranks.rank, "WORLD_SIZE": ranks.num_ranks}
    folder = str(program.parent)
    try:
        with warnings.catch_warnings(), \
             mock.patch.dict(os.environ, {key: str(value) for key, value in variables.items()}), \
             mock.patch.object(sys, "argv", [str(program), *flags]), \
             mock.patch.object(torch.optim.AdamW, "step", noting), \
             mock.patch.object(torch.amp.GradScaler, "update", watching), \
             mock.patch.object(Segment, "_run_again", counting), \
             mock.patch.object(Run, "_print_samples", lambda *_: None), \
             mock.patch.object(os, "fsync", lambda _: None), \
             mock.patch.object(torchrun, "launch", lambda settings, *_: _at_home(settings, ranks)):  # fmt: skip
            warnings.filterwarnings("error", "`torch", FutureWarning)  # that a function has a new name
            sys.path.insert(0, folder)
            runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.path.remove(folder)
    return report


def _at_home(settings: Any, ranks: Ranks) -> Ranks:
    settings.device, settings.precision = "cpu", settings.precision or "fp32"
    return dataclasses.replace(ranks)


def on_gloo(rank: int, num_ranks: int, name: str, flags: list[str]) -> Report:
    """A case for a `RankPool`."""
    group = dist.group.WORLD if num_ranks > 1 else None
    return run_here(name, flags, Stays(rank, num_ranks, rank, torch.device("cpu"), group))


def train(ranks: Any, num_ranks: int, chapter: Chapter, *flags: object) -> list[Report]:
    """Runs a small chapter on `num_ranks` ranks of the session's pools; returns their reports."""
    _, _, *given = chapter.command(*flags, "--nproc", num_ranks)
    return ranks(num_ranks).run(on_gloo, chapter.name, given, timeout=HANGS_S)


def train_under_horovod(num_ranks: int, runs: list[tuple[Chapter, tuple[object, ...]]]) -> list[list[Report]]:
    """Runs several small chapters after each other under one real horovodrun; returns, for each, the ranks' reports."""
    run_under_horovod(num_ranks, runs)
    folder = runs[0][0].folder
    by_rank = [json.loads((folder / f"reports.{rank}.json").read_text()) for rank in range(num_ranks)]
    return [[Report(**report) for report in reports] for reports in zip(*by_rank, strict=True)]


def run_under_horovod(num_ranks: int, runs: list[tuple[Chapter, tuple[object, ...]]]) -> str:
    """As train_under_horovod; returns what the ranks printed."""
    folder = runs[0][0].folder
    jobs = [(chapter.name, chapter.command(*flags, "--nproc", num_ranks)[2:]) for chapter, flags in runs]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return run(horovodrun(num_ranks, "-m", "tests.chapters.inside", folder), forks=True)


def assert_one_clipped_step_a_batch(rows: list[dict[str, Any]], reports: list[Report], of: tuple[int, ...], *, steps: int,
                                    clip: float, peak: float, skipped: int = 0, rel: float = 1e-5) -> None:  # fmt: skip
    """One optimizer step for each logged step on the ranks `of`, on gradients within the limit, and a schedule that ends.

    `skipped` are the steps that a loss scale left out; `rel` is of the norm: clipping scaled gradients is off by thousands.
    """
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [len(report.seen) for report in reports] == [steps - skipped if rank in of else 0 for rank in range(len(reports))]
    assert max(norm for report in reports for norm in report.seen) <= clip * (1 + rel)
    assert rows[-1]["lr"] <= 0.01 * peak * (1 + 1e-9)


def main(folder: Path) -> None:
    """One rank under horovodrun: the jobs of a folder, after each other."""
    from gpt2_chinese.distributed.horovod_launcher import adopt_ranks

    adopt_ranks()
    torch.set_num_threads(1)
    import horovod.torch as hvd

    from gpt2_chinese.distributed.horovod_ranks import HorovodRanks

    hvd.init()

    class StaysInHorovod(HorovodRanks):
        close = Stays.close

    reports = [dataclasses.asdict(run_here(name, flags, StaysInHorovod.now(torch.device("cpu"))))
               for name, flags in json.loads((folder / "jobs.json").read_text())]  # fmt: skip
    (folder / f"reports.{hvd.rank()}.json").write_text(json.dumps(reports))
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
