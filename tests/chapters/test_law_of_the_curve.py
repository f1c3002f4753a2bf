"""The law of the curve (fp32): every chapter's loss equals that of chapter 00 at every step, within 1e-4 relative.

The programs run whole and unchanged, inside ranks that are alive already (tests/chapters/inside.py). A smaller model than
tiny keeps 50 steps short; the corpus, the vocabulary and everything else are the shipped ones. Tolerance: ranks add the same
fp32 numbers in another order, which changes the last bits of gradients; seen over these 50 steps: 2e-7 in the loss, 2e-6 in
the norm. A wrong average, seed or learning rate shows at step 2 or 3. The learning rate is one at which training is stable:
at three times as much this small model has single sharp steps (a norm of 16 among norms of 0.5) that blow the last bits up,
between two runs of chapter 00 with other micro-batches too. At one process pstar differs from PyTorch only in the roundings
inside Adam (seen: 1e-7 in the loss); there its own curve is the same to the last bit wherever the chunks are.

Asynchronous parameter servers are the stated exception; with a bound of 0 they are synchronous.
"""

from __future__ import annotations

import pytest

from tests.chapters.horovod import needs_horovod
from tests.chapters.inside import assert_one_clipped_step_a_batch, train, train_under_horovod
from tests.chapters.program import Chapter

STEPS, CLIP, PEAK = 50, 0.3, 0.001
FLAGS = ("--seq-len", 24, "--batch-size", 48, "--lr", PEAK, "--warmup-steps", 5, "--max-steps", STEPS,
         "--eval-every", 1000, "--save-every", 1000, "--clip-grad-norm", CLIP)  # fmt: skip
VARIANTS = {
    "01 synchronous": ("01_parameter_server", ()),
    "01 asynchronous, bound 0": ("01_parameter_server", ("--mode", "async", "--staleness", 0)),
    "02 naive": ("02_ddp", ("--variant", "naive")),
    "02 bucket": ("02_ddp", ("--variant", "bucket", "--bucket-mb", 0.1)),
    "02 ring": ("02_ddp", ("--variant", "ring")),
    "02 torch": ("02_ddp", ("--backend", "torch")),
    "04 O0": ("04_apex", ("--opt-level", "O0")),
    "04 O0 torch": ("04_apex", ("--opt-level", "O0", "--backend", "torch")),
}


@pytest.fixture(scope="module")
def curve(ranks, tmp_path_factory):
    """curve(grad_accum): the rows of chapter 00."""
    cache: dict[int, list[dict]] = {}

    def rows(grad_accum: int = 1) -> list[dict]:
        if grad_accum not in cache:
            chapter = Chapter("00_single", tmp_path_factory.mktemp("curve"))
            train(ranks, 1, chapter, *FLAGS, "--grad-accum", grad_accum)
            cache[grad_accum] = chapter.metrics()
            norms = [row["grad_norm"] for row in cache[grad_accum]]
            assert sum(norm > CLIP for norm in norms) > STEPS / 2, f"clipping is not at work: {norms}"
            assert cache[grad_accum][-1]["loss"] < cache[grad_accum][0]["loss"] - 0.5, "the model does not learn"
        return cache[grad_accum]

    return rows


def assert_same_curve(rows: list[dict], expected: list[dict], rel: float) -> None:
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for ours, theirs in zip(rows, expected, strict=True):
        for key, tolerance in (("loss", rel), ("grad_norm", 10 * rel), ("lr", 0), ("tokens", 0)):
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=0), f"{key} at step {ours['step']}"
    assert rows[-1]["valid_loss"] == pytest.approx(expected[-1]["valid_loss"], rel=rel, abs=0)


# Each technique at 1 to 4 ranks times 1 and 4 micro-batches, on a smaller model: tests/distributed.
@pytest.mark.parametrize("nproc, accumulate", [(1, 4), (2, 1), (3, 4), (4, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_data_parallel_chapters_follow_the_curve(ranks, curve, tmp_path, variant, nproc, accumulate):
    name, flags = VARIANTS[variant]
    chapter = Chapter(name, tmp_path)
    reports = train(ranks, nproc, chapter, *FLAGS, *flags, "--grad-accum", accumulate, "--check-sync", 1)
    assert_same_curve(chapter.metrics(), curve(accumulate), rel=1e-4)
    steps_on = (0,) if name.startswith("01") else tuple(range(nproc))
    assert_one_clipped_step_a_batch(chapter.metrics(), reports, steps_on, steps=STEPS, clip=CLIP, peak=PEAK)


@needs_horovod
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_horovod_follows_the_curve(curve, tmp_path, nproc):
    """Chapters 03 and 04 under a real horovodrun, whose fused buffers add in an order of their own."""
    runs = []
    cases = [("03_horovod", (), 1), ("03_horovod", (), 4), ("04_apex", ("--opt-level", "O0", "--comm", "horovod"), 4)]
    for name, flags, accumulate in cases[1 if nproc > 2 else 0 :]:
        chapter = Chapter(name, tmp_path / f"{name}_{accumulate}")
        chapter.folder.mkdir()
        runs.append((chapter, (*FLAGS, *flags, "--grad-accum", accumulate, "--check-sync", 1)))
    for (chapter, flags), reports in zip(runs, train_under_horovod(nproc, runs), strict=True):
        rows = chapter.metrics()
        assert_same_curve(rows, curve(flags[-3]), rel=1e-4)
        assert_one_clipped_step_a_batch(rows, reports, tuple(range(nproc)), steps=STEPS, clip=CLIP, peak=PEAK)


@pytest.mark.parametrize("near", ["100%", "50%", "min"])
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_patrickstar_follows_the_curve(ranks, curve, tmp_path, nproc, near):
    accumulate = 4 if near == "50%" else 1
    chapter = Chapter("07_patrickstar", tmp_path)
    train(ranks, nproc, chapter, *FLAGS, "--near-budget", near, "--grad-accum", accumulate)
    rows = chapter.metrics()
    assert_same_curve(rows, curve(accumulate), rel=1e-4)
    moved = sum(row["far_to_near_bytes"] for row in rows[1:])
    if near == "min":
        assert moved > 0, "chunks move where they do not all fit"
    if near == "min" and nproc == 1:
        roomy = Chapter("07_patrickstar", tmp_path / "roomy")
        roomy.folder.mkdir()
        train(ranks, 1, roomy, *FLAGS, "--near-budget", "100%")
        assert_same_curve(rows, roomy.metrics(), rel=0)
    if near == "100%" and nproc == 1:
        assert moved == 0, "and stay where they do"


@pytest.mark.parametrize("flags", [("--ownership", "sharded"), ("--communication", "chunk")], ids=lambda flags: flags[1])
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_patrickstar_s_other_ways_of_sharing_follow_the_curve(ranks, curve, tmp_path, nproc, flags):
    chapter = Chapter("07_patrickstar", tmp_path)
    train(ranks, nproc, chapter, *FLAGS, "--near-budget", "50%", "--chunk-size", 20_000, *flags)
    assert_same_curve(chapter.metrics(), curve(), rel=1e-4)
