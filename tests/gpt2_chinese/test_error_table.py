"""Each wrong input ends a program with status 2 and one line that names it and says what to do; nothing is written.

This file tests wrong files (WRONG_FILES), wrong flags and environment variables (WRONG_FLAGS), and commands other than the
chapters (WRONG_COMMANDS). test_settings.py tests flags of the contract, tests/chapters flags of single chapters, and
tests/chapters/test_evaluate.py those of the evaluation.

A line is given as a regular expression that must match somewhere in the message; some are cut to fit the width of this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_chinese import corpus as corpus_module
from gpt2_chinese import files as files_module
from gpt2_chinese.checkpoint.sealed_folder import seal
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import ROOT
from tests.gpt2_chinese.chapter_settings import settings_of
from tests.harness.handed_over import handing_over
from tests.limits import HANGS_S
from tests.mutations import in_time

SMALL = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
VOCAB = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"今天气很好我们去河边走了步，。0123456789"])


def folder_of(path: Path, *names: str) -> None:
    """A sealed folder with these files, each an empty JSON object."""
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    seal(path)


GOOD = json.dumps(["今天天气很好，我们去河边走了17步。"] * 100, ensure_ascii=False)


def tokenizer(**changed: object) -> str:
    own = {"type": "WordPiece", "unk_token": "[UNK]", "max_input_chars_per_word": 9, "continuing_subword_prefix": "##"}
    model = {**own, "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, **changed}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


# case: (content of the file x: bytes, text, or a function that makes x; the flag that names x; the line).
# The flag "vocab.json" means --vocab x.json.
WRONG_FILES: dict[str, tuple[bytes | str | Callable[[Path], object], str, str]] = {
    # -- a corpus
    "a pipe": (os.mkfifo, "train-data", r"cannot read corpus x: it is a pipe or a device; write .* to a file first"),
    "a circle of links": (lambda p: p.symlink_to(p), "train-data", r"cannot read corpus x: Too many levels of symbolic lin"),
    "a dangling link": (lambda p: p.symlink_to("gone"), "train-data", r"corpus x does not exist: give an array-JSON file"),
    "a folder of pipes": (
        lambda p: (p.mkdir(), os.mkfifo(p / "a.json")), "train-data", r"corpus folder x holds no \.json file: put array-JS"),
    "a folder of .txt": (
        lambda p: (p.mkdir(), (p / "a.txt").write_text("今")), "train-data", r"corpus folder x holds no \.json file: conv"),
    "one bad file of a folder": (
        lambda p: (p.mkdir(), (p / "a.json").write_text(GOOD), (p / "b.json").write_text('["今", 3]')),
        "train-data", r"x/b\.json: item 2 is no string: '3\]'; every item is one paragraph"),
    "GBK": ('["中文"]'.encode("gb18030"), "train-data", r"x is not UTF-8 text: save it as UTF-8"),
    "UTF-16": ('["中文"]'.encode("utf-16"), "train-data", r"x is not UTF-8 text: save it as UTF-8"),
    "comments above": ("// mine\n" + GOOD, "train-data", r"x is not a JSON array .* '// mine.*'; JSON has no comments: rem"),
    "comments inside": ('["今", // one\n"天"]', "train-data", r"x: item 2 is no string: '// one.*'; JSON has no comments"),
    "JSON lines": ('{"text": "今"}\n{"text": "天"}\n', "train-data", r"x is not a JSON array of strings: .*; convert it"),
    "strings as lines": ('"今"\n"天"\n', "train-data", r"x is not a JSON array of strings: .*; convert it firs"),
    "objects in an array": ('[{"text": "今"}]', "train-data", r"x: item 1 is no string: .*; convert it first with `bash"),
    "nested arrays": ('[["今"], ["天"]]', "train-data", r"x: item 1 is no string: .* every item is one paragraph in quotat"),
    "deep nesting": ("[" * 200_000, "train-data", r"x: item 1 is no string: .* every item is one paragraph in quotation ma"),
    "a number": ("[1e999]", "train-data", r"x: item 1 is no string: '1e999\]'; every item is one paragraph"),
    "NaN": ('["今", NaN]', "train-data", r"x: item 2 is no string: 'NaN\]'; every item"),
    "plain text": ("今天天气\n\n很好", "train-data", r"x is not a JSON array of strings: it begins with '今天天气.*; conv"),
    "no byte": (b"", "train-data", r"x is not a JSON array of strings: .*it is empty"),
    "blanks": (" \n\t", "train-data", r"x is not a JSON array of strings: .*it is empty"),
    "an archive": (b"PK\x03\x04\x14\0", "train-data", r"x is not a JSON array of strings: it begins with 'PK"),
    "half a character": ('["今", "\\ud83d"]', "train-data", r"x: item 2 has a \\ud800 to \\udfff alone, which is half a ch"),
    "a line break in an item": ('["今\n天"]', "train-data", r"x: item 1 is broken \(Invalid control character at\): '\"今"),
    "a bad escape": ('["今", "\\x"]', "train-data", r"x: item 2 is broken \(Invalid \\\\?escape\): "),
    "an item without end": ('["' + "今" * 100, "train-data", r"x: item 1 is broken \(Unterminated string starting at"),
    "a large item without end": ('["' + "今" * 90_000, "train-data", r"x: item 1 is longer than 5,000 char.* quotation mar"),
    "two arrays": ('["今"]["天"]', "train-data", r"x: something follows the array: '\[\"天\"\]'; a file holds one array"),
    "only empty items": ('["", ""]', "train-data", r"the corpus x is too small: 4 tokens do not fill one --batch-size"),
    "the same for validation": (os.mkfifo, "valid-data", r"cannot read corpus x: it is a pipe"),
    # -- a vocabulary
    "vocabulary: a pipe": (os.mkfifo, "vocab", r"cannot read vocabulary x: it is a pipe or a device"),
    "vocabulary: a circle": (lambda p: p.symlink_to(p), "vocab", r"cannot read vocabulary x: Too many levels"),
    "vocabulary: GBK": (VOCAB.encode("gb18030"), "vocab", r"cannot read vocabulary x: it is not UTF-8 text"),
    "vocabulary: weights": (b"\x80\x02}q\0" * 99, "vocab", r"cannot read vocabulary x: it is not UTF-8 text; .* give anoth"),
    "vocabulary: too large": ("今\n" * 400_000, "vocab", r"cannot read vocabulary x: it is larger than 1 MiB"),
    "vocabulary: empty": ("", "vocab", r"vocabulary x lacks \[UNK\]"),
    "vocabulary: empty folder": (Path.mkdir, "vocab", r"vocabulary folder x holds neither vocab\.txt nor tokenizer\.json"),
    "tokenizer: not JSON": ("not JSON", "vocab.json", r"x\.json is not a tokenizer\.json of the tokenizers library"),
    "tokenizer: deep": ("[" * 200_000, "vocab.json", r"x\.json is not a tokenizer\.json"),
    "tokenizer: negative id": (tokenizer(vocab={"a": -1}), "vocab.json", r"x\.json is not a tokenizer\.json"),
    "tokenizer: huge id": (tokenizer(vocab={"a": 10**12}), "vocab.json", r"x\.json is not a tokenizer\.json"),
    "tokenizer: id is text": (tokenizer(vocab={"a": "1"}), "vocab.json", r"x\.json is not a tokenizer\.json"),
    "tokenizer: unknown type": (tokenizer(type="None such"), "vocab.json", r"x\.json is not a tokenizer\.json of the tok"),
    "tokenizer: no marks": (tokenizer(vocab={"[UNK]": 0}), "vocab.json", r"none of \[CLS\]"),
    # -- a model configuration
    "config: a pipe": (os.mkfifo, "model-config", r"cannot read --model-config x: it is a pipe or a device"),
    "config: a folder without": (Path.mkdir, "model-config", r"cannot read the model configuration x/config\.json: it does"),
    "config: weights instead": (b"\x93NUMPY\xff" * 9, "model-config", r"configuration x: it is not UTF-8 text; .* another"),
    "config: comments": ('{"n_layer": 2, // few\n}', "model-config", r"configuration x: not valid JSON: .*; JSON has no co"),
    "config: deep": ("[" * 200_000, "model-config", r"configuration x: its JSON is nested too deeply"),
    "config: half a character": (
        json.dumps(SMALL | {"note": "\ud800"}), "model-config", r"configuration x: it has a \\ud800 to \\udfff alone"),
    "config: an array": ("[1]", "model-config", r"x is not a JSON object: give a GPT-2 config\.json"),
    "config: not of a model": ('{"seq_len": 3}', "model-config", r"x lacks n_layer, n_embd, n_head, n_positions: give a"),
    "config: NaN": (json.dumps(SMALL | {"layer_norm_epsilon": float("nan")}), "model-config", r"x: layer_norm_epsilon must"),
    "config: number of 400 digits": (
        json.dumps(SMALL | {"initializer_range": 10**400}), "model-config", r"x: initializer_range must"),
    "config: too many layers": (
        json.dumps(SMALL | {"n_layer": 2**31}), "model-config", r"x: n_layer 2147483648 is above 1,000, which"),
    "config: text for a number": (
        json.dumps(SMALL | {"n_head": "2"}), "model-config", r"x: n_head must be a whole number .* not '2'"),
    "config: true for a number": (
        json.dumps(SMALL | {"resid_pdrop": True}), "model-config", r"x: resid_pdrop must be at least 0 and be"),
    "config: list for bos_token_id": (
        json.dumps(SMALL | {"bos_token_id": [1]}), "model-config", r"x: bos_token_id must be a whole number or"),
    "config: another model": (json.dumps(SMALL | {"model_type": "bert"}), "model-config", r"x: model_type is 'bert', this"),
    # -- a checkpoint
    "resume: a pipe": (os.mkfifo, "resume", r"cannot read --resume x: it is a pipe or a device"),
    "resume: a file": ("", "resume", r"--resume x is no checkpoint: give auto, never, or a folder step_NNNNNN"),
    "resume: a folder": (Path.mkdir, "resume", r"--resume x cannot be used: manifest\.json is missing .*; give a whole fol"),
    "resume: weights without moments": (
        lambda p: folder_of(p, "config.json", "run.json", "model.safetensors"), "resume", r"--resume x holds weights, but"),
    "resume: no step": (
        lambda p: folder_of(p, "config.json", "state.json", "model.safetensors", "optimizer.safetensors"),
        "resume", r"--resume x cannot be used: state\.json names no step; give"),
    # -- the output folder
    "output: a pipe": (os.mkfifo, "output-dir", r"--output-dir x cannot be written: .*x is a file"),
    "output: a circle": (lambda p: p.symlink_to(p), "output-dir", r"--output-dir x cannot be written: Too many levels of s"),
    "output: a dangling link": (lambda p: p.symlink_to("gone"), "output-dir", r"--output-dir x cannot be written: .*link t"),
    # -- pstar's configuration, in chapter 07
    "engine: a pipe": (os.mkfifo, "config", r"--config x: cannot be read: it is not a file"),
    "engine: not JSON": ("{'a': 1}", "config", r"--config x: not valid JSON: Expecting property name"),
    "engine: deep": ("[" * 200_000, "config", r"--config x: not valid JSON: nested too deeply"),
    "engine: unknown key": ('{"near_budjet": 1}', "config", r"--config x: unknown key 'near_budjet'; did you mean 'near_bu"),
    "engine: NaN": ('{"gradient_clipping": NaN}', "config", r"--config x: 'gradient_clipping' must be a finite number .* f"),
    "engine: out of range": ('{"gradient_clipping": -1}', "config", r"--config x: gradient_clipping is -1\.0; give 0 \(off"),
}  # fmt: skip

# case: (flags, environment variables, the line).
WRONG_FLAGS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "seq-len of 20 digits": (["--seq-len", "9" * 20], {}, r"--seq-len 9{20} is too large: give at most 9223372036854775807"),
    "seed of more than 64 bits": (["--seed", "9" * 20], {}, r"--seed 9{20} is too large: give at most"),
    "max-steps of 5000 digits": (["--max-steps", "9" * 5000], {}, r"--max-steps: invalid int value: '9+ \[\.\.\.\] .*"),
    "infinite lr": (["--lr", "1e999"], {}, r"--lr must be above 0, not inf: give a finite number"),
    "infinite decay": (["--weight-decay", "inf"], {}, r"--weight-decay must be at least 0, not inf"),
    "epochs of too many steps to count": (["--epochs", "1e308"], {}, r"--epochs 1e\+308 is too large"),
    "timeout of 20 digits": (["--timeout-s", "9" * 20], {}, r"--timeout-s 9{20} is too large: give at most"),
    "hang-after below zero": (["--hang-after", "-1"], {}, r"--hang-after must be at least 0 and at most 10000000, not -1"),
    "an infinite flag of a chapter": (["--slow-worker-s", "inf"], {}, r"--slow-worker-s is inf: give a finite number"),
    "empty name": (["--train-data", ""], {}, r"--train-data is empty: give a value, or leave the flag out"),
    "a blank": (["--vocab", " "], {}, r"--vocab is empty: give a value"),
    "a quote and a line break": (["--train-data", "a\"b'\nc"], {}, r"corpus a\"b' c does not exist: give"),
    "an escape sequence": (["--train-data", "a\x1b[2J"], {}, r"corpus a\\x1b\[2J does not exist"),
    "a name that is not UTF-8": (["--train-data", "a\udcff"], {}, r"corpus a\\udcff does not exist"),
    "output not UTF-8": (["--output-dir", "a\udcff"], {}, r"--output-dir a\\udcff cannot be written: .* not UTF-8"),
    "name too long": (["--train-data", "x" * 300], {}, r"cannot read corpus x+: File name too long"),
    "output name too long": (["--output-dir", "x" * 300], {}, r"--output-dir x+ cannot be written: File name too long"),
    "path of 6000 characters": (
        ["--model-config", "x/" * 3000], {}, r"cannot read --model-config .* \[\.\.\.\] .*: File name too lo"),
    "a null character": (["--vocab", "a\0b"], {}, r"cannot read vocabulary a\\x00b: no path can hold a null character"),
    "endless device": (["--vocab", "/dev/zero"], {}, r"cannot read vocabulary /dev/zero: it is a pipe or a device"),
    "empty device": (["--train-data", "/dev/null"], {}, r"cannot read corpus /dev/null: it is a pipe or a device"),
    "WORLD_SIZE is a word": ([], {"WORLD_SIZE": "two"}, r"has WORLD_SIZE='two', which .* at least 1: unset WORLD_SIZE"),
    "WORLD_SIZE is empty": ([], {"WORLD_SIZE": ""}, r"has WORLD_SIZE='', which a launcher sets to .*: unset WORLD_SIZE"),
    "WORLD_SIZE in full width": ([], {"WORLD_SIZE": "２"}, r"has WORLD_SIZE='２', .*: unset WORLD_SIZE"),
    "WORLD_SIZE of zero": ([], {"WORLD_SIZE": "0"}, r"has WORLD_SIZE='0', .* at least 1: unset WORLD_SIZE"),
    "RANK is negative": ([], {"RANK": "-1", "WORLD_SIZE": "2"}, r"has RANK='-1', .* at least 0: unset RANK"),
    "RANK alone": ([], {"RANK": "1"}, r"has RANK without WORLD_SIZE: unset RANK, or use a launcher that sets both"),
    "RANK too high": ([], {"RANK": "2", "WORLD_SIZE": "2"}, r"has RANK=2, which must be below WORLD_SIZE=2: unset both"),
    "LOCAL_RANK is a word": ([], {"LOCAL_RANK": "gpu0"}, r"has LOCAL_RANK='gpu0', .*: unset LOCAL_RANK"),
    "precision of accelerate": (
        [], {"ACCELERATE_MIXED_PRECISION": "bf16"}, r"accelerate launch asks for mixed precision bf16, .* give --precision"),
    "FSDP of accelerate": (
        [], {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true"}, r"launch --use_fsdp: .* give --multi_gpu"),
    "one process of accelerate": (
        [], {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
        r"has started one process, .* the chapter --nproc"),
    "cache in a file": ([], {"GPT2_CHINESE_CACHE": "/dev/null"}, r"no writable folder for the tokens of \S+: set GPT2_CHIN"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a good corpus, vocabulary and configuration; small files already exceed the limits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus_module, "_LARGEST_ITEM", 5000)
    monkeypatch.setattr(corpus_module, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(files_module, "LARGEST_TEXT", 1 << 20)
    Path("corpus.json").write_text(GOOD, encoding="utf-8")
    Path("vocab.txt").write_text(VOCAB, encoding="utf-8")
    Path("config.json").write_text(json.dumps(SMALL))
    return tmp_path


def entries(folder: Path) -> list[tuple[str, int, int]]:
    """(path, size, time of the last change) of everything below a folder."""
    status = ((path, path.lstat()) for path in sorted(folder.rglob("*")))
    return [(str(path), found.st_size, found.st_mtime_ns) for path, found in status]


def children() -> list[str]:
    """The processes that this one has started."""
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile: list them again
            return [text for task in Path("/proc/self/task").iterdir() for text in (task / "children").read_text().split()]


def refuses(
    folder: Path, flags: list[str], line: str, capfd: pytest.CaptureFixture[str], chapter: str = "00_single"
) -> None:
    """Runs the program's settings, which must end with status 2 and a line that matches; no file and no process is made."""
    good = {"--train-data": "corpus.json", "--valid-data": "corpus.json", "--vocab": "vocab.txt",
            "--model-config": "config.json", "--output-dir": "run"}  # fmt: skip
    words = [word for flag, value in good.items() if flag not in flags for word in (flag, value)]
    before, started = entries(folder), children()
    program = str(ROOT / "chapters" / chapter / "train.py")
    with in_time(), pytest.raises(SystemExit) as stop:
        resolve(settings_of(chapter).from_command_line(program, None, [*words, *flags]))
    printed = capfd.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert re.fullmatch(rf"error: .*{line}.*\n", printed.err), printed.err
    assert printed.err[:-1].isprintable() and len(printed.err) < 2100
    assert entries(folder) == before and children() == started


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_ends_the_program_with_one_line(case: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, flag, line = WRONG_FILES[case]
    flag, dot, suffix = flag.partition(".")
    path = Path("x" + dot + suffix)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    refuses(folder, [f"--{flag}", str(path)], line, capfd, "07_patrickstar" if flag == "config" else "00_single")


@pytest.mark.parametrize("case", WRONG_FLAGS)
def test_a_wrong_flag_or_variable_ends_the_program_with_one_line(
    case: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, variables, line = WRONG_FLAGS[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # 00 does not have these flags
    chapters = {"--timeout-s": "02_ddp", "--hang-after": "02_ddp", "--slow-worker-s": "01_parameter_server"}
    chapter = chapters.get(flags[0], "00_single") if flags else "02_ddp"
    refuses(folder, flags, line, capfd, chapter)


def test_unusual_but_valid_inputs_are_accepted(folder: Path) -> None:
    """A byte order mark, carriage returns, a link to a file, digits in full width: no reason to refuse."""
    Path("marked.json").write_bytes(b"\xef\xbb\xbf" + GOOD.replace(", ", ",\r\n").encode())
    Path("link.json").symlink_to("marked.json")
    Path("vocab-crlf.txt").write_bytes(b"\xef\xbb\xbf" + VOCAB.replace("\n", "\r\n").encode())
    Path("marked-config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    settings = resolve(settings_of("00_single").from_command_line(
        str(ROOT / "chapters/00_single/train.py"), None,
        ["--train-data", "link.json", "--valid-data", "corpus.json", "--vocab", "vocab-crlf.txt",
         "--model-config", "marked-config.json", "--output-dir", "a run's \"folder\"", "--max-steps", "１２"],
    ))  # fmt: skip
    assert settings.max_steps == 12
    assert settings.train_tokens.ids.tolist() == settings.valid_tokens.ids.tolist()


WRONG_COMMANDS = {  # programs other than the chapters: a command line and its one line
    "tokens without a corpus": ("-m gpt2_chinese.tokens", "the following arguments are required: --corpus"),
    "tokens of nothing": ("-m gpt2_chinese.tokens --corpus none.json", "none.json"),
    "a profile that is none": ("-m gpt2_chinese.tokens --corpus corpus.json --vocab-profile x",
                               "--vocab-profile: invalid choice: 'x'"),
    "hangs: nothing there": ("-m gpt2_chinese.hangs none", "none is missing: give the output folder of a run"),
    "hangs: none reported": ("-m gpt2_chinese.hangs .", ". has no hang-rank*.json: no hang was reported there"),
    "vocabulary: no command": ("-m gpt2_chinese.vocabulary", "the following arguments are required: command"),
    "vocabulary: no number": ("-m gpt2_chinese.vocabulary train --corpus corpus.json --size x --output v.txt",
                              "--size: invalid int value: 'x'"),
    "weights: nothing to export": ("-m gpt2_chinese.weights export none --output out", "none"),
    "weights: no folder": ("-m gpt2_chinese.weights export none", "the following arguments are required: --output"),
    "evaluate: no model": ("-m gpt2_chinese.evaluate", "the following arguments are required: --model"),
    "generate: no number": ("-m gpt2_chinese.generate --num x", "--num: invalid int value: 'x'"),
    "convert: no output": ("-m gpt2_chinese.corpora convert corpus.json", "the following arguments are required: --output"),
    "pstar: no command": ("-m pstar.cli", "the following arguments are required: command"),
    "pstar: an unknown one": ("-m pstar.cli fly", "invalid choice: 'fly'"),
    "pstar: no file": ("-m pstar.cli config none.json", "none.json"),
    "split: nothing there": (f"{ROOT}/data/split.py none.json --train a --valid b", "cannot read none.json: No such file"),
    "split: no JSON": (f"{ROOT}/data/split.py vocab.txt --train a --valid b", "vocab.txt: item 1 is no string"),
    "split: not UTF-8": (f"{ROOT}/data/split.py {sys.executable} --train a --valid b", "is not UTF-8 text: save it as"),
    "split: one folder": (f"{ROOT}/data/split.py corpus.json --train a --valid ./a", "--train and --valid are both a"),
    "split: over itself": (f"{ROOT}/data/split.py corpus.json --train . --valid b", "overwritten by its own part"),
    "split: one name": (f"{ROOT}/data/split.py corpus.json ./corpus.json --train a --valid b", "both become a/corpus.json"),
    "split: too much": (f"{ROOT}/data/split.py corpus.json --train a --valid b --percent 101", "from 0 to 100, not 101"),
}  # fmt: skip


def test_split_names_the_item_that_is_no_text_and_writes_no_file(folder: Path) -> None:
    (folder / "half.json").write_text(r'["whole", "\ud83d"]')
    command = [sys.executable, str(ROOT / "data" / "split.py"), "corpus.json", "half.json", "--train", "a", "--valid", "b"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS_S)
    line = "error: half.json: item 2 has a \\ud800 to \\udfff alone, which is half a character: '\\ud83d'\n"
    assert (done.returncode, done.stderr) == (2, line) and not (folder / "a").exists()


@pytest.mark.parametrize("case", WRONG_COMMANDS)
def test_a_wrong_command_line_ends_other_programs_with_one_line(case: str, folder: Path) -> None:
    command, line = WRONG_COMMANDS[case]
    environment = handing_over(os.environ | {"PYTHONPATH": str(ROOT)})
    done = subprocess.run([sys.executable, *command.split()], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=HANGS_S)  # fmt: skip
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    assert re.fullmatch(rf"error: .*{re.escape(line)}.*\n", done.stderr), done.stderr
