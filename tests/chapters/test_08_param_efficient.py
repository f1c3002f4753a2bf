"""Chapter 08 as a program: the law of the curve, the story from a shell, checkpoints, what it writes, what it refuses.

Tolerances: none on one process, where recomputation repeats the same operations. 1e-4 relative at 2 and 3 processes, the
law's: the same fp32 numbers are added in another order.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from durable import folders
from gpt2_chinese.checkpoint.trained_model import load_model, read_weights
from gpt2_chinese.errors import UserError
from gpt2_chinese.generate.decoding import generate
from gpt2_chinese.generate.sampling import Sampling
from gpt2_chinese.run.resolve import resolve
from tests.chapters.inside import on_gloo, train
from tests.chapters.law import SHORT, assert_same_curve, flags_of
from tests.chapters.program import ROOT, SMALL, VALID, Chapter, run
from tests.chapters.technique import settings_error, technique
from tests.cover import quick_only

CHAPTER = "08_param_efficient"
PLAIN = ("--method", "full", "--init-from", "random", "--kind", "all")
KINDS = ("comments", "news", "webtext", "wiki")


class Adapted(Chapter):
    """The chapter on the shipped kinds of text, with a base whose model and vocabulary it takes over."""

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(CHAPTER, folder)
        self.base = base

    def command(self, *flags: object) -> list[str]:
        found = super().command(*flags)
        data = found.index("--valid-data")
        del found[data : data + 2]
        if self.base is not None:
            config = found.index("--model-config")
            del found[config : config + 2]
            found += ["--init-from", str(self.base)]
        return found

    @property
    def about(self) -> dict[str, Any]:
        return json.loads((self.output / "final" / "run.json").read_text())


@pytest.fixture(scope="module")
def base(ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of chapter 00 on two kinds of text; its model has learnt a little."""
    folder = tmp_path_factory.mktemp("base")
    texts = folder / "texts"
    texts.mkdir()
    for name in ("news.json", "wiki.json"):
        shutil.copy(ROOT / "data" / "train" / name, texts)
    train(ranks, 1, Chapter("00_single", folder), *flags_of(SHORT), "--train-data", texts)
    return folder / "run"


def few(steps: int = 6) -> tuple[object, ...]:
    return ("--max-steps", steps, "--eval-every", 1000, "--save-every", 3, "--keep-last", 0, "--seq-len", 16, "--lr", 0.01)


# ---- the law of the curve


@pytest.mark.parametrize("mode", quick_only(["none", "block", "every:2", "selective", "sqrt", "none --offload-activations"],
                                            "every:2", "selective", "none --offload-activations"))  # fmt: skip
def test_full_training_is_the_curve_bit_for_bit(ranks, curve, tmp_path, mode) -> None:
    chapter = Chapter(CHAPTER, tmp_path)
    train(ranks, 1, chapter, *flags_of(SHORT), *PLAIN, "--recompute", *mode.split())
    rows, expected = chapter.metrics(), curve(SHORT)
    for key in ("loss", "grad_norm", "lr"):
        assert [row[key] for row in rows] == [row[key] for row in expected]
    assert rows[-1]["valid_loss"] == expected[-1]["valid_loss"]


@pytest.mark.parametrize("nproc, mode, accumulate", [(2, "every:2", 4), (3, "selective", 1)])
def test_full_training_follows_the_curve_on_ranks(ranks, curve, tmp_path, nproc, mode, accumulate) -> None:
    chapter = Chapter(CHAPTER, tmp_path)
    train(ranks, nproc, chapter, *flags_of(SHORT), *PLAIN, "--recompute", mode, "--grad-accum", accumulate)
    rows = chapter.metrics()
    assert_same_curve(rows, curve(SHORT), rel=1e-4)
    number = json.loads((chapter.output / "config.json").read_text())["num_parameters"]
    assert {row["reduced_bytes"] for row in rows} == {4 * number}


@pytest.mark.parametrize("method", quick_only(["lora", "qlora"], "lora"))
def test_adapters_follow_their_own_curve_on_ranks(ranks, base, tmp_path, method) -> None:
    flags = ("--method", method)
    one = Adapted(tmp_path / "1", base)
    train(ranks, 1, one, *few(SHORT), *flags)
    assert one.losses()[-1] < one.losses()[0], "it learns"
    for nproc in (2, 3):
        several = Adapted(tmp_path / str(nproc), base)
        train(ranks, nproc, several, *few(SHORT), *flags, "--recompute", "block", "--check-sync", 1)
        assert_same_curve(several.metrics(), one.metrics(), rel=1e-4)
        layers, width, rank = SMALL["n_layer"], SMALL["n_embd"], 8
        assert {row["reduced_bytes"] for row in several.metrics()} == {4 * layers * rank * (width + 3 * width)}
        adapters = [load_file(run.output / "final" / "adapter_model.safetensors") for run in (one, several)]
        for name, tensor in adapters[0].items():
            torch.testing.assert_close(adapters[1][name], tensor, rtol=0, atol=1e-4)


# ---- checkpoints


@pytest.mark.parametrize("flags", [("--method", "lora", "--dropout", 0.1), ("--method", "full")], ids=["lora", "full"])
def test_a_resumed_run_has_the_same_losses_bit_for_bit(ranks, base, tmp_path, flags) -> None:
    straight, again = Adapted(tmp_path / "straight", base), Adapted(tmp_path / "again", base)
    train(ranks, 1, straight, *few(), *flags)
    shutil.copytree(straight.output / "checkpoints" / "step_000003", again.output / "checkpoints" / "step_000003")
    train(ranks, 1, again, *few(), *flags)
    assert [row["step"] for row in again.metrics()] == [4, 5, 6]
    assert again.losses() == straight.losses()[3:]
    name = "adapter_model.safetensors" if "lora" in flags else "model.safetensors"
    ours, theirs = (load_file(chapter.output / "final" / name) for chapter in (again, straight))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    measured = [name for name in straight.about if name.startswith("loss_")]
    assert len(measured) == 8 and [again.about[name] for name in measured] == [straight.about[name] for name in measured]


def test_a_run_goes_on_with_another_number_of_processes_and_from_a_path(ranks, base, tmp_path) -> None:
    """A checkpoint holds the adapter and its moments alone, and names the base that it belongs to."""
    straight, again = Adapted(tmp_path / "straight", base), Adapted(tmp_path / "again")
    train(ranks, 1, straight, *few())
    saved = straight.output / "checkpoints" / "step_000003"
    weights = load_file(saved / "model.safetensors")
    assert weights and all("lora_" in name for name in weights)
    command = again.command(*few(), "--resume", saved, "--nproc", 2)
    place = command.index("--model-config")
    del command[place : place + 2]  # the base that the checkpoint names gives model and vocabulary
    ranks(2).run(on_gloo, CHAPTER, command[2:])
    assert again.losses() == pytest.approx(straight.losses()[3:], rel=1e-4)


# ---- what a run leaves behind


@pytest.fixture(scope="module")
def adapted(ranks, base, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    chapter = Adapted(tmp_path_factory.mktemp("adapted"), base)
    train(ranks, 1, chapter, *few(SHORT), "--merge", "--recompute", "every:2")
    return chapter


def test_the_report_counts_bytes_and_losses(adapted) -> None:
    about = adapted.about
    layers, width = SMALL["n_layer"], SMALL["n_embd"]
    trained = layers * 8 * (width + 3 * width)
    config = json.loads((adapted.output / "config.json").read_text())
    assert about["trained_parameters"] == trained
    assert about["weight_bytes"] == 4 * (config["num_parameters"] + trained)
    assert (about["gradient_bytes"], about["state_bytes"]) == (4 * trained, 8 * trained)
    assert about["recomputed_flops"] > about["recomputed_flops_formula"] > 0, "the adapter's own products come on top"
    for kind in KINDS:
        assert about[f"loss_before_{kind}"] > 0 and about[f"loss_after_{kind}"] > 0
    assert about["loss_after_comments"] < about["loss_before_comments"], "it has learnt the new kind"
    assert about["loss_after_comments"] == pytest.approx(adapted.metrics()[-1]["valid_loss"], rel=1e-6)
    assert about["method"] == "lora" and about["kind"] == "comments" and Path(about["base"]).is_file()


def test_full_training_reports_the_bytes_of_the_formulas(ranks, base, tmp_path) -> None:
    chapter = Adapted(tmp_path, base)
    train(ranks, 1, chapter, *few(3), "--method", "full", "--recompute", "block", "--grad-accum", 2)
    about = chapter.about
    number = json.loads((chapter.output / "config.json").read_text())["num_parameters"]
    assert [about[f"{name}_bytes"] for name in ("weight", "gradient", "state")] == [4 * number, 4 * number, 8 * number]
    for name in ("activation_bytes", "again_bytes", "recomputed_flops"):
        assert about[name] == about[f"{name}_formula"] > 0
    model, _ = load_model(chapter.output)
    assert model.config.n_layer == SMALL["n_layer"], "final/ is a plain model"


def test_the_base_stays_as_it_is_and_the_merged_model_is_plain(adapted, base) -> None:
    before = load_file(base / "final" / "model.safetensors")
    merged = load_file(adapted.output / "merged" / "model.safetensors")
    assert merged.keys() == before.keys()
    changed = {name for name in before if not torch.equal(merged[name], before[name])}
    assert changed == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(SMALL["n_layer"])}
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(adapted.output / "merged").eval()
    plain, vocabulary = load_model(adapted.output / "merged")
    with_adapter, _ = technique(CHAPTER, "adapt").load_adapted(adapted.output)
    ids = torch.tensor([vocabulary.encode_prompt("今天天气很好")])
    with torch.no_grad():
        expected = with_adapter(ids)
        torch.testing.assert_close(plain(ids), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-5)
    rows = [generate(model, ids.tolist(), 12, Sampling(greedy=True)) for model in (plain, with_adapter)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("method", quick_only(["dora", "adapter", "prefix", "prompt", "ia3", "bitfit"], "adapter", "prefix"))
def test_every_method_trains_and_comes_back_from_the_disk(ranks, base, tmp_path, method) -> None:
    chapter = Adapted(tmp_path, base)
    train(ranks, 1, chapter, *few(3), "--method", method, "--virtual-tokens", 4, "--recompute", "selective")
    about = chapter.about
    assert about["trained_parameters"] * 4 == about["gradient_bytes"] < about["weight_bytes"] / 10
    model, _ = technique(CHAPTER, "adapt").load_adapted(chapter.output / "final")
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted == about["trained_parameters"]


@pytest.mark.deep
def test_peft_follows_the_same_curve(ranks, base, tmp_path) -> None:
    """Hugging Face PEFT on the same weights and data: fp32 sums in another order."""
    pytest.importorskip("peft")
    own, peft = Adapted(tmp_path / "own", base), Adapted(tmp_path / "peft", base)
    train(ranks, 1, own, *few())
    train(ranks, 1, peft, *few(), "--backend", "peft", "--merge")
    assert peft.losses() == pytest.approx(own.losses(), rel=1e-5)
    merged = [read_weights(peft.output / "merged"), technique(CHAPTER, "methods.apply").merged_weights(
        technique(CHAPTER, "adapt").load_adapted(own.output)[0])]  # fmt: skip
    for name, tensor in merged[1].items():
        torch.testing.assert_close(merged[0][name], tensor, rtol=0, atol=1e-4)


# ---- the story, from a shell


@pytest.mark.parametrize("forks", quick_only([True, False], True))
def test_the_first_command_ends_with_the_story(tmp_path, forks) -> None:
    """It trains a base, adapts it, and says what was learnt and forgotten; the second start finds the base complete."""
    chapter = Adapted(tmp_path)
    flags = (*few(3), "--base-steps", 4, "--base-dir", tmp_path / "bases")
    command = ["bash", str(ROOT / "chapters" / CHAPTER / "train.sh"), *chapter.command(*flags, "--nproc", 2)[2:]]
    said = run(command, forks=forks)
    assert said.index("There is no base yet.") < said.index("00_single") < said.index("The base is complete")
    assert said.count("00_single\n") == 1, said
    for kind in KINDS:
        what = r"\(new kind\)" if kind == "comments" else r"\(old kind\)"
        line = rf"loss on {kind} +\d\.\d{{4}} -> \d\.\d{{4}}, [+-]\d\.\d{{4}} (learnt|forgotten) {what}"
        assert re.search(line, said), said
    assert said.count("   (before)\n") == 3 and re.search(r"trained +2,048 of [\d,]+ parameters", said)
    folder = next((tmp_path / "bases").iterdir())
    assert folder.name.startswith("without_comments-")
    assert sorted(path.stem for path in (folder / "data" / "train").iterdir()) == ["news", "webtext", "wiki"]
    script = ["bash", str(ROOT / "chapters" / CHAPTER / "generate.sh"), "--adapter", str(chapter.output / "final")]
    made = run([*script, "--prompt", "今天天气", "--length", "5", "--greedy", "--bits", "4"])
    assert "今天天气" in made and re.search(r"note: 4 bits: [\d,]+ bytes of weights instead of [\d,]+", made)
    assert "This run is complete" in chapter.train_forked(*flags, "--nproc", 2)


STOPS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: stop())
def stop():
    pathlib.Path({marker!r}).write_text("saved")
    sys.exit(0)
def catches(process):
    lines = pathlib.Path(f"/proc/{{process}}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16) >> signal.SIGTERM - 1 & 1
end = time.monotonic() + 600  # for a test that fails meanwhile
while not catches(os.getppid()) and time.monotonic() < end:
    time.sleep(0.01)
if catches(os.getppid()):
    os.kill(os.getppid(), signal.SIGTERM)
while time.monotonic() < end:
    time.sleep(0.01)
sys.exit("no signal came")
"""


def test_sigterm_while_the_base_is_trained_reaches_chapter_00(tmp_path, monkeypatch, capsys) -> None:
    """It saves and ends (test_survival.py); a program in its place notes the signal. Then one line says how to go on."""
    base_model, marker = technique(CHAPTER, "base_model"), tmp_path / "marker"
    (tmp_path / "program.py").write_text(STOPS.format(marker=str(marker)))
    monkeypatch.setattr(base_model, "PROGRAM", tmp_path / "program.py")
    before = signal.getsignal(signal.SIGTERM)
    flags = ("--model-config", "tiny", "--base-dir", tmp_path / "bases", "--output-dir", tmp_path / "run")
    said = settings_error(CHAPTER, "adapt_settings", capsys, *flags)
    assert marker.read_text() == "saved" and signal.getsignal(signal.SIGTERM) == before
    assert "is not complete: chapter 00 ended with status 0; the same command goes on from its newest checkpoint" in said


# ---- wrong input


@pytest.mark.parametrize("flags, said", [
    (["--rank", 40], "--rank 40 is above 32: c_attn is 32 x 96"),
    (["--modules", "c_attn,wte"], "--modules wte: a block has the layers c_attn, attn.c_proj, c_fc, mlp.c_proj"),
    (["--bits", 4], "--bits 4 is for --method qlora: --method lora keeps the base as it is"),
    (["--method", "prompt", "--virtual-tokens", 32], "--virtual-tokens 32 is above 31"),
    (["--method", "prefix", "--seq-len", 30], "--seq-len 30 and --virtual-tokens 16 need 46 positions"),
    (["--method", "adapter", "--merge"], "--merge is not for --method adapter: it adds modules that a plain GPT-2 lacks"),
    (["--method", "full", "--merge"], "--merge is not for --method full: final/ is a plain model already"),
    (["--method", "bitfit", "--backend", "peft"], "--backend peft has no --method bitfit here: give lora, dora, prefix"),
    (["--method", "qlora", "--backend", "peft"], "--backend peft has no --method qlora here"),
    (["--backend", "peft", "--recompute", "block"], "--recompute and --offload-activations need --backend own"),
    (["--recompute", "every:0"], "--recompute every:0: give none, block, every:K with K of at least 1, selective or sqrt"),
    (["--recompute", "every:3"], "--recompute every:3: the model has 2 layers, give every:2 at most"),
    (["--kind", "poems"], "--kind poems: --train-data"),
    (["--kind", "all"], "--kind all leaves no other kind of text to train a base on: give --init-from"),
    (["--train-data", str(ROOT / "data/train/comments.json")], "has no other kind to train a base on; give --init-from"),
    (["--init-from", "random"], "--init-from random is for --method full: --method lora needs a base on the disk"),
    (["--init-from", "{t}/none"], "no trained model in"),
    (["--resume", "x" * 300], "cannot read --resume x"),
    (["--init-from", "x" * 300], "no trained model in x"),
    (["--base-steps", 0], "--base-steps must be at least 1, not 0"),
    (["--method", "lorra"], "--method: invalid choice: 'lorra'"),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "")  # fmt: skip
def test_wrong_input_is_one_line(tmp_path, capsys, flags, said) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    given = [str(flag).format(t=tmp_path) for flag in flags]
    model = () if "{t}/none" in flags else ("--model-config", config)
    rest = (*model, "--output-dir", tmp_path / "run", "--base-dir", tmp_path / "bases", "--max-steps", 6)
    assert said in settings_error(CHAPTER, "adapt_settings", capsys, *rest, *given)
    assert not (tmp_path / "bases").exists(), "no base is trained for a wrong command"


def test_a_checkpoint_of_another_base_method_or_chapter_is_refused(ranks, base, adapted, tmp_path, capsys) -> None:
    output = ("--output-dir", adapted.output, "--max-steps", 20, "--seq-len", 16, "--nproc", 1)
    given = (*output, "--init-from", base)
    said = settings_error(CHAPTER, "adapt_settings", capsys, *given, "--rank", 4)
    assert "has rank 8, this run 4: give the same flags" in said
    said = settings_error(CHAPTER, "adapt_settings", capsys, *given, "--method", "qlora", "--bits", 8)
    assert "has method lora, this run qlora" in said
    other = base / "checkpoints" / f"step_{SHORT:06d}"
    said = settings_error(CHAPTER, "adapt_settings", capsys, *output, "--init-from", adapted.output / "merged")
    assert "was trained on the base" in said and "give that --init-from" in said
    said = settings_error(CHAPTER, "adapt_settings", capsys, "--output-dir", tmp_path / "new", "--resume", other,
                          "--model-config", base / "final", "--max-steps", 20)  # fmt: skip
    assert "is of another chapter: adapt its weights with --init-from" in said


def test_an_adapter_of_another_model_or_without_its_base_is_refused(adapted, base, tmp_path) -> None:
    final = shutil.copytree(adapted.output / "final", tmp_path / "final")
    load_adapted = technique(CHAPTER, "adapt").load_adapted
    content = json.loads((final / "adapter_config.json").read_text())
    (final / "adapter_config.json").write_text(json.dumps({**content, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match="the base of the adapter .* is not there .*: name its folder with --base"):
        load_adapted(final)
    weights = read_weights(base)
    weights["transformer.wte.weight"] += 1
    other = shutil.copytree(base / "final", tmp_path / "other")
    save_file(weights, other / "model.safetensors")
    with pytest.raises(UserError, match="is the adapter of another model"):
        load_adapted(final, base=str(other))


def test_an_adapter_is_no_base(adapted, tmp_path, capsys) -> None:
    said = settings_error(CHAPTER, "adapt_settings", capsys, "--init-from", adapted.output, "--output-dir", tmp_path / "run")
    assert "holds an adapter, which is no model without its base: give merged/ of a run with --merge" in said


@pytest.mark.parametrize("lost", [(), ("final",)], ids=["final", "checkpoint"])
def test_each_file_of_the_base_is_hashed_once_in_a_process(base, tmp_path, monkeypatch, lost) -> None:
    """The search, --init-from, and what a checkpoint records about the base share one reading of the files."""
    copy, hashed = tmp_path / "base", []
    shutil.copytree(base, copy, ignore=shutil.ignore_patterns(*lost))
    plain = folders.digest
    monkeypatch.setattr(folders, "digest", lambda file: (hashed.append(file), plain(file))[1])
    program, flags = str(ROOT / "chapters" / CHAPTER / "train.py"), ["--init-from", str(copy), "--seq-len", "16"]
    found = resolve(technique(CHAPTER, "adapt_settings").Settings.from_command_line(
        program, "", [*flags, "--output-dir", str(tmp_path / "run")]))  # fmt: skip
    of_base = [file for file in hashed if copy in file.parents]
    assert found.base in of_base and len(set(of_base)) == len(of_base)
    assert found.base_facts == {"path": str(found.base), **plain(found.base)}


def test_valid_data_of_one_file_is_the_new_kind(ranks, base, tmp_path) -> None:
    chapter = Adapted(tmp_path, base)
    train(ranks, 1, chapter, *few(3), "--valid-data", VALID)
    assert [name for name in chapter.about if name.startswith("loss_after_")] == ["loss_after_comments"]
