"""What a user gives: defaults, and one line with status 2 for everything that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import ROOT, Settings, flag
from tests.limits import HANGS_S

PROGRAM = str(ROOT / "chapters" / "00_single" / "train.py")
CONTRACT = [
    *("nproc", "model-config", "train-data", "valid-data", "vocab", "vocab-profile", "documents", "mix"),
    *("mix-temperature", "seq-len", "batch-size", "grad-accum", "recompute", "loss-tiles"),
    *("lr", "warmup-steps", "weight-decay", "clip-grad-norm", "precision", "max-steps", "epochs", "eval-every"),
    *("save-every", "keep-last", "keep-every", "async-save", "log-every", "output-dir", "comment", "init-from", "resume"),
    "seed",
    "device",
    "deterministic",
]


@dataclass
class Parallel(Settings):
    """Settings like those of a chapter with a technique."""

    nproc: int = flag(2, "Processes on this machine.")
    stage: int = flag(3, "What is sharded.", choices=(1, 2, 3))
    fancy: bool = flag(False, "Does it with 100% style.")


def parse(*argv: str | Path, cls: type[Settings] = Settings) -> Settings:
    return resolve(cls.from_command_line(PROGRAM, "A program.", [str(a) for a in argv]))


def test_defaults_of_tiny(tmp_path: Path) -> None:
    settings = parse("--output-dir", tmp_path)
    got = {name: getattr(settings, name) for name in ("seq_len", "batch_size", "grad_accum", "lr", "warmup_steps")}
    assert got == {"seq_len": 128, "batch_size": 24, "grad_accum": 1, "lr": 3e-3, "warmup_steps": 50}
    assert (settings.max_steps, settings.eval_every, settings.save_every, settings.log_every) == (800, 200, 200, 1)
    assert (settings.weight_decay, settings.clip_grad_norm, settings.seed) == (0.1, 1.0, 42)
    assert settings.chapter == "00_single" and settings.vocab_size == settings.model.vocab_size == 3980
    assert all(24 % n == 0 for n in (1, 2, 3, 4, 6, 8))
    assert parse().output_dir == ROOT / "runs" / "00_single"
    assert parse("--model-config", "small", "--output-dir", tmp_path).seq_len == 512


def test_the_flags_are_the_contracts() -> None:
    assert [name.replace("_", "-") for name in Settings.flags()] == CONTRACT


def test_help_lists_all_flags_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help", cls=Parallel)
    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for name in [*CONTRACT, "stage", "fancy"]:
        assert f"--{name}" in said
    assert said.count("(default:") == len(CONTRACT) + 2
    assert "100% style" in said and "tiny: 0.003" in said


def test_a_chapters_own_flags() -> None:
    settings = parse("--stage", 2, "--fancy", cls=Parallel)
    assert (settings.nproc, settings.stage, settings.fancy) == (2, 2, True)


@pytest.mark.parametrize(
    "flags, steps",
    [
        (["--max-steps", 7], 7),
        (["--epochs", 2], 2 * 105),
        (["--epochs", 2, "--max-steps", 50], 50),
        (["--epochs", 0.1, "--max-steps", 50], 10),
    ],
)
def test_the_smaller_of_epochs_and_max_steps_decides(tmp_path: Path, flags: list, steps: int) -> None:
    settings = parse("--output-dir", tmp_path, *flags)
    assert settings.max_steps == steps and settings.warmup_steps == min(50, steps // 10)


def test_a_launcher_decides_the_number_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert parse("--output-dir", tmp_path, cls=Parallel).nproc == 3


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# name: (flags, what the line must say). {t} is a folder with the files that `files` makes
BAD = {
    "unknown flag": (["--bach-size", "8"], "unknown flag --bach-size: did you mean --batch-size?"),
    "abbreviated flag": (["--batch", "8"], "unknown flag --batch"),
    "word without flag": (["fast"], "unknown flag fast"),
    "no number": (["--lr", "fast"], "--lr: invalid float value: 'fast'"),
    "no whole number": (["--max-steps", "1.5"], "--max-steps: invalid int value: '1.5'"),
    "value missing": (["--seed"], "--seed: expected one argument"),
    "no choice": (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
    "no device": (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
    "own choice": (["--stage", "4"], "--stage: invalid choice: 4"),
    "zero steps": (["--max-steps", "0"], "--max-steps must be at least 1, not 0"),
    "negative lr": (["--lr", "-1"], "--lr must be above 0, not -1.0"),
    "nan lr": (["--lr", "nan"], "--lr must be above 0, not nan"),
    "negative clip": (["--clip-grad-norm", "-1"], "--clip-grad-norm must be at least 0"),
    "zero accum": (["--grad-accum", "0"], "--grad-accum must be at least 1, not 0"),
    "corpus missing": (["--train-data", "{t}/none"], "corpus {t}/none does not exist"),
    "valid corpus missing": (["--valid-data", "{t}/none"], "corpus {t}/none does not exist"),
    "corpus empty": (["--train-data", "{t}/empty.json"], "corpus {t}/empty.json is empty"),
    "corpus folder empty": (["--train-data", "{t}/folder"], "corpus folder {t}/folder holds no .json file"),
    "corpus no array": (["--train-data", "{t}/object.json"], "{t}/object.json is not a JSON array of strings"),
    "item no string": (["--train-data", "{t}/number.json"], "{t}/number.json: item 3 is no string: '17, "),
    "corpus too small": (["--train-data", "{t}/short.json"], "{t}/short.json is too small: 4 tokens do not fill one"),
    "vocab missing": (["--vocab", "{t}/none.txt"], "vocabulary {t}/none.txt does not exist"),
    "vocab foreign": (["--vocab", "{t}/empty.json"], "{t}/empty.json is not a tokenizer.json"),
    "vocab does not fit": (
        ["--model-config", "{t}/config.json"],
        "cache/vocab.txt has 3980 entries, but --model-config {t}/config.json says vocab_size 21128",
    ),
    "config missing": (["--model-config", "tinny"], "--model-config tinny: no such file, and not one of the presets"),
    "config no json": (["--model-config", "{t}/text.json"], "cannot read the model configuration {t}/text.json"),
    "config wrong": (["--model-config", "{t}/heads.json"], "n_embd 100 is not divisible by n_head 3"),
    "documents unknown": (["--documents", "cut"], "--documents: invalid choice: 'cut'"),
    "packed windows of one id": (["--documents", "pack", "--seq-len", "1"], "--documents pack needs --seq-len of at least"),
    "packed documents with one mark": (
        ["--documents", "pack", "--vocab", "{t}/one_mark.json", "--model-config", "{t}/any_vocabulary.json"],
        "--documents pack needs two marks around a document, and {t}/one_mark.json has one, <|endoftext|>: give --documents",
    ),
    "comment empty": (["--comment", " "], "--comment is empty: give a value"),
    "comment in another encoding": (["--comment", "\udcd5\udce2"], "--comment is not UTF-8 text"),
    "mix of a file": (["--mix", "a=1", "--train-data", "{t}/short.json"], "--mix needs several sources, and --train-data"),
    "mix unknown": (["--mix", "news=1,songs=2"], "has no source songs; it has comments, news, webtext, wiki"),
    "mix of weight 0": (["--mix", "news=0"], "--mix news=0: the weight of news must be above 0"),
    "mix of two kinds": (["--mix", "news=1", "--mix-temperature", "2"], "both set the shares, give one"),
    "mix too cold": (["--mix-temperature", "0"], "--mix-temperature must be above 0, not 0.0"),
    "mix of a rare source": (["--mix", "news=1,wiki=1e-9"], "the source wiki has a share of 1e-09, below 1 of 10000"),
    "mix too small": (["--mix", "a=1,b=1", "--train-data", "{t}/sources"], "the source a is too small: its tokens do not"),
    "batch indivisible": (
        ["--nproc", "5", "--grad-accum", "2"],
        "--batch-size 24 is not divisible by --nproc 5 times --grad-accum 2 = 10",
    ),
    "sequence too long": (["--seq-len", "129"], "--seq-len 129 is above the model's context, n_positions 128"),
    "output below a file": (["--output-dir", "{t}/text.json/run"], "--output-dir {t}/text.json/run cannot be written"),
    "output is a file": (["--output-dir", "{t}/text.json"], "{t}/text.json is a file"),
    "warm-up too long": (["--warmup-steps", "9", "--max-steps", "9"], "--warmup-steps 9 must be below --max-steps 9"),
    "warm-up above epochs": (["--warmup-steps", "150", "--epochs", "1"], "must be below the 105 steps of --epochs"),
    "resume missing": (["--resume", "{t}/none"], "--resume {t}/none is no checkpoint"),
    "resume no checkpoint": (["--resume", "{t}/folder"], "cannot be used: manifest.json is missing"),
    "resume of another model": (["--resume", "{t}/other"], "has n_embd 64, this run 128"),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "empty.json", "[]")
    write(tmp_path / "object.json", {"text": "一"})
    write(tmp_path / "number.json", ["一", "二", 17, "四"])
    write(tmp_path / "short.json", ["一二"])
    write(tmp_path / "text.json", "not JSON")
    (tmp_path / "sources").mkdir()
    for name in ("a", "b"):
        write(tmp_path / f"sources/{name}.json", ["一二"])
    own = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1}, "merges": []}
    write(tmp_path / "one_mark.json", {"version": "1.0", "added_tokens": [], "model": own})
    write(tmp_path / "config.json", {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 21128})
    write(tmp_path / "any_vocabulary.json", {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 128})
    write(tmp_path / "heads.json", {"n_layer": 2, "n_embd": 100, "n_head": 3, "n_positions": 64})
    model = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 3980}
    import torch

    saved = step_folder.save(tmp_path, 3, {"a": torch.zeros(1)}, {}, {"model": model})
    saved.rename(tmp_path / "other")
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_one_line_and_status_2(case: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, line = BAD[case]
    flags = ["--output-dir", "{t}/run", *flags]
    with pytest.raises(SystemExit) as stop:
        parse(*(f.replace("{t}", str(files)) for f in flags), cls=Parallel)
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("error: ")
    message = said.err.replace("invalid choice: '4'", "invalid choice: 4")  # newer Pythons put numbers in quotes, too
    assert line.replace("{t}", str(files)) in message
    assert not (files / "run").exists(), "nothing is written before all is checked"


def test_chapter_00_refuses_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--nproc", 2)
    assert "--nproc 2: 00_single is one process" in capsys.readouterr().err


def test_torch_is_not_loaded_before_settings_are_right() -> None:
    program = (
        "import sys, gpt2_chinese, gpt2_chinese.corpus, gpt2_chinese.tokens\n"
        "from gpt2_chinese.run.resolve import resolve\n"
        "from gpt2_chinese.settings import Settings\n"
        f"resolve(Settings.from_command_line({PROGRAM!r}, None, []))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANGS_S)
