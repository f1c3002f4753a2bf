"""Every strategy in every precision at 1, 2 and 4 processes: one step a batch, clipped, on a schedule that ends.

The published ablation had three faults: two steps a batch, a clip of scaled gradients, a schedule that ended early. The
tests look for them from outside, while the chapter's program runs unchanged. They count the optimizer's steps and measure
the gradients that it receives. Data that divide by nothing end without a hang, at the same step and validation loss as
chapter 00.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from tests.chapters.horovod import needs_horovod
from tests.chapters.inside import Report, assert_one_clipped_step_a_batch, on_gloo, train, train_under_horovod
from tests.chapters.program import ROOT, Chapter
from tests.chapters.technique import technique
from tests.limits import HANGS_S, wait_until

STEPS, CLIP, PEAK = 12, 0.3, 0.003
FLAGS = ("--seq-len", 8, "--batch-size", 24, "--lr", PEAK, "--warmup-steps", 2, "--max-steps", STEPS,
         "--eval-every", STEPS, "--save-every", STEPS, "--clip-grad-norm", CLIP)  # fmt: skip
STRATEGIES = {
    "01": ("01_parameter_server", ()),
    "02": ("02_ddp", ()),
    "02 torch": ("02_ddp", ("--backend", "torch")),
    "04 O1": ("04_apex", ("--opt-level", "O1")),
    "04 O1 torch": ("04_apex", ("--opt-level", "O1", "--backend", "torch")),
    "04 O2": ("04_apex", ("--opt-level", "O2")),
    "04 O3": ("04_apex", ("--opt-level", "O3")),
}
HOROVOD = {
    "03": ("03_horovod", ()),
    "03 compressed": ("03_horovod", ("--compression", "fp16")),
    "04 O1": ("04_apex", ("--opt-level", "O1", "--comm", "horovod")),
    "04 O2": ("04_apex", ("--opt-level", "O2", "--comm", "horovod")),
}


def assert_steps_and_learns(rows: list[dict], reports: list[Report], of: tuple[int, ...], rel: float = 1e-4) -> None:
    """As assert_one_clipped_step_a_batch; few steps are skipped, clipping is at work, and the model learns."""
    skipped = max(reports[0].skipped, int(rows[-1].get("skipped_steps", 0)))
    assert_one_clipped_step_a_batch(rows, reports, of, steps=STEPS, clip=CLIP, peak=PEAK, skipped=skipped, rel=rel)
    assert skipped <= 3 and max(row["grad_norm"] or 0 for row in rows) > 2 * CLIP, "clipping is at work"
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1


@pytest.mark.each
@pytest.mark.parametrize("nproc", [1, 2, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_clipped_step_a_batch(ranks, tmp_path, strategy, precision, nproc):
    name, flags = STRATEGIES[strategy]
    chapter = Chapter(name, tmp_path)
    reports = train(ranks, nproc, chapter, *FLAGS, *flags, "--precision", precision, "--grad-accum", 2)
    of = (0,) if name.startswith("01") else tuple(range(nproc))
    # O3's clipped gradients are rounded to 16 bit, bf16's to 3 digits
    assert_steps_and_learns(chapter.metrics(), reports, of, rel=1e-2 if strategy == "04 O3" else 1e-4)


@pytest.mark.each
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_asynchronous_server_takes_one_clipped_step_a_logged_step(ranks, tmp_path, precision, nproc):
    chapter = Chapter("01_parameter_server", tmp_path)
    reports = train(ranks, nproc, chapter, *FLAGS, "--mode", "async", "--staleness", 2, "--precision", precision)
    rows = chapter.metrics()
    assert_steps_and_learns(rows, reports, (0,))
    assert max(row["staleness_max"] for row in rows) <= 2


def behind(rank: int, num_ranks: int, chapter: Chapter, flags: list[str], meetings: tuple[int, ...]) -> Report:
    """Rank 1 waits until the server has taken all steps that it may take without this rank."""
    server = technique("01_parameter_server", "server").ParameterServer
    work = server.work

    def slowly(side, step, micro_batches):
        if rank == 1 and step > side.version:
            most = min(side.version + side.bound, next(meeting for meeting in meetings if meeting > side.version) - 1)
            wait_until(lambda: chapter.num_rows() >= most, f"step {most} of the server")
        return work(side, step, micro_batches)

    with mock.patch.object(server, "work", slowly):
        return on_gloo(rank, num_ranks, chapter.name, flags)


def test_asynchronous_ranks_agree_where_they_have_met(ranks, tmp_path):
    """Rank 1 is behind at the beginning of each step that evaluates or saves: an agreement at that moment would wait for
    ever."""
    chapter = Chapter("01_parameter_server", tmp_path)
    flags = ("--mode", "async", "--staleness", 3, "--slow-worker-s", 0.01, "--eval-every", 6, "--save-every", 8)
    given = chapter.command(*FLAGS, *flags, "--nproc", 3)[2:]
    ranks(3).run(behind, chapter, given, (6, 8, 12), timeout=HANGS_S)
    rows = chapter.metrics()
    assert max(row["staleness_max"] for row in rows) == 3 and min(row["num_gradients"] for row in rows) < 3
    assert [row["step"] for row in rows if "valid_loss" in row] == [6, 12]


def runs_of_horovod(folder: Path, precisions: tuple[str, ...]) -> list[tuple[Chapter, tuple[object, ...]]]:
    runs = []
    for strategy, (name, flags) in HOROVOD.items():
        for precision in precisions:
            chapter = Chapter(name, folder / f"{strategy} {precision}")
            chapter.folder.mkdir()
            runs.append((chapter, (*FLAGS, *flags, "--precision", precision, "--grad-accum", 2)))
    return runs


def assert_one_clipped_step(runs, found, nproc: int) -> None:
    for (chapter, _), reports in zip(runs, found, strict=True):
        assert_steps_and_learns(chapter.metrics(), reports, tuple(range(nproc)))


@needs_horovod
def test_one_clipped_step_a_batch_under_one_horovodrun(under_horovod):
    runs, found, _ = under_horovod
    assert_one_clipped_step(runs, found, 2)


@pytest.mark.deep
@needs_horovod
@pytest.mark.parametrize("nproc, precisions", [(2, ("fp16",)), (2, ("bf16",)), (1, ("bf16", "fp16")), (4, ("bf16", "fp16"))])
def test_one_clipped_step_a_batch_under_horovod(tmp_path, nproc, precisions):
    runs = runs_of_horovod(tmp_path, precisions)
    assert_one_clipped_step(runs, train_under_horovod(nproc, runs), nproc)


# ---- data that divide by nothing


UNEVEN = ("--seq-len", 16, "--batch-size", 24, "--epochs", 1.4, "--eval-every", 5, "--save-every", 1000, "--warmup-steps", 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[object, ...]:
    """The flags of a corpus of some paragraphs: neither windows nor evaluation rows divide by 24, 4, 3 or 2."""
    folder = tmp_path_factory.mktemp("corpus")
    for kind, number in (("train", 31), ("valid", 7)):
        shipped = json.loads(next((ROOT / "data" / kind).glob("*.json")).read_text(encoding="utf-8"))
        Path(folder, f"{kind}.json").write_text(json.dumps(shipped[:number], ensure_ascii=False), encoding="utf-8")
    return "--train-data", folder / "train.json", "--valid-data", folder / "valid.json"


@pytest.fixture(scope="module")
def alone(ranks, corpus, tmp_path_factory) -> list[dict]:
    chapter = Chapter("00_single", tmp_path_factory.mktemp("alone"))
    train(ranks, 1, chapter, *UNEVEN, *corpus)
    return chapter.metrics()


def assert_ends_like(rows: list[dict], alone: list[dict]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in alone] and len(rows) > 5
    assert rows[-1]["valid_loss"] == pytest.approx(alone[-1]["valid_loss"], rel=1e-4)


@pytest.mark.each
@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("program", [
    ("01_parameter_server",), ("02_ddp",), ("02_ddp", "--backend", "torch"), ("04_apex", "--opt-level", "O0"),
])  # fmt: skip
def test_uneven_data_end_without_a_hang(ranks, corpus, alone, tmp_path, program, nproc):
    name, *flags = program
    chapter = Chapter(name, tmp_path)
    train(ranks, nproc, chapter, *UNEVEN, *corpus, *flags)
    assert_ends_like(chapter.metrics(), alone)


def uneven_runs_of_horovod(folder: Path, corpus: tuple[object, ...]) -> list[tuple[Chapter, tuple[object, ...]]]:
    runs = []
    for name, flags in (("03_horovod", ()), ("04_apex", ("--opt-level", "O0", "--comm", "horovod"))):
        chapter = Chapter(name, folder / name)
        chapter.folder.mkdir()
        runs.append((chapter, (*UNEVEN, *corpus, *flags)))
    return runs


@pytest.fixture(scope="module")
def under_horovod(corpus, tmp_path_factory):
    """(runs in fp16, their reports, runs on uneven data) of one horovodrun: a start takes longer than two runs."""
    folder = tmp_path_factory.mktemp("horovod")
    runs, uneven = runs_of_horovod(folder, ("fp16",)), uneven_runs_of_horovod(folder, corpus)
    return runs, train_under_horovod(2, runs + uneven)[: len(runs)], uneven


@needs_horovod
def test_uneven_data_end_without_a_hang_under_one_horovodrun(under_horovod, alone):
    for chapter, _ in under_horovod[2]:
        assert_ends_like(chapter.metrics(), alone)


@pytest.mark.deep
@needs_horovod
def test_uneven_data_end_without_a_hang_under_horovod(corpus, alone, tmp_path):
    runs = uneven_runs_of_horovod(tmp_path, corpus)
    train_under_horovod(3, runs)
    for chapter, _ in runs:
        assert_ends_like(chapter.metrics(), alone)
