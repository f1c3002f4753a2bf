"""`--documents` and `--mix` in all chapters: the curve of chapter 00 with the same flags, at any number of processes.

Tolerances as in test_law_of_the_curve.py. Packed rows have different numbers of targets, and chapter 00 alone, without
micro-batches, takes their mean in one cross-entropy: the others must give the same mean with weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.chapters.horovod import needs_horovod
from tests.chapters.inside import train, train_under_horovod
from tests.chapters.law import assert_same_curve, flags_of
from tests.chapters.program import ROOT, SMALL, Chapter
from tests.chapters.technique import settings_error
from tests.cover import quick_only

STEPS = 8
CONFIG = {**SMALL, "initializer_range": 0.1}  # at GPT-2's 0.02 attention is uniform at first, and a mask changes little
MIX = ("--mix", "news=0.5,wiki=0.3")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two sub-folders of documents with 2 to 41 characters, most of which fit a window of 24."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("news", "wiki"):
        shipped = json.loads((ROOT / "data" / "train" / f"{name}.json").read_text(encoding="utf-8"))
        pieces = [text[: 2 + (7 * number) % 40] for number, text in enumerate(shipped * 4)]
        (folder / name).mkdir()
        (folder / name / "some.json").write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")
    (folder / "model").mkdir()
    (folder / "model" / "config.txt").write_text(json.dumps(CONFIG))
    return folder


def flags_for(corpus: Path) -> tuple[object, ...]:
    return (*flags_of(STEPS, seq_len=24), "--train-data", corpus, "--model-config", corpus / "model" / "config.txt")


@pytest.fixture(scope="module")
def alone(ranks, corpus, tmp_path_factory):
    """alone(*flags): the rows of chapter 00 with these flags, in one process and one micro-batch."""
    cache: dict[tuple[str, ...], list[dict]] = {}

    def rows(*flags: str) -> list[dict]:
        if flags not in cache:
            chapter = Chapter("00_single", tmp_path_factory.mktemp("alone"))
            train(ranks, 1, chapter, *flags_for(corpus), *flags)
            cache[flags] = chapter.metrics()
        return cache[flags]

    return rows


def test_the_flags_change_the_curve_so_that_a_chapter_cannot_follow_it_by_chance(alone) -> None:
    """A tenth of the tolerance of the law would already be seen."""
    losses = [[row["loss"] for row in alone(*flags)] for flags in
              ((), ("--documents", "mask"), ("--documents", "pack"), MIX, ("--documents", "pack", *MIX))]  # fmt: skip
    for number, one in enumerate(losses):
        for other in losses[:number]:
            assert max(abs(a / b - 1) for a, b in zip(one, other, strict=True)) > 1e-3


ALL_OF_08 = ("--method", "full", "--init-from", "random", "--kind", "all")  # the curve of chapter 00
CASES = {  # chapter, nproc, grad_accum, documents, more flags
    "00, micro-batches": ("00_single", 1, 4, "pack", ()),
    "00, recomputed": ("00_single", 1, 2, "pack", ("--recompute", "selective")),
    "00, tiled loss": ("00_single", 1, 2, "pack", ("--loss-tiles", "3")),
    "01": ("01_parameter_server", 2, 2, "pack", ()),
    "02": ("02_ddp", 3, 2, "pack", ()),
    "02 torch": ("02_ddp", 2, 4, "pack", ("--backend", "torch")),
    "04 O0": ("04_apex", 2, 2, "pack", ("--opt-level", "O0")),
    "05 pipeline": ("05_model_parallel", 2, 4, "pack", ()),
    "05 pipeline, mask": ("05_model_parallel", 2, 4, "mask", ("--activation-checkpointing",)),
    "05 tensor, mask": ("05_model_parallel", 2, 1, "mask", ("--tp", 2)),
    "05 sequence": ("05_model_parallel", 2, 2, "pack", ("--tp", 2, "--sequence-parallel", "--activation-checkpointing")),
    "05 pipeline x data": ("05_model_parallel", 4, 4, "pack", ("--pp", 2)),
    "05 torch pipeline": ("05_model_parallel", 2, 4, "pack", ("--backend", "torch")),
    "05 torch sequence": ("05_model_parallel", 2, 2, "mask", ("--tp", 2, "--sequence-parallel", "--backend", "torch")),
    "05 torch tensor": ("05_model_parallel", 2, 2, "pack", ("--tp", 2, "--backend", "torch", "--activation-checkpointing")),
    "06 stage 1": ("06_zero", 2, 2, "pack", ("--zero-stage", 1)),
    "06 stage 3": ("06_zero", 3, 2, "pack", ("--activation-checkpointing",)),
    "06 torch": ("06_zero", 2, 2, "pack", ("--backend", "torch")),
    "07": ("07_patrickstar", 2, 2, "pack", ("--near-budget", "50%")),
    "07, mask": ("07_patrickstar", 2, 1, "mask", ("--near-budget", "min", "--activation-checkpointing")),
    "07, tiled loss": ("07_patrickstar", 2, 2, "pack", ("--near-budget", "50%", "--loss-tiles", "auto")),
    "07 own": ("07_patrickstar", 1, 4, "pack", ("--backend", "own", "--near-budget", "min")),
    "08": ("08_param_efficient", 2, 2, "pack", ALL_OF_08),
    "08, mask, recomputed": ("08_param_efficient", 2, 2, "mask", (*ALL_OF_08, "--recompute", "sqrt")),
}  # fmt: skip
# the chapters that change the model, and one whose ranks average means
QUICK = ("00, tiled loss", "02", "05 pipeline", "05 tensor, mask", "05 torch pipeline", "05 torch sequence", "07",
         "07, mask")  # fmt: skip


@pytest.mark.parametrize("case", quick_only(CASES, *QUICK))
def test_the_law_of_the_curve_holds(ranks, corpus, alone, tmp_path, case) -> None:
    name, nproc, accumulate, documents, more = CASES[case]
    chapter, flags = Chapter(name, tmp_path), ("--documents", documents)
    train(ranks, nproc, chapter, *flags_for(corpus), *flags, *more, "--grad-accum", accumulate)
    assert_same_curve(chapter.metrics(), alone(*flags), rel=1e-4)


@pytest.mark.deep
@needs_horovod
def test_horovod_follows_the_curve(corpus, alone, tmp_path) -> None:
    flags = ("--documents", "pack")
    chapter = Chapter("03_horovod", tmp_path)
    train_under_horovod(2, [(chapter, (*flags_for(corpus), *flags, "--grad-accum", 2))])
    assert_same_curve(chapter.metrics(), alone(*flags), rel=1e-4)


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_mix_is_the_same_at_any_number_of_processes(ranks, corpus, alone, tmp_path, nproc) -> None:
    chapter, flags = Chapter("02_ddp", tmp_path), (*MIX, "--documents", "pack")
    train(ranks, nproc, chapter, *flags_for(corpus), *flags, "--grad-accum", 2)
    rows, expected = chapter.metrics(), alone("--documents", "pack", *MIX)
    assert_same_curve(rows, expected, rel=1e-4)
    passes = [(row["epochs/news"], row["epochs/wiki"]) for row in rows]
    assert passes == [(row["epochs/news"], row["epochs/wiki"]) for row in expected]
    assert all(one < two for one, two in zip(passes[:-1], passes[1:], strict=True)), "and they grow"


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_a_resumed_run_goes_on_bit_for_bit_and_its_epochs_are_in_tensorboard(ranks, corpus, tmp_path, nproc) -> None:
    name, flags = ("00_single", "02_ddp")[nproc - 1], (*flags_for(corpus), "--documents", "pack", *MIX)
    straight, resumed = Chapter(name, tmp_path / "straight"), Chapter(name, tmp_path / "resumed")
    saved = straight.output / "checkpoints/step_000003"
    for chapter, more in ((straight, ("--save-every", 3)), (resumed, ("--resume", saved))):
        chapter.folder.mkdir()
        train(ranks, nproc, chapter, *flags, *more)
    same = ("loss", "grad_norm", "epochs/news", "epochs/wiki", "tokens")
    rows = [[row[key] for key in same] for row in straight.metrics()[3:]]
    assert [[row[key] for key in same] for row in resumed.metrics()] == rows and len(rows) == STEPS - 3
    events = EventAccumulator(str(straight.output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for source in ("news", "wiki"):
        shown = [event.value for event in events.Scalars(f"train/epochs/{source}")]
        assert shown == pytest.approx([row[f"epochs/{source}"] for row in straight.metrics()], rel=1e-6), "kept as float32"


@pytest.mark.parametrize("method", ["prefix", "prompt"])
def test_virtual_tokens_are_seen_by_every_document_and_documents_do_not_see_each_other(method) -> None:
    import dataclasses

    import torch

    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
    from tests.chapters.technique import technique
    from tests.gpt2_chinese.model.test_documents import CONFIG, DOCUMENTS, row_of

    apply = technique("08_param_efficient", "methods").apply_method
    spec = technique("08_param_efficient", "methods.spec").MethodSpec(method, num_virtual_tokens=3)
    models = []
    for marks in (CONFIG.marks, None):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(dataclasses.replace(CONFIG, marks=marks, initializer_range=0.3)).double()
        apply(model, spec)
        models.append(model.double())
    ids, _ = row_of(DOCUMENTS, 24)
    packed = models[0](ids)[0]
    first = 0
    for document in DOCUMENTS:
        own = models[1](torch.tensor([document]))[0]
        assert torch.allclose(packed[first : first + len(document)], own, rtol=1e-9, atol=1e-9)  # float64, other lengths
        first += len(document)


@pytest.mark.parametrize("chapter, module, flags, line", [
    ("08_param_efficient", "adapt_settings", ("--backend", "peft", "--documents", "mask"), "--documents mask needs --b"),
    ("01_parameter_server", "server_settings", ("--backend", "torch", "--documents", "pack"), "--documents pack needs --b"),
])  # fmt: skip
def test_what_a_library_cannot_do_is_refused_in_one_line(capsys, tmp_path, chapter, module, flags, line) -> None:
    assert line in settings_error(chapter, module, capsys, "--output-dir", tmp_path, *flags)
