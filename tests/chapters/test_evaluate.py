"""python -m gpt2_chinese.evaluate: the numbers of the run itself and of Hugging Face, and breakdowns that add up."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.evaluate.__main__ import main
from gpt2_chinese.evaluate.perplexity import position_buckets, short_names
from gpt2_chinese.evaluate.scoring import CLASS_ENDS, Windows, batches
from tests.chapters.inside import train
from tests.chapters.program import ROOT, Chapter, environment, fork

STEPS = ("--max-steps", 12, "--save-every", 6, "--eval-every", 6, "--lr", "1e-2")
GENRES = [ROOT / "data" / "valid" / name for name in ("comments.json", "news.json")]
VOCAB = ROOT / "cache" / "vocab.txt"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two of the shipped genres, and a file without an item. Its name is in GBK, as from a Chinese Windows."""
    folder = tmp_path_factory.mktemp("corpus") / os.fsdecode("语料".encode("gbk"))
    folder.mkdir()
    for file in GENRES:
        shutil.copy(file, folder)
    (folder / "empty.json").write_text("[]")
    return folder


@pytest.fixture(scope="module")
def runs(ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chapter]:
    """A run whose checkpoints are whole, and one whose ranks write parts."""
    made = {}
    for name in ("00_single", "07_patrickstar"):
        made[name] = Chapter(name, tmp_path_factory.mktemp(name))
        train(ranks, 1, made[name], *STEPS, "--valid-data", corpus)
    return made


def evaluated(tmp_path: Path, model: Path, *flags: object) -> dict:
    """What the command writes with --json."""
    main(["--model", str(model), "--json", str(tmp_path / "found.json"), *map(str, flags)])
    return json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name, where, step", [
    ("00_single", "", 12),
    ("00_single", "final/model.safetensors", 12),
    ("00_single", "checkpoints/step_000006", 6),
    ("07_patrickstar", "final", 12),
    ("07_patrickstar", "checkpoints/step_000006", 6),
])  # fmt: skip
def test_its_numbers_are_the_runs_own(runs, corpus: Path, tmp_path: Path, name: str, where: str, step: int) -> None:
    (row,) = [row for row in runs[name].metrics() if row["step"] == step]
    for size in (1, 100):
        found = evaluated(tmp_path, runs[name].output / where, "--corpus", corpus, "--batch-size", size)
        assert (found["seq_len"], found["stride"]) == (32, 32)
        assert found["all"]["loss"] == pytest.approx(row["valid_loss"], abs=1e-6)
        assert found["all"]["perplexity"] == pytest.approx(row["valid_ppl"], rel=1e-6)
        assert found["all"]["accuracy"] == row["valid_acc"]


def by_hand(folder: Path, ids: np.ndarray, seq_len: int, stride: int) -> list[tuple[int, int, float, int]]:
    """(index of the target, position, loss, rank of the target) of each token, by transformers, a window at a time."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    seen, rows = 0, []
    for start in range(0, len(ids), stride):
        window = torch.from_numpy(ids[start : start + seq_len + 1].astype(np.int64))
        if start + len(window) - 1 <= seen:
            break
        logits = model(window[None, :-1]).logits[0].detach()
        losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
        ranks = (logits > logits.gather(1, window[1:, None])).sum(1)
        for position, (loss, rank) in enumerate(zip(losses.tolist(), ranks.tolist(), strict=True)):
            if start + position + 1 > seen:
                rows.append((start + position + 1, position, loss, rank))
        seen = start + len(window) - 1
    return rows


@pytest.mark.parametrize("seq_len, stride", [(32, 32), (32, 11), (20, 20)])
def test_hugging_face_computes_the_same_loss(runs, corpus: Path, tmp_path: Path, seq_len: int, stride: int) -> None:
    final = runs["00_single"].output / "final"
    flags = ("--seq-len", seq_len, "--stride", stride, "--by", "genre", "position", "frequency")
    found = evaluated(tmp_path, final, "--corpus", corpus, *flags)
    ids = load_tokens(corpus, VOCAB).ids
    rows = by_hand(final, ids, seq_len, stride)
    assert [index for index, *_ in rows] == list(range(1, len(ids))), "each token once"
    edge = len(load_tokens(GENRES[0], VOCAB))
    order = np.argsort(-np.bincount(ids, minlength=3980), kind="stable")
    rank_of = {int(i): rank for rank, i in enumerate(order)}

    def same(entry: dict, some: list) -> None:
        assert entry["tokens"] == len(some) > 0
        assert entry["loss"] == pytest.approx(np.mean([loss for _, _, loss, _ in some]), abs=1e-5)
        assert entry["accuracy"] == pytest.approx(np.mean([rank < 1 for *_, rank in some]), abs=2 / len(some))
        assert entry["accuracy_top5"] == pytest.approx(np.mean([rank < 5 for *_, rank in some]), abs=2 / len(some))

    same(found["all"], rows)
    assert list(found["by_genre"]) == ["comments", "news"]
    same(found["by_genre"]["comments"], [r for r in rows if r[0] < edge])
    same(found["by_genre"]["news"], [r for r in rows if r[0] >= edge])
    for name, entry in found["by_position"].items():
        first, _, last = name.partition("-")
        same(entry, [r for r in rows if int(first) <= r[1] <= int(last or first)])
    for end, entry in zip([*CLASS_ENDS, 9999], found["by_frequency"].values(), strict=True):
        below = max((e for e in CLASS_ENDS if e < end), default=0)
        same(entry, [r for r in rows if below <= rank_of[int(ids[r[0]])] < end])
    for kind in ("genre", "position", "frequency"):
        assert sum(entry["tokens"] for entry in found[f"by_{kind}"].values()) == found["all"]["tokens"]


def test_bits_per_character_count_the_characters_of_the_text(runs, corpus: Path, tmp_path: Path) -> None:
    found = evaluated(tmp_path, runs["00_single"].output, "--corpus", *GENRES, "--by", "genre")
    for file, entry in [(corpus, found["all"]), *zip(GENRES, found["by_genre"].values(), strict=True)]:
        characters = sum(map(len, read_paragraphs(file)))
        assert entry["characters"] == characters
        bits = entry["loss"] * entry["tokens"] / math.log(2)
        assert entry["bits_per_character"] == pytest.approx(bits / characters)
    assert found["all"]["tokens"] == sum(entry["tokens"] for entry in found["by_genre"].values())
    two = [load_tokens(file, VOCAB).ids for file in GENRES]
    assert found["all"]["tokens"] == len(two[0]) + len(two[1]) - 2, "the first token of each PATH has none before it"


def test_half_precision_is_near(runs, corpus: Path, tmp_path: Path) -> None:
    losses = [
        evaluated(tmp_path, runs["00_single"].output, "--corpus", GENRES[0], "--precision", p)["all"]["loss"]
        for p in ("fp32", "bf16")
    ]
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_windows_count_each_target_once_with_all_the_context_there_is() -> None:
    for num in (2, 3, 8, 9, 10, 40):
        ids = np.arange(num, dtype=np.uint16)
        for seq_len in (1, 2, 7, 8):
            for stride in range(1, seq_len + 1):
                windows = Windows.of(num, seq_len, stride)
                seen = []
                for inputs, targets, index in batches(ids, windows, seq_len, 3):
                    for row, column in (targets >= 0).nonzero().tolist():
                        assert inputs[row, column] + 1 == targets[row, column] == index[row, column]
                        seen.append((int(targets[row, column]), column))
                assert [target for target, _ in seen] == list(range(1, num))
                assert all(column >= min(target - 1, seq_len - stride) for target, column in seen)


def test_folders_add_up_their_files(runs, corpus: Path, tmp_path: Path) -> None:
    flags = ("--corpus", corpus, ROOT / "data" / "valid" / "wiki.json", "--by", "genre", "folder")
    found = evaluated(tmp_path, runs["00_single"].output, *flags)
    assert list(found["by_genre"]) == ["comments", "news", "wiki"]
    assert list(found["by_folder"]) == [corpus.name, "valid"] and found["by_folder"]["valid"] == found["by_genre"]["wiki"]
    both = [found["by_genre"][name] for name in ("comments", "news")]
    tokens = sum(row["tokens"] for row in both)
    whole = found["by_folder"][corpus.name]
    assert whole["tokens"] == tokens and whole["characters"] == sum(row["characters"] for row in both)
    assert whole["loss"] == pytest.approx(sum(row["loss"] * row["tokens"] for row in both) / tokens)


FEW = ("--corpus", GENRES[0], "--choices", "--limit", 5, "--samples", 2, "--length", 12)


@pytest.fixture(scope="module")
def side_by_side(runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, Path]:
    """What the command found about two models, what it printed, and its folder of TensorBoard."""
    folder = tmp_path_factory.mktemp("several")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        models = [runs["00_single"].output, runs["00_single"].output / "checkpoints" / "step_000006"]
        main(["--model", *map(str, models), "--json", str(folder / "found.json"), "--tensorboard", str(folder / "board"),
              "--by", "genre", *map(str, FEW)])  # fmt: skip
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))["models"], said.getvalue(), folder / "board"


def test_several_models_are_compared_in_one_table(side_by_side, runs, tmp_path: Path) -> None:
    founds, said, _ = side_by_side
    assert list(founds) == ["run", "step_000006"]
    (head, *lines) = [line.split() for line in said.splitlines() if line][1:5]
    assert head == ["loss", "perplexity", "bits/char", "top-1", "cloze", "inference", "reading", "distinct-1", "distinct-2",
                    "distinct-3", "repetition-4"]  # fmt: skip
    for line, (name, found) in zip(lines, founds.items(), strict=False):
        numbers = [found["choices"][one]["accuracy"] for one in ("cloze", "inference", "reading")]
        assert line[:2] == [name, f"{found['all']['loss']:.4f}"] and line[5:8] == [f"{number:.1%}" for number in numbers]
    assert lines[2] == ["guessing", "25.0%", "33.3%", "25.0%"]
    assert re.search(r"^perplexity by genre +run +step_000006$", said, re.MULTILINE) and "vocabularies differ" not in said
    alone = evaluated(tmp_path, runs["00_single"].output / "checkpoints" / "step_000006", "--by", "genre", *FEW)
    assert alone == founds["step_000006"], "a model's numbers do not depend on the others"


def test_tensorboard_has_a_run_for_each_model(side_by_side) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    founds, _, board = side_by_side
    for name, found in founds.items():
        events = EventAccumulator(str(board / name))
        events.Reload()
        expected = {"all/loss": found["all"]["loss"], "choices/cloze/accuracy": found["choices"]["cloze"]["accuracy"],
                    "samples/distinct_2": found["samples"]["distinct_2"],
                    "by_genre/comments/perplexity": found["by_genre"]["comments"]["perplexity"]}  # fmt: skip
        for tag, value in expected.items():
            assert events.Scalars(f"evaluate/{tag}")[0].value == pytest.approx(value, rel=1e-6)  # TensorBoard keeps float32


def test_samples_are_those_of_generate(side_by_side, runs, capsys) -> None:
    from gpt2_chinese.evaluate.samples import variety
    from gpt2_chinese.generate.__main__ import main as generate
    from gpt2_chinese.run.run import PROMPTS

    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    generate(["--model", str(runs["00_single"].output), "--num", "2", "--length", "12", "--json", *prompts])
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    found = side_by_side[0]["run"]["samples"]
    assert found == variety(texts) | {"length": 12, "seed": 42} and found["texts"] == 6


def test_models_of_other_vocabularies_are_said_to_compare_by_characters_only(runs, tmp_path: Path, capsys) -> None:
    from gpt2_chinese.evaluate.report import NOT_COMPARABLE, print_several

    found = evaluated(tmp_path, runs["00_single"].output, "--corpus", GENRES[0])
    capsys.readouterr()
    print_several({"a": found, "b": found | {"vocabulary": "another"}})
    assert NOT_COMPARABLE in capsys.readouterr().out


def test_names_and_buckets() -> None:
    assert short_names([Path("a/b/x.json"), Path("a/c/x.json")]) == ["b/x", "c/x"]
    assert short_names([Path("a/x.json"), Path("a/y.json")]) == ["x", "y"]
    assert position_buckets(7) == [(0, 0), (1, 1), (2, 3), (4, 6)]


def test_the_command_prints_a_table_and_draws(runs, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "gpt2_chinese.evaluate", "--model", str(runs["00_single"].output)]
    said = fork([*command, "--corpus", str(corpus), "--by", "position", "--plot", str(tmp_path / "loss.png")])
    rows = {line.split("  ")[0] or line.split()[0]: line.split() for line in said.splitlines() if line}
    assert {"loss", "perplexity", "bits/char", "top-1", "top-5"} <= set(rows["loss"]), said
    row = runs["00_single"].metrics()[-1]
    assert rows["all"][1] == f"{row['valid_loss']:.4f}" and "16-31" in said and "by genre" not in said
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_a_plot_without_matplotlib_is_one_line_before_torch_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without:\n"
        "    def find_spec(name, *rest):\n"
        "        return None if name in ('torch', 'matplotlib') else PathFinder.find_spec(name, *rest)\n"
        "sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]\n"
        "from gpt2_chinese.evaluate.__main__ import main\n"
        f"main(['--model', {str(tmp_path)!r}, '--plot', 'x.png'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == (
        "error: --plot draws with matplotlib, which is not installed: pip install matplotlib, or leave --plot out\n"
    ), done.stderr


WRONG = {
    "no model": ([], r"required: --model"),
    "model missing": (["--model", "{t}/none"], r"--model \S+/none does not exist: give a run"),
    "model empty": (["--model", "{t}/folder"], r"no trained model in \S+/folder: give a run"),
    "corpus missing": (["--corpus", "{t}/none"], r"corpus \S+/none does not exist: give an array-JSON"),
    "corpus empty": (["--corpus", "{t}/empty.json"], r"corpus \S+/empty.json is empty"),
    "vocab of another model": (["--vocab", "{t}/vocab.txt"], r"vocab.txt has 3 entries, the model in \S+ 3980"),
    "kind": (["--by", "colour"], r"--by: invalid choice: 'colour'"),
    "seq-len zero": (["--seq-len", "0"], r"--seq-len must be at least 1, not 0"),
    "seq-len above": (["--seq-len", "99999999999999999999"], r"--seq-len 9+ is above the context .* n_positions 32"),
    "stride above": (["--stride", "33"], r"--stride 33 is above the windows' length, --seq-len 32"),
    "batch": (["--batch-size", "-1"], r"--batch-size must be at least 1, not -1"),
    "number": (["--batch-size", "1e999"], r"--batch-size: invalid int value: '1e999'"),
    "json in no folder": (["--json", "{t}/none/x.json"], r"--json \S+ cannot be written"),
    "json is a folder": (["--json", "{t}/folder"], r"--json \S+ cannot be written"),
    "broken weights": (["--model", "{t}/nan"], r"the loss of \S+/nan is nan: its weights are broken, or overflow in fp32"),
    "twice": (["--model", "{t}", "{t}"], r"--model names the same model twice"),
    "choices missing": (["--choices", "{t}/none"], r"--choices \S+/none does not exist: give a file in the form of CHID"),
    "choices malformed": (["--choices", "{t}/bad.json"], r"bad\.json, line 2: the answer of #idiom# is 9: give a number"),
    "limit": (["--limit", "3"], r"--limit is for --choices: give --choices, too"),
    "limit zero": (["--choices", "--limit", "0"], r"--limit must be at least 1, not 0"),
    "prompt": (["--prompt", "a"], r"--prompt is for --samples: give --samples N, too"),
    "samples": (["--samples", "-1"], r"--samples must be at least 0, not -1"),
    "too many samples": (["--samples", "999999999999"], r"--samples must be at most 1000000"),
    "tensorboard": (["--tensorboard", "{t}/empty.json/x"], r"--tensorboard \S+ cannot be written"),
    "no GPU": (["--device", "cuda"], r"--device cuda: this machine has no GPU that torch can use; give --device cpu"),
}


@pytest.fixture
def files(runs, tmp_path: Path) -> Path:
    from safetensors.torch import load_file, save_file

    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[MASK]\n")
    item = '{"content": "a#idiom#", "candidates": ["b", "c"], "answer": %d}\n'
    (tmp_path / "bad.json").write_text(item % 1 + item % 9)
    shutil.copytree(runs["00_single"].output / "final", tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["transformer.ln_f.weight"][0] = math.nan
    save_file(weights, tmp_path / "nan" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_one_line(runs, files: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, line = WRONG[case]
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    given = ["--corpus", str(GENRES[0])] + (["--model", str(runs["00_single"].output)] if case != "no model" else [])
    with pytest.raises(SystemExit) as stop:
        main([*given, *(flag.replace("{t}", str(files)) for flag in flags)])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == ""
    assert re.fullmatch(rf"error: .*{line}.*\n", said.err), said.err
