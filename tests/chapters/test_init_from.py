"""--init-from: every chapter begins with the weights of a Hugging Face folder, at Hugging Face's loss for them.

Tolerance: 1e-5 absolute, fp32 sums in another order. The folder has dropout 0 and stores its weights in another order, age
and prefix than this project does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2_chinese.data.batches import Batches
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings
from gpt2_chinese.vocabulary.vocabulary import Vocabulary
from tests.chapters.horovod import needs_horovod
from tests.chapters.inside import train, train_under_horovod
from tests.chapters.program import ROOT, SMALL, VALID, Chapter, environment
from tests.chapters.technique import settings_error
from tests.cover import quick_only
from tests.limits import HANGS_S

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
CHAPTERS = {
    "00": ("00_single", 1, ()),
    "01": ("01_parameter_server", 2, ()),
    "01 asynchronous": ("01_parameter_server", 2, ("--mode", "async", "--staleness", 0)),
    "02": ("02_ddp", 2, ()),
    "02 torch": ("02_ddp", 2, ("--backend", "torch")),
    "04": ("04_apex", 2, ("--opt-level", "O0")),
    "05 pipeline": ("05_model_parallel", 2, ("--grad-accum", 2)),
    "05 tensor": ("05_model_parallel", 2, ("--tp", 2)),
    "06 stage 1": ("06_zero", 2, ("--zero-stage", 1)),
    "06 stage 3": ("06_zero", 2, ("--zero-stage", 3)),
    "06 torch": ("06_zero", 2, ("--backend", "torch")),
    "07": ("07_patrickstar", 2, ()),
    "07 alone": ("07_patrickstar", 1, ("--near-budget", "min")),
}


class Begun(Chapter):
    """A chapter whose model and vocabulary are those of --init-from."""

    def command(self, *flags: object) -> list[str]:
        found = super().command(*flags)
        place = found.index("--model-config")
        return found[:place] + found[place + 2 :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of before 2023, under names without prefix, with mask buffers, in half precision for some."""
    made = tmp_path_factory.mktemp("hf")
    size = Vocabulary.load(ROOT / "cache" / "vocab.txt").size
    torch.manual_seed(5)
    config = transformers.GPT2Config(vocab_size=size, **SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    found = {n.removeprefix("transformer."): t for n, t in reversed(model.state_dict().items()) if n != "lm_head.weight"}
    for layer in range(SMALL["n_layer"]):
        found[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
        found[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(found, made / "pytorch_model.bin")
    (made / "config.json").write_text(json.dumps({**config.to_dict(), "bos_token_id": 50256, "eos_token_id": 50256}))
    shutil.copy(ROOT / "cache" / "vocab.txt", made)
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Hugging Face's loss on the batch of step 1."""
    settings = resolve(Settings.from_command_line(
        str(ROOT / "chapters" / "00_single" / "train.py"), "",
        ["--init-from", str(folder), "--batch-size", "12", "--valid-data", str(VALID), "--output-dir",
         str(tmp_path_factory.mktemp("none"))],
    ))  # fmt: skip
    assert (settings.model.n_embd, settings.seq_len) == (SMALL["n_embd"], 32)
    batches = Batches(settings.train_tokens, settings.seq_len, settings.batch_size, settings.seed)
    ((inputs, targets),) = batches.micro_batches(1)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).item()


@pytest.fixture(scope="module")
def first(ranks, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of chapter 00."""
    chapter = Begun("00_single", tmp_path_factory.mktemp("first"))
    train(ranks, 1, chapter, "--init-from", folder, "--max-steps", 2)
    return chapter.losses()


@pytest.mark.parametrize("case", quick_only(CHAPTERS, "00", "01", "02", "04", "05 tensor", "06 stage 3", "07"))
def test_the_first_loss_is_hugging_faces(ranks, folder, wanted, first, tmp_path: Path, case: str) -> None:
    name, nproc, flags = CHAPTERS[case]
    chapter = Begun(name, tmp_path)
    train(ranks, nproc, chapter, "--init-from", folder, "--max-steps", 2, *flags)
    assert chapter.losses()[0] == pytest.approx(wanted, abs=1e-5)
    assert chapter.losses() == pytest.approx(first, rel=1e-4) and len(first) == 2
    config = json.loads((chapter.output / "final" / "config.json").read_text())
    assert config["eos_token_id"] == Vocabulary.load(folder).end_id, "50256 is outside of the vocabulary"


@pytest.mark.deep
@needs_horovod
def test_horovod_starts_at_hugging_faces_loss(folder, wanted, first, tmp_path: Path) -> None:
    chapter = Begun("03_horovod", tmp_path)
    train_under_horovod(2, [(chapter, ("--init-from", folder, "--max-steps", 2))])
    assert chapter.losses()[0] == pytest.approx(wanted, abs=1e-5)
    assert chapter.losses() == pytest.approx(first, rel=1e-4)


def test_a_run_begun_so_goes_on_from_its_own_checkpoint(ranks, folder, tmp_path: Path) -> None:
    whole, halves = (Begun("00_single", tmp_path / name) for name in ("whole", "halves"))
    for chapter in (whole, halves):
        chapter.folder.mkdir()
    flags = ("--init-from", folder, "--lr", 0.001, "--warmup-steps", 1, "--save-every", 2, "--max-steps", 4)
    train(ranks, 1, whole, *flags)
    train(ranks, 1, halves, *flags)
    shutil.rmtree(halves.output / "checkpoints" / "step_000004")
    train(ranks, 1, halves, *flags)
    assert halves.losses() == whole.losses()
    train(ranks, 1, halves, *flags, "--resume", "never")
    assert halves.losses() == whole.losses(), "anew from the same weights"


@pytest.mark.parametrize("source", quick_only(["00_single", "06_zero", "07_patrickstar"], "07_patrickstar"))
def test_a_run_of_ours_is_begun_from(ranks, tmp_path: Path, source: str) -> None:
    """From final/ and from a checkpoint of any chapter: the weights alone, at step 1 again."""
    before = Chapter(source, tmp_path / "before")
    before.folder.mkdir()
    train(ranks, 1, before, "--max-steps", 3)
    losses = []
    for number, path in enumerate((before.output, before.output / "checkpoints" / "step_000003")):
        chapter = Begun("00_single", tmp_path / str(number))
        chapter.folder.mkdir()
        train(ranks, 1, chapter, "--init-from", path, "--max-steps", 2)
        assert [row["step"] for row in chapter.metrics()] == [1, 2]
        losses.append(chapter.losses())
    assert losses[0] == losses[1] and losses[0][0] < before.losses()[0]


def test_wrong_inputs_with_init_from_are_refused_in_one_line(folder, tmp_path: Path, capsys) -> None:
    chapter, other = Begun("02_ddp", tmp_path), tmp_path / "vocab.txt"
    other.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n好\n")
    for flags, line in (
        (("--init-from", tmp_path / "none"), "no trained model in"),
        (("--init-from", folder, "--resume", folder), "give one of them to begin with"),
        (("--init-from", folder, "--model-config", "tiny"), "wpe.weight is (32, 32) instead of (128, 128)"),
        (("--init-from", folder, "--vocab", other), f"entries, but --model-config {folder} says vocab_size"),
    ):
        said = settings_error("02_ddp", "ddp_settings", capsys, *flags, "--output-dir", chapter.output)
        assert line in said
    assert not chapter.output.exists()


def test_the_program_prints_the_weights_it_begins_with(ranks, folder, wanted, tmp_path: Path, capsys) -> None:
    chapter = Begun("02_ddp", tmp_path)
    train(ranks, 2, chapter, "--init-from", folder, "--max-steps", 2)
    said = capsys.readouterr().out
    assert f"begin as those of {folder}/pytorch_model.bin" in said and "resuming" not in said
    assert chapter.losses()[0] == pytest.approx(wanted, abs=1e-5)


def test_ctrl_c_ends_an_interactive_session_well(folder) -> None:
    import signal

    command = [sys.executable, "-m", "gpt2_chinese.generate", "--model", str(folder), "--interactive", "--length", "5"]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    process.stdin.write("今天\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("今天")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0 and told == ""
