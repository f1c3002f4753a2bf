"""No value of any flag of any chapter ends in a traceback: it is taken, or refused in one line with status 2.

The settings are resolved in this process, as train.py does before it loads torch; no model is built, nothing is trained.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import MOST_SEED, Settings
from pstar.cli import main as pstar
from tests.gpt2_chinese.chapter_settings import CHAPTERS, ROOT, settings_of
from tests.gpt2_chinese.test_error_table import GOOD, SMALL, VOCAB, entries
from tests.limits import HANGS_S

VALUES = ("999999999999", "9" * 25, "9" * 5000, "-1", "-" + "9" * 25, "nan", "inf", "-inf", "1e308", "1e-320", "", " ",
          "--", "0", "-0", "0x10", "1.5", "２", "\0", "/proc/x", "/dev/null", "corpus.json/x", "none", "a\nb",
          "\udcd7")  # fmt: skip
FEW = ("9" * 25, "--", "nan", "")  # of flags that several chapters share, in the quick command
PLAN_FLAGS = ("--model", "--trainable", "--machine", "--gpus", "--gpu-memory", "--host-memory", "--disk", "--batch",
              "--seq-len", "--micro-steps", "--precision", "--state-bits", "--frozen-bits", "--chunk-size")  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a good corpus, vocabulary and configuration."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.json").write_text(GOOD, encoding="utf-8")
    Path("vocab.txt").write_text(VOCAB, encoding="utf-8")
    Path("config.json").write_text(json.dumps(SMALL))
    return tmp_path


def judged(chapter: str, flag: str, value: str, capfd: pytest.CaptureFixture[str]) -> Settings | None:
    """The settings with this value, or None where it is refused; asserts that this is one line with status 2."""
    good = {"--train-data": "corpus.json", "--valid-data": "corpus.json", "--vocab": "vocab.txt",
            "--model-config": "config.json", "--output-dir": "run"}  # fmt: skip
    if chapter == "08_param_efficient" and flag not in ("--base-dir", "--base-steps"):  # else it would train a base
        good |= {"--init-from": "random", "--method": "full", "--kind": "all"}
    words = [word for name, text in good.items() if name != flag for word in (name, text)]
    program = str(ROOT / "chapters" / chapter / "train.py")
    try:
        return resolve(settings_of(chapter).from_command_line(program, None, [*words, f"{flag}={value}"]))
    except SystemExit as stop:
        said = capfd.readouterr().err
        assert stop.code == 2 and said.startswith("error: ") and said.count("\n") == 1, (flag, value, said)
        return None


def cases(own: bool) -> list[tuple[str, str]]:
    """(chapter, flag): the flags of chapter 00 and those that a chapter adds, or all others."""
    found = []
    for chapter in CHAPTERS:
        for name in settings_of(chapter).flags():
            if (chapter == "00_single" or name not in Settings.flags()) == own:
                found.append((chapter, "--" + name.replace("_", "-")))
    return found


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_no_value_of_a_flag_ends_in_a_traceback(chapter: str, folder: Path, capfd, monkeypatch) -> None:
    refused = taken = 0
    before = entries(folder)
    for _, flag in (case for case in cases(own=True) if case[0] == chapter):
        few = FEW if flag in ("--near-budget", "--prefetch", "--profile", "--disk-path") else VALUES
        for value in few:  # chapter 07 lays out its chunks for each value that it takes: 30 ms
            monkeypatch.setattr("gpt2_chinese.run.resolve.check_initial", lambda *_: None)
            if judged(chapter, flag, value, capfd) is None:
                refused += 1
            else:
                taken += 1
    assert refused > taken > 0, "most of these values are wrong, and not all of them"
    assert entries(folder) == before, "nothing is written"


@pytest.mark.deep
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_no_value_of_a_shared_flag_ends_in_a_traceback(chapter: str, folder: Path, capfd) -> None:
    for _, flag in (case for case in cases(own=False) if case[0] == chapter):
        for value in VALUES:
            judged(chapter, flag, value, capfd)


def test_the_largest_seed_is_one_that_torch_takes_in_every_step(folder: Path, capfd) -> None:
    from gpt2_chinese.run.run import seed_step

    assert judged("00_single", "--seed", str(MOST_SEED + 1), capfd) is None
    assert judged("00_single", "--seed", str(MOST_SEED), capfd).seed == MOST_SEED
    seed_step(MOST_SEED, 10**15, 10**6)  # torch raises above 64 bits


@pytest.mark.parametrize("flag", PLAN_FLAGS)
def test_no_value_of_a_flag_of_the_plan_ends_in_a_traceback(flag: str, capfd) -> None:
    for value in (*VALUES, "9" * 400, "1e400GiB", "10x1000000000000", "10x" + "9" * 13, "400%"):
        try:
            status = pstar(["plan", f"{flag}={value}"])
        except SystemExit as stop:
            status = stop.code
        said = capfd.readouterr().err
        assert status in (0, 1) or (status == 2 and said.startswith("error: ") and said.count("\n") == 1), (value, said)


# ---- places that cannot be written

UNWRITABLE = ("/proc/x", "/proc/self/x/y", "corpus.json", "corpus.json/x", "{t}/read-only/x")
WRITERS = {  # a program, its flag for what it writes, and whether that is a file
    "chapter": ([f"{ROOT}/chapters/00_single/train.py"], "--output-dir", False),
    "timeline": ([f"{ROOT}/chapters/02_ddp/train.py"], "--timeline", True),
    "profile": ([f"{ROOT}/chapters/07_patrickstar/train.py"], "--profile", True),
    "generate": (["-m", "gpt2_chinese.generate", "--model", "none"], "--output", True),
    "evaluate": (["-m", "gpt2_chinese.evaluate", "--model", "none"], "--json", True),
    "vocabulary": (["-m", "gpt2_chinese.vocabulary", "train", "--corpus", "corpus.json"], "--output", True),
    "weights": (["-m", "gpt2_chinese.weights", "export", "none"], "--output", False),
    "corpora": (["-m", "gpt2_chinese.corpora", "convert", "corpus.json"], "--output", False),
    "compress": ([f"{ROOT}/chapters/08_param_efficient/compress.py", "--model", "none"], "--gguf", True),
    "split": ([f"{ROOT}/data/split.py", "corpus.json", "--valid", "v"], "--train", False),
}

# One process runs all programs: each is a run of its file under the name __main__, up to its SystemExit.
RUNS_ALL = """
import contextlib, io, json, runpy, sys
for words in json.load(sys.stdin):
    said, path = io.StringIO(), list(sys.path)
    status = "none"
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                sys.path.insert(0, words[0].rpartition("/")[0])
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stop:
            status = stop.code
    sys.path[:] = path
    for name in [name for name, module in sys.modules.items() if "/chapters/" in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
    print(json.dumps([words, status, said.getvalue()]))
print(json.dumps(["torch" in sys.modules]))
"""


def test_a_place_that_cannot_be_written_is_one_line_in_every_program_before_torch_is_loaded(folder: Path) -> None:
    (folder / "read-only").mkdir(mode=0o555)
    jobs, flags = [], []
    for words, flag, _ in WRITERS.values():
        for place in UNWRITABLE:
            if place.startswith("{t}") and os.geteuid() == 0:
                continue  # root may write to it
            if place == "corpus.json" and flag in ("--json", "--gguf", "--timeline", "--profile", "--train"):
                continue  # a file that may be replaced
            if place == "corpus.json" and "gpt2_chinese.generate" in words:
                continue
            place = place.replace("{t}", str(folder))
            place += ".txt" if "gpt2_chinese.vocabulary" in words and place != "corpus.json" else ""
            jobs.append([*words, flag, place])
            flags.append((flag, place))
    before = entries(folder)
    done = subprocess.run([sys.executable, "-c", RUNS_ALL], input=json.dumps(jobs), capture_output=True, text=True,
                          timeout=HANGS_S, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder)  # fmt: skip
    *answers, (loaded,) = map(json.loads, done.stdout.splitlines())
    assert len(answers) == len(jobs), done.stderr
    for (flag, place), (words, status, said) in zip(flags, answers, strict=True):
        assert status == 2 and said.startswith("error: ") and said.count("\n") == 1, (words, status, said)
        assert place in said, (flag, words, said)
    assert not loaded and entries(folder) == before


@pytest.mark.parametrize("name, line", [
    ("metrics.jsonl", r"metrics.jsonl is no file; give another folder"),
    ("checkpoints", r"checkpoints is no folder; give another folder"),
])  # fmt: skip
def test_an_output_folder_with_something_else_in_the_runs_place_is_refused(folder, capfd, name: str, line: str) -> None:
    (folder / "run").mkdir()
    (folder / "run" / name).mkdir() if "." in name else (folder / "run" / name).write_text("")
    program = str(ROOT / "chapters" / "00_single" / "train.py")
    flags = ["--train-data", "corpus.json", "--vocab", "vocab.txt", "--model-config", "config.json", "--output-dir", "run"]
    with pytest.raises(SystemExit) as stop:
        resolve(settings_of("00_single").from_command_line(program, None, flags))
    assert stop.value.code == 2 and line in capfd.readouterr().err


# ---- the reader of the output is gone

PRINTING = {
    "plan": ["-m", "pstar.cli", "plan", "--model", "10B"],
    "help": ["-m", "gpt2_chinese.corpora", "convert", "--help"],
    "tokens": ["-m", "gpt2_chinese.tokens", "--corpus", "corpus.json", "--vocab", "vocab.txt"],
    "an error": ["-m", "gpt2_chinese.tokens", "--corpus", "none.json"],
}


@pytest.mark.parametrize("case", PRINTING)
def test_a_program_whose_reader_is_gone_ends_without_a_word(case: str, folder: Path) -> None:
    """Both outputs are pipes that nobody reads any more; what the program says all the same goes to a third."""
    ends = []
    for _ in range(2):
        reading, writing = os.pipe()
        os.close(reading)
        ends.append(writing)
    third_reads, third = os.pipe()
    says = "import os, sys\ntrace = sys.excepthook\nsys.unraisablehook = sys.excepthook = lambda *what: os.write(" \
           f"{third}, repr(what).encode())\n"  # fmt: skip
    _, module, *_ = words = PRINTING[case]
    target = f"import runpy\nsys.argv = {words[1:]!r}\nrunpy.run_module({module!r}, run_name='__main__')\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", says + target], stdout=ends[0], stderr=ends[1], pass_fds=[third],
                               env=environment, cwd=folder)  # fmt: skip
    for handle in (*ends, third):
        os.close(handle)
    with open(third_reads, "rb") as stream:
        said = stream.read()
    assert process.wait(timeout=HANGS_S) == 128 + signal.SIGPIPE
    assert said == b"", said


def test_a_broken_pipe_of_something_else_is_an_error_as_before() -> None:
    from durable.closed_pipe import exit_on_closed_pipe

    with pytest.raises(BrokenPipeError), exit_on_closed_pipe():
        raise BrokenPipeError("of a socket")


# ---- a run that is complete already

SECOND_CALLS = """
import contextlib, io, json, pathlib, runpy, sys
sys.modules["torch"] = None
for program, output in json.load(sys.stdin):
    said, path = io.StringIO(), list(sys.path)
    sys.argv = [program, "--output-dir", output]
    sys.path.insert(0, program.rpartition("/")[0])
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as stop:
            status = stop.code
    sys.path[:] = path
    for name in [name for name, module in sys.modules.items() if "/chapters/" in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
    print(json.dumps([status, said.getvalue()]))
"""


def finished_run(output: Path, chapter: str, command: list[str]) -> None:
    """What a run of 12 steps leaves behind, as far as a second call reads it."""
    from gpt2_chinese.checkpoint.sealed_folder import seal

    final, step = output / "final", output / "checkpoints" / "step_000012"
    final.mkdir(parents=True)
    step.mkdir(parents=True)
    (output / "config.json").write_text(json.dumps({"chapter": chapter, "command": command, "max_steps": 12}))
    (final / "run.json").write_text(json.dumps({"step": 12}))
    (step / "state.json").write_text(json.dumps({"step": 12}))
    for name in ("config.json", "model.safetensors"):
        (final / name).write_text("{}")
    seal(final)


def test_the_same_command_of_every_chapter_says_that_its_run_is_complete_without_torch(tmp_path: Path) -> None:
    jobs = []
    for chapter in CHAPTERS:
        output = tmp_path / chapter
        finished_run(output, chapter, ["--output-dir", str(output)])
        jobs.append((str(ROOT / "chapters" / chapter / "train.py"), str(output)))
    done = subprocess.run([sys.executable, "-c", SECOND_CALLS], input=json.dumps(jobs), capture_output=True, text=True,
                          timeout=HANGS_S, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CHAPTERS), done.stderr
    for (_, output), (status, said) in zip(jobs, answers, strict=True):
        assert status == 0 and said.startswith(f"This run is complete: 12 steps, in {output}\n") and "generate.sh" in said


@pytest.mark.parametrize("change", ["another command", "a lost checkpoint", "a damaged weight", "another step", "never"])
def test_any_difference_to_a_complete_run_is_looked_at_as_before(change: str, tmp_path: Path) -> None:
    from gpt2_chinese.run.resolve import _steps_of_the_same_command

    flags = ["--output-dir", str(tmp_path / "run"), "--resume", "never" if change == "never" else "auto"]
    finished_run(tmp_path / "run", "00_single", flags + ["--lr", "1"] * (change == "another command"))
    if change == "a lost checkpoint":
        (tmp_path / "run" / "checkpoints" / "step_000012" / "state.json").unlink()
    if change == "a damaged weight":
        (tmp_path / "run" / "final" / "model.safetensors").write_text("[]")
    if change == "another step":
        content = {"chapter": "00_single", "command": flags, "max_steps": 13}
        (tmp_path / "run" / "config.json").write_text(json.dumps(content))
    program = str(ROOT / "chapters" / "00_single" / "train.py")
    assert _steps_of_the_same_command(settings_of("00_single").from_command_line(program, None, flags)) is None
